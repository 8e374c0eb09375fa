"""Configurations as they are published, cut to two small layers."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from shardwright.models.registry import FAMILIES

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_SMALL = {
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **{"num_key_value_heads": 2, "vocab_size": 96, "image_size": 16, "patch_size": 4, "num_mel_bins": 6},
    **{"max_source_positions": 20, "max_target_positions": 32, "image_token_index": 95, "mm_tokens_per_image": 4},
}
_PARTS = ("text_config", "vision_config")


def cut(config: Mapping[str, Any], part: str | None = None) -> dict[str, Any]:
    """A configuration of two layers of small sizes; what it says else stays: norms, biases, angles, activations."""
    facts = FAMILIES.get(config.get("model_type", ""))
    small = dict(deepcopy(config))
    for key, value in _SMALL.items():
        # A nested part may leave out what its class has: it is small, too.
        if small.get(key) is not None or (key in _of_part(part)):
            small[key] = value
    for key, value in list(small.items()):
        if key in _PARTS and isinstance(value, Mapping):
            small[key] = cut(value, key)
        elif key.endswith("_token_id") and value is not None:
            small[key] = 90 if isinstance(value, int) else [90]
        elif facts is not None and key in facts.dropouts.keys:
            small[key] = 0.0
    # Tokens that their classes have beyond 96.
    usual = ("bos_token_id", "eos_token_id", "pad_token_id")
    more = {"phi3": usual, "whisper": (*usual, "decoder_start_token_id")}.get(config.get("model_type", ""), ())
    small |= dict.fromkeys(more, 90)
    if facts is not None:
        small |= dict.fromkeys((key for key in facts.dropouts.keys if key in facts.keys.defaults), 0.0)
    return small


def _of_part(part: str | None) -> frozenset[str]:
    usual = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    further = {
        "text_config": ("vocab_size", "num_key_value_heads", "head_dim"),
        "vision_config": ("image_size", "patch_size"),
    }
    return frozenset() if part is None else frozenset((*usual, *further[part]))
