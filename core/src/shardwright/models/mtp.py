"""Multi-token prediction (MTP; DeepSeek-AI 2024, DeepSeek-V3, section 2.2): layers added to a model."""

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.registry import facts_of
from shardwright.models.traits import Mask
from shardwright.types import EMBEDDING, HEAD, LayerType, Model, Parameter

MTP = ".mtp"
"""End of the names of their types, after the name of the model's last layer."""


def mtp_layers(layers: tuple[str, ...]) -> int:
    """Return the number of a model's last layers that predict further tokens."""
    return sum(name.endswith(MTP) for name in layers)


def with_mtp(model: Model, number: int) -> Model:
    """Return a model with additional layers that predict further tokens, as Megatron-LM computes them.

    Each is a layer like the last one after a product of twice as many features, and has a copy of the token table, as
    the last pipeline stage there; the head computes their logits and losses, too. Estimated, not trained.
    """
    if not number:
        return model
    family, last = facts_of(model), model.types[model.layers[-1]]
    predicts = family.attention.mask is Mask.CAUSAL and len(family.states) == 1
    if not predicts or model.is_frozen or model.low_rank is not UNSET:
        raise BadInput("--mtp", f"{model.name} is not a causal language model that is trained whole", "leave it out")
    name, head = f"{model.layers[-1]}{MTP}", model.types[HEAD]
    more = replace(
        head, labels=head.labels * (1 + number), forward_flops_per_sample=head.forward_flops_per_sample * (1 + number)
    )
    types = {**model.types, name: _mtp_type(model, last), HEAD: more}
    return replace(model, layers=(*model.layers, *[name] * number), types=types)


def _mtp_type(model: Model, last: LayerType) -> LayerType:
    (tensor,) = last.outputs
    hidden = tensor.features
    table = next(p for p in model.types[EMBEDDING].parameters if p.tp_dim is not None)
    norms = (Parameter(name=f"mtp.{name}.weight", shape=(hidden,)) for name in ("enorm", "hnorm", "final_layernorm"))
    product = Parameter(name="mtp.eh_proj.weight", shape=(hidden, 2 * hidden), tp_dim=0)
    return replace(
        last,
        parameters=(*last.parameters, *norms, product, replace(table, name="mtp.embed_tokens.weight")),
        forward_flops_per_sample=last.forward_flops_per_sample + 4 * hidden**2 * tensor.sequence_length,
    )
