"""Tiny configurations of models that read images and a text."""

from typing import Any

MULTI_MODAL: dict[str, dict[str, Any]] = {
    "llava": {
        "model_type": "llava",
        "image_token_index": 60,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 12,
            "patch_size": 4,
        },
    },
}
