"""Command R7B (Cohere 2024): Command R whose blocks with a window alone rotate queries and keys."""

from msgspec.structs import replace

from shardwright_models.facts import FULL, SLIDING, Config, Only, Stack
from shardwright_models.families.cohere import COHERE

_PATTERN = "sliding_window_pattern"


def _type_at(config: Config, index: int) -> str:
    return SLIDING if (index + 1) % config[_PATTERN] else FULL


_ONLY = {
    "use_gated_activation": Only(True, "feed-forward parts have a gate"),
    "use_parallel_block": Only(True, "attention and feed-forward are beside each other"),
    "rotary_pct": Only(1.0, "all features of a head are rotated"),
    "position_embedding_type": Only("rope_gptj", "features of a head are rotated in pairs"),
    "order_of_interleaved_layers": Only("local_attn_first", "the last of some blocks has no window"),
}
# Only what a window limits has its positions encoded: blocks are never alike.
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    stock="Cohere2ForCausalLM",
    stacks=(Stack(types=(SLIDING, FULL), type_at=_type_at, typed_by="layer_types"),),
    defaults={**COHERE.defaults, "sliding_window": 4096, _PATTERN: 4},
    lengths=(*COHERE.lengths, _PATTERN),
    window=lambda layer, config: config["sliding_window"] if layer == SLIDING else None,
    ignored=(
        _PATTERN,
        "cache_implementation",
        "layer_switch",
        "use_parallel_embedding",
        "use_embedding_sharing",
        *_ONLY,
    ),
    only=_ONLY,
)
