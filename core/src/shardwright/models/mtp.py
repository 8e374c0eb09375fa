"""Multi-token prediction (MTP; DeepSeek-AI 2024, DeepSeek-V3, section 2.2): layers added to a model.

The layer of depth k computes, from the states h of the previous depth (for depth 1: of the model's last layer, after
the final norm) and from the tokens k positions ahead,

    h_k = norm(block(eh_proj [enorm(embedding(tokens ahead)); hnorm(h)])),

from which the head computes logits, too. Names and order are as in the published files.
"""

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.registry import facts_of
from shardwright.models.traits import Mask
from shardwright.types import EMBEDDING, HEAD, LayerType, Model, Parameter, Region

MTP = ".mtp"
"""What follows the name of the model's last layer type in the names of MTP types; from depth 2 on, followed by the
depth."""
TABLE, FINAL_NORM = "embed_tokens", "final_norm"
"""Modules of such a layer that are copies: of the token table, and, at depth 1, of the norm before the head."""
NORMS = ("enorm", "hnorm", "shared_head.norm")
"""Norms of such a layer: of the tokens' embeddings, of the states before the layer, and of its block's states."""
PROJECTION = "eh_proj"
"""Matrix of such a layer, with twice as many inputs as features: first the embeddings, then the states."""
DEPTHS_KEY = "num_nextn_predict_layers"
"""The key of a config.json with the number of these layers, which are not included in num_hidden_layers."""


def mtp_type(last: str, depth: int) -> str:
    """Return the type name of the layer of a depth, in a model whose last layer has the type `last`."""
    return f"{last}{MTP}{depth if depth > 1 else ''}"


MTP_TYPES = tuple(mtp_type("", depth) for depth in range(1, 9))
"""The ends of the type names of all depths that `--mtp` accepts."""


def mtp_depth(name: str) -> int:
    """Return the depth of a layer type, or 0 if it does not predict further tokens."""
    _, found, depth = name.partition(MTP)
    return int(depth or 1) if found else 0


def mtp_layers(layers: tuple[str, ...]) -> int:
    """Return the number of layers, at a model's end, that predict further tokens."""
    return sum(mtp_depth(name) > 0 for name in layers)


def mtp_state(depth: int) -> str:
    """Return the name of the boundary tensor that a depth adds."""
    return f"mtp_states_{depth}"


def with_mtp(model: Model, number: int) -> Model:
    """Return a model with `number` additional layers that predict further tokens.

    Each is a layer like the last one, preceded by norms, a matrix product with twice as many input features, and a copy
    of the token table; the head computes logits and losses for them, too. The cost model is the same for systems that
    compute this differently.
    """
    if not number:
        return model
    family = facts_of(model)
    predicts = family.attention.mask is Mask.CAUSAL and len(family.states) == 1
    if not predicts or model.is_frozen or model.low_rank is not UNSET:
        raise BadInput("--mtp", f"{model.name} is not a causal language model that is trained whole", "leave it out")
    last, head = model.layers[-1], model.types[HEAD]
    types = {mtp_type(last, depth): _mtp_type(model, model.types[last], depth) for depth in range(1, number + 1)}
    (logits,) = head.regions
    entering = (*logits.enters, *(mtp_state(depth) for depth in range(1, number + 1)))
    more = replace(
        head,
        labels=head.labels * (1 + number),
        forward_flops_per_sample=head.forward_flops_per_sample * (1 + number),
        regions=(replace(logits, enters=entering),),
    )
    return replace(model, layers=(*model.layers, *types), types={**model.types, **types, HEAD: more})


def without_mtp(layers: tuple[str, ...]) -> tuple[str, ...]:
    """Return a model's layers without those that predict further tokens."""
    return layers[: len(layers) - mtp_layers(layers)]


def _mtp_type(model: Model, last: LayerType, depth: int) -> LayerType:
    (stream,), name = last.outputs, mtp_state(depth)
    hidden = stream.features
    outputs = (stream, *(replace(stream, name=mtp_state(each)) for each in range(1, depth + 1)))
    return replace(
        last,
        parameters=(*last.parameters, *_further_parameters(model, hidden, depth)),
        forward_flops_per_sample=last.forward_flops_per_sample + 4 * hidden**2 * stream.sequence_length,
        outputs=outputs,
        regions=(Region(name="lookup", leaves=name), *(_of_state(region, name) for region in last.regions)),
    )


def _further_parameters(model: Model, hidden: int, depth: int) -> tuple[Parameter, ...]:
    head = model.types[HEAD].parameters
    path = head[0].name.rpartition(".")[0]
    norm = {p.name.rpartition(".")[2]: p for p in head if p.name.rpartition(".")[0] == path}
    table = next(p for p in model.types[EMBEDDING].parameters if p.tp_dim is not None)
    made = [replace(p, name=f"{module}.{kind}") for module in NORMS for kind, p in norm.items()]
    made += [replace(p, name=f"{FINAL_NORM}.{kind}", copy_of=p.name) for kind, p in norm.items() if depth == 1]
    made.append(Parameter(name=f"{PROJECTION}.weight", shape=(hidden, 2 * hidden)))
    return (*made, replace(table, name=f"{TABLE}.weight", copy_of=table.name))


def _of_state(region: Region, name: str) -> Region:
    """Return a region of a block that works on the states of a depth; a norm follows, so that these are kept."""
    heads = None if region.attention is None else replace(region.attention, queries=name, keys=name)
    kinds = ("full",) if region.name == "mlp" and "full" not in region.replays_sum else ()
    replays = (*kinds, *region.replays_sum)
    return replace(region, enters=(name,), leaves=name, attention=heads, replays_sum=replays)
