"""Tiny configurations of newer language models."""

from typing import Any

LAYERS = 4

DECODERS: dict[str, dict[str, Any]] = {
    "baichuan": {
        "model_type": "baichuan",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-6,
        "model_max_length": 64,
        "z_loss_weight": 0,
        "tie_word_embeddings": False,
    },
    "phi3": {
        "model_type": "phi3",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 12,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 8,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.5], "long_factor": [3.0]},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    "ministral": {
        "model_type": "ministral",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "smollm3": {
        "model_type": "smollm3",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
}
