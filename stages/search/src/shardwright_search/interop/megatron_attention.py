"""Attention in Megatron-LM's arguments: heads, and the latents that they may be computed from."""

from collections.abc import Mapping

from shardwright_formats.types import Heads
from shardwright_models.latents import Latents

Arguments = Mapping[str, str | int | float]


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
