"""config.json of newer language models as they are published, and what of them cannot be trained."""

from typing import Any

Config = dict[str, Any]


def grouped(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int) -> Config:
    """What files of Llama's kin have alike."""
    shape = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu"}
    numbers = {"initializer_range": 0.02, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "use_cache": True}
    return shape | heads_of | numbers | {"torch_dtype": "bfloat16", "tie_word_embeddings": False}


def glm_4(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "head_dim": 128, "attention_dropout": 0.0}
    tokens = {"vocab_size": 151552, "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329}
    return grouped(*shape) | kind | tokens | {"max_position_embeddings": 32768, "partial_rotary_factor": 0.5} | more


def granite(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True}
    tokens = {"vocab_size": 49155, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    usual = {"attention_bias": False, "attention_dropout": 0.1, "mlp_bias": False, "rope_scaling": None}
    scales = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "max_position_embeddings": 4096}
    return grouped(*shape) | kind | tokens | usual | scales | more


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


_LENGTHS = "max_position_embeddings", "original_max_position_embeddings"


def phi3(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    shape = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    kind = {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "hidden_act": "silu", "use_cache": True}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    code = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
    dropout = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_bias": False}
    tokens = {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "vocab_size": 32064}
    lengths = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "sliding_window": 2047}
    numbers = {"initializer_range": 0.02, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0}
    tied = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "auto_map": code}
    return shape | kind | heads_of | dropout | tokens | lengths | numbers | tied | more


def stretched(**more: Any) -> Config:
    """What Phi files for 131072 positions have; the factors, one for each pair of features, are others."""
    factors = {"long_factor": [4.0] * 48, "short_factor": [1.0] * 48}
    return {"rope_scaling": {"type": "longrope", **factors}, "max_position_embeddings": 131072} | more


