"""config.json of newer language models as they are published, and what of them cannot be trained."""

from typing import Any

Config = dict[str, Any]


def smollm3(**more: Any) -> Config:
    shape = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
    kind = {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 4}
    rotary = {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "rope_theta": 5e6, "rope_scaling": None}
    window = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}
    tokens = {"bos_token_id": 128000, "eos_token_id": 128012, "pad_token_id": 128004, "vocab_size": 128256}
    numbers = {"max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "initializer_range": 0.02}
    biases = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"}
    rest = {"layer_types": ["full_attention"] * 36, "pretraining_tp": 2, "use_cache": False}
    return shape | kind | rotary | window | tokens | numbers | biases | rest | more


DECODERS: dict[str, tuple[Config, int, int]] = {
    "SmolLM3-3B": (smollm3(), 16384, 3_075_098_624),
}
"""config.json, a length to train with, and the published number of parameters."""

_WINDOWED = ["full_attention"] * 3 + ["sliding_attention"]
REFUSED_DECODERS: list[tuple[Config, int, str]] = [
    (smollm3(no_rope_layers=[1, 1, 2, 0] * 9), 64, "no_rope_layers 2 is none of 1, 0"),
    (smollm3(no_rope_layers=[1, 0]), 64, "no_rope_layers is no list of the types of 36 layers"),
    (smollm3(use_sliding_window=True, sliding_window=512), 64, "use_sliding_window true cannot be trained"),
    (smollm3(layer_types=_WINDOWED * 9), 64, "layer_types 'sliding_attention' cannot be trained"),
]
