"""The arguments of Megatron-LM that say what a model is, by its shapes and configuration.

Names are those of `_add_network_size_args`, `_add_regularization_args` and `_add_data_args` in
`megatron/training/arguments.py`, late 2025; megatron-core 0.16 has the same names in its TransformerConfig.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright_formats.types import Heads, Model
from shardwright_models.facts import Family
from shardwright_models.registry import FAMILIES
from shardwright_search.interop.target import Target

Options = Mapping[str, str | int | float]
"""Options by name; True for one without a value, False for one that is left out."""


def model_options(model: Model, target: Target) -> Options:
    """Sizes of any model with layers of one type; of those that it runs exactly also norms, positions and biases.

    Raises BadInput for biases that Megatron-LM cannot be told of.
    """
    block = model.types[model.layers[0]]
    hidden = model.boundary[0].features
    heads = next((region.attention for region in block.regions if region.attention is not None), None)
    family = FAMILIES.get(model.family)
    inner = None if family is None else block.tp_must_divide.get(family.divided[-1])
    options: dict[str, str | int | float] = {"--num-layers": len(model.layers), "--hidden-size": hidden}
    options |= {} if inner is None else {"--ffn-hidden-size": inner}
    options |= {} if heads is None else _heads(heads, hidden)
    options["--seq-length"] = model.sequence_length
    positions = model.config.get("max_position_embeddings", model.config.get("n_positions"))
    options["--max-position-embeddings"] = positions if isinstance(positions, int) else model.sequence_length
    vocabulary = model.config.get("vocab_size")
    if isinstance(vocabulary, int):
        # A plan pads nothing that tensor parallelism does not need.
        options |= {"--vocab-size": vocabulary, "--make-vocab-size-divisible-by": 1}
    options["--untie-embeddings-and-output-weights"] = not model.tied
    return {**options, **(_exact(family, model, target) if family is not None and family.megatron else {})}


def model_notes(model: Model) -> Iterator[str]:
    """What of the model the arguments cannot hold."""
    family = FAMILIES.get(model.family)
    if isinstance(model.config.get("vocab_size"), int):
        yield "--vocab-size is of its NullTokenizer; another tokenizer brings its own"
    if family is None or not family.megatron:
        yield f"of a {model.family} model it is told the sizes alone: norms, positions and activations are yours"
    scaling = _rope(model.config).get("rope_type", "default")
    if family is not None and family.positions == "rope" and scaling not in ("default", "llama3"):
        yield f"rotary embeddings of type {scaling} are not in the file"


def _heads(heads: Heads, hidden: int) -> Options:
    options: dict[str, str | int | float] = {"--num-attention-heads": heads.heads}
    if heads.head_features * heads.heads != hidden:
        options["--kv-channels"] = heads.head_features
    if heads.kv_heads != heads.heads:
        options |= {"--group-query-attention": True, "--num-query-groups": heads.kv_heads}
    return options


def _exact(family: Family, model: Model, target: Target) -> Options:
    """Return what a family's facts say beside sizes."""
    config, rope, hidden = family.configured(model.config), _rope(model.config), family.dropouts.hidden
    rotary = family.positions == "rope"
    options: dict[str, str | int | float] = {
        "--position-embedding-type": family.positions,
        "--rotary-base": rotary and int(rope.get("rope_theta", 10000)),
        "--normalization": family.norm.kind,
        "--norm-epsilon": config[family.norm.epsilon],
        "--swiglu": family.feed_forward(config).gated,
        "--attention-dropout": config[family.dropouts.attention],
        "--hidden-dropout": 0.0 if hidden is None else config[hidden],
        "--qk-layernorm": any(p.name.endswith("q_norm.weight") for p in model.types[model.layers[0]].parameters),
        **_biases(model, target),
    }
    if rotary and rope.get("rope_type") == "llama3":
        options |= {"--use-rope-scaling": True, "--rope-scaling-factor": rope.get("factor", 8.0)}
    return options


def _biases(model: Model, target: Target) -> Options:
    """All matrices have biases, none, or queries, keys and values alone."""
    parameters = model.types[model.layers[0]].parameters
    matrices = {p.name.removesuffix(".weight") for p in parameters if p.name.endswith(".weight") and len(p.shape) > 1}
    biased = matrices & {p.name.removesuffix(".bias") for p in parameters}
    inputs = {name for name in matrices if name.endswith(("q_proj", "k_proj", "v_proj"))}
    remedy = "set attention_bias and mlp_bias alike"
    target.demand(biased in (set(), inputs, matrices), "biases of some matrices of a layer", remedy)
    return {"--disable-bias-linear": biased != matrices, "--add-qkv-bias": bool(biased) and biased == inputs}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters: newer files gather them under one key, older ones have the base beside the scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own = dict(scaling) if isinstance(scaling, Mapping) else {}
    own.setdefault("rope_type", own.pop("type", "default"))
    if "rope_theta" in config:
        own.setdefault("rope_theta", config["rope_theta"])
    return own
