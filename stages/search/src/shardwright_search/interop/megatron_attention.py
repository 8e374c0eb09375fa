"""Attention in Megatron-LM's arguments: heads, and the latents that they may be computed from."""

from collections.abc import Mapping
from typing import Any

from shardwright_formats.types import Heads
from shardwright_models.latents import Latents

Arguments = Mapping[str, str | int | float]
"""Arguments by name; True for one without a value, False for one that is left out."""
_YARN = {"factor": "--rotary-scaling-factor", "mscale": "--mscale", "mscale_all_dim": "--mscale-all-dim"}
_ORIGINAL = "original_max_position_embeddings"
_FIXED = {_ORIGINAL: 4096, "beta_fast": 32, "beta_slow": 1}
"""Keys of YaRN without an option, with the values that `MLATransformerConfig` has."""


def head_options(heads: Heads, hidden: int, latents: Latents | None) -> Arguments:
    """Return the heads of attention; `latents` are those that queries, keys and values come from, None without."""
    options: dict[str, str | int | float] = {"--num-attention-heads": heads.heads}
    if latents is not None:
        return {**options, **_latent_options(heads, latents)}
    if heads.head_features * heads.heads != hidden:
        options["--kv-channels"] = heads.head_features
    if heads.kv_heads != heads.heads:
        options |= {"--group-query-attention": True, "--num-query-groups": heads.kv_heads}
    return options


def _latent_options(heads: Heads, latents: Latents) -> Arguments:
    """Return the features of attention from latents, whose keys have rotated features that all heads share."""
    queries = {} if latents.queries is None else {"--q-lora-rank": latents.queries}
    return {
        "--multi-latent-attention": True,
        **queries,
        "--kv-lora-rank": latents.keys,
        "--qk-head-dim": heads.head_features - latents.rotated,
        "--qk-pos-emb-head-dim": latents.rotated,
        "--v-head-dim": heads.features_of_values,
    }


def latent_rope_options(rope: Mapping[str, Any]) -> Arguments:
    """Return the rotary embeddings of attention from latents, which Megatron-LM scales by YaRN unless it is told."""
    if rope["rope_type"] != "yarn":
        return {"--rope-type": "rope"}
    return {"--rope-type": "yarn"} | {option: float(rope[key]) for key, option in _YARN.items() if key in rope}


def other_latent_rope(rope: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Return the keys of YaRN that have other values than Megatron-LM's, which no option changes.

    A configuration without the original length means its longest one (transformers, modeling_rope_utils).
    """
    given = {**_FIXED, _ORIGINAL: config.get("max_position_embeddings"), **rope}
    return [f"{key} {given[key]}" for key, value in _FIXED.items() if given[key] != value]