def ministral(**more: Any) -> Config:
    """Ministral 8B, of which files for older versions of transformers say that it is a Mistral."""
    shape = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    kind = {"num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "attention_dropout": 0.0}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 131072, "max_position_embeddings": 32768}
    numbers = {"rms_norm_eps": 1e-05, "rope_theta": 1e8, "sliding_window": 32768, "tie_word_embeddings": False}
    return shape | kind | tokens | numbers | more


def ministral3(**more: Any) -> Config:
    """Ministral 3 8B, of which files name a model with images that holds this one."""
    config = ministral(model_type="ministral3", intermediate_size=14336, num_hidden_layers=34, sliding_window=None)
    rotary = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rotary |= {"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaled = {"max_position_embeddings": 262144, "llama_4_scaling_beta": 0.1}
    del config["rope_theta"]
    return config | {"max_position_embeddings": 262144, "rope_parameters": rotary | scaled} | more


def llama_4(experts: int, step: int, **more: Any) -> Config:
    kind = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "for_llm_compressor": False}
    tokens = {"vocab_size": 202048, "bos_token_id": 200000, "eos_token_id": [200001, 200007], "pad_token_id": 200018}
    routing = {"num_local_experts": experts, "num_experts_per_tok": 1, "interleave_moe_layer_step": step}
    blocks = {"moe_layers": [i for i in range(48) if (i + 1) % step == 0], "no_rope_layers": [1, 1, 1, 0] * 12}
    loss = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0}
    attention = {"attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "head_dim": 128}
    scales = {"attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192, "use_qk_norm": step == 1}
    long = {"intermediate_size_mlp": 16384, "max_position_embeddings": 1048576, "rope_theta": 500000.0}
    shape = grouped(5120, 8192, 48, 40, 8)
    return shape | kind | tokens | routing | blocks | loss | attention | scales | long | more


DECODERS: dict[str, tuple[Config, int, int]] = {
    "Llama-4-Scout, its language model": (llama_4(16, 1), 8192, 107_769_861_120),
    "Llama-4-Maverick, its language model": (llama_4(128, 2), 8192, 400_711_848_960),
    "SmolLM2-1.7B": (
        grouped(2048, 8192, 24, 32, 32)
        | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "bos_token_id": 1}
        | {"eos_token_id": 2, "max_position_embeddings": 8192, "rope_theta": 130000, "tie_word_embeddings": True}
        | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        8192,
        1_711_376_384,
    ),
    "GLM-4-9B-0414": (glm_4(4096, 13696, 40, 32, 2, attention_bias=True), 8192, 9_400_279_040),
    "GLM-4-32B-0414": (glm_4(6144, 23040, 61, 48, 2, attention_bias=False), 8192, 32_566_081_536),
    "granite-3.0-2b": (
        granite(2048, 8192, 40, 32, 8, attention_multiplier=0.015625, logits_scaling=8.0),
        4096,
        2_533_531_648,
    ),
    "granite-3.0-8b": (
        granite(4096, 12800, 40, 32, 8, attention_multiplier=0.0078125, logits_scaling=16.0),
        4096,
        8_170_848_256,
    ),
    "SmolLM3-3B": (smollm3(), 16384, 3_075_098_624),
    "Ministral-8B-Instruct-2410": (ministral(model_type="mistral"), 8192, 8_019_808_256),
    "Ministral-8B-Instruct-2410, its own class": (
        ministral(model_type="ministral"),
        8192,
        8_019_808_256,
    ),
    "Ministral-3-8B-Base-2512, its language model": (ministral3(), 32768, 8_489_553_920),
    "Phi-3-mini-4k-instruct": (phi3(3072, 8192, 32, 32, 32), 4096, 3_821_079_552),
    "Phi-3-mini-128k-instruct": (phi3(3072, 8192, 32, 32, 32, **stretched()), 8192, 3_821_079_552),
    "Phi-3.5-mini-instruct": (
        phi3(3072, 8192, 32, 32, 32, **stretched(sliding_window=262144)),
        8192,
        3_821_079_552,
    ),
    "Phi-3-medium-4k-instruct": (phi3(5120, 17920, 40, 40, 10), 4096, 13_960_238_080),
    "phi-4": (
        phi3(5120, 17920, 40, 40, 10, **dict.fromkeys(_LENGTHS, 16384), sliding_window=None, rope_theta=250000)
        | {"vocab_size": 100352, "bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349},
        16384,
        14_659_507_200,
    ),
    "Phi-4-mini-instruct": (
        phi3(3072, 8192, 32, 24, 8, **stretched(sliding_window=262144), partial_rotary_factor=0.75)
        | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False}
        | {"vocab_size": 200064, "eos_token_id": 199999, "pad_token_id": 199999, "tie_word_embeddings": True},
        8192,
        3_836_021_760,
    ),
}
"""config.json, a length to train with, and the published number of parameters."""

_WINDOWED = ["full_attention"] * 3 + ["sliding_attention"]
REFUSED_DECODERS: list[tuple[Config, int, str]] = [
    (llama_4(16, 1), 8193, "sequence length 8193 is over the attention_chunk_size 8192: attention is whole"),
    (llama_4(16, 1, router_jitter_noise=0.1), 512, "router_jitter_noise 0.1 cannot be trained"),
    (
        ministral3(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        64,
        "rope_parameters: llama_4_scaling_beta None is not a number that queries can be scaled by",
    ),
    (granite(2048, 8192, 40, 32, 8, logits_scaling=0.0), 64, "logits_scaling 0.0 must be above 0"),
    (smollm3(no_rope_layers=[1, 1, 2, 0] * 9), 64, "no_rope_layers 2 is not one of 1, 0"),
    (smollm3(no_rope_layers=[1, 0]), 64, "no_rope_layers is not a list of the types of 36 layers"),
    (smollm3(use_sliding_window=True, sliding_window=512), 64, "use_sliding_window true cannot be trained"),
    (phi3(3072, 8192, 32, 32, 32, lm_head_bias=True), 64, "lm_head_bias true cannot be trained: matrices have no"),
    (phi3(3072, 8192, 32, 32, 32, rope_scaling={"type": "linear", "factor": 2.0}), 64, "must be one of ['longrope']"),
    (phi3(3072, 8192, 32, 32, 32, sliding_window=0), 64, "sliding_window must be a whole number from 1"),
    (smollm3(layer_types=_WINDOWED * 9), 64, "layer_types 'sliding_attention' cannot be trained"),
]
