"""A model in Megatron-LM's arguments: all of it where its GPT runs the family's blocks exactly, else its sizes."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardwright_formats.types import Model
from shardwright_models.facts import Family
from shardwright_models.registry import FAMILIES
from shardwright_search.interop.limits import has_experts
from shardwright_search.interop.megatron_attention import (
    Arguments,
    head_options,
    latent_rope_options,
    other_latent_rope,
)
from shardwright_search.interop.megatron_experts import expert_model_options, routing_notes
from shardwright_search.interop.target import ExportTarget

_HEAD_NORMS = ("q_norm.weight", "kv_a_layernorm.weight")
"""Ends of the names of norms of queries, or of the latents of keys."""


def model_options(model: Model, target: ExportTarget) -> Arguments:
    """Return the sizes of a model whose layers differ in experts alone; of families it runs exactly, norms and more.

    Raises BadInput for biases that Megatron-LM has no option for.
    """
    block = model.types[model.layers[0]]
    hidden = model.boundary[0].features
    heads = next((region.attention for region in block.regions if region.attention is not None), None)
    family = FAMILIES.get(model.family)
    inner = None if family is None else block.tp_must_divide.get(family.divided[-1])
    options: dict[str, str | int | float] = {"--num-layers": len(model.layers), "--hidden-size": hidden}
    options |= {} if inner is None else {"--ffn-hidden-size": inner}
    latents = None if family is None else family.latents(family.configured(model.config))
    options |= {} if heads is None else head_options(heads, hidden, latents)
    options |= {} if family is None else expert_model_options(model, family, target)
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
    """Yield what the arguments cannot hold of the model."""
    family = FAMILIES.get(model.family)
    if isinstance(model.config.get("vocab_size"), int):
        yield "--vocab-size is of its NullTokenizer; another tokenizer brings its own"
    if family is None or not family.megatron:
        rest = "norms, positions and activations"
        if has_experts(model):
            rest = "norms, positions, activations and routers"
        yield f"of a {model.family} model it is told the sizes alone: {rest} are yours"
    if family is not None:
        yield from routing_notes(model, family)
    rope = _rope(model.config)
    known = ("default", "llama3") if family is None or family.latents(family.defaults) is None else ("default", "yarn")
    if family is not None and family.positions == "rope" and rope["rope_type"] not in known:
        yield f"rotary embeddings of type {rope['rope_type']} are not in the file"
    elif rope["rope_type"] == "yarn" and (others := other_latent_rope(rope, model.config)):
        yield f"Megatron-LM has no options for {', '.join(others)} of rotary embeddings of type yarn"


def _exact(family: Family, model: Model, target: ExportTarget) -> Arguments:
    """Return the options that follow from a family's facts."""
    config, rope, hidden = family.configured(model.config), _rope(model.config), family.dropouts.hidden
    if (window := model.types[model.layers[0]].window) is not None:
        target.demand(False, f"a sliding window of {window} positions", "describe the model for samples no longer")
    rotary, epsilon = family.positions == "rope", family.norm.epsilon
    options: dict[str, str | int | float] = {
        "--position-embedding-type": family.positions,
        "--rotary-base": rotary and int(rope.get("rope_theta", 10000)),
        "--normalization": family.norm.kind,
        "--norm-epsilon": 1e-5 if epsilon is None else config[epsilon],
        "--swiglu": family.feed_forward(config).gated,
        "--attention-dropout": config[family.dropouts.attention],
        "--hidden-dropout": 0.0 if hidden is None else config[hidden],
        "--qk-layernorm": any(p.name.endswith(_HEAD_NORMS) for p in model.types[model.layers[0]].parameters),
        **_biases(model, target),
    }
    if family.latents(config) is not None:
        options |= latent_rope_options(rope)
    elif rotary and rope.get("rope_type") == "llama3":
        options |= {"--use-rope-scaling": True, "--rope-scaling-factor": rope.get("factor", 8.0)}
    return options


def _biases(model: Model, target: ExportTarget) -> Arguments:
    """Return whether all matrices have biases, none, or queries, keys and values alone."""
    parameters = model.types[model.layers[0]].parameters
    matrices = {p.name.removesuffix(".weight") for p in parameters if p.name.endswith(".weight") and len(p.shape) > 1}
    biased = matrices & {p.name.removesuffix(".bias") for p in parameters}
    inputs = {name for name in matrices if name.endswith(("q_proj", "k_proj", "v_proj"))}
    remedy = "set attention_bias and mlp_bias alike"
    target.demand(biased in (set(), inputs, matrices), "biases of some matrices of a layer", remedy)
    return {"--disable-bias-linear": biased != matrices, "--add-qkv-bias": bool(biased) and biased == inputs}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters: newer files gather them under one key, older ones have the base beside the scaling."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(scaling) if isinstance(scaling, Mapping) else {}
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    if "rope_theta" in config:
        parameters.setdefault("rope_theta", config["rope_theta"])
    return parameters
