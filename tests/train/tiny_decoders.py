"""Tiny configurations of newer language models."""

from typing import Any

LAYERS = 4
GROUPED = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Sizes of decoders whose heads share keys and values in pairs."""

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
    "cohere": {
        "model_type": "cohere",
        **GROUPED,
        "logit_scale": 0.3,
        "use_qk_norm": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    "cohere2": {
        "model_type": "cohere2",
        **GROUPED,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    "phi3": {
        "model_type": "phi3",
        **GROUPED,
        "sliding_window": 12,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 8,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "longrope", "short_factor": [1.5], "long_factor": [3.0]},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    "ministral": {
        "model_type": "ministral",
        **GROUPED,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "ministral3": {
        "model_type": "ministral3",
        **GROUPED,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "max_position_embeddings": 64, "llama_4_scaling_beta": 0.8},
            "original_max_position_embeddings": 4,
        },
    },
    "smollm3": {
        "model_type": "smollm3",
        **GROUPED,
        "no_rope_layer_interval": 2,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    },
    "llama4_text": {
        "model_type": "llama4_text",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 0, 0],
        "router_aux_loss_coef": 0.5,
        "initializer_range": 0.3,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_window": 6,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "max_position_embeddings": 128,
        "swiglu_limit": 0.5,
        "router_aux_loss_coef": 0.5,
        "initializer_range": 0.3,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {
        "model_type": "mistral",
        **GROUPED,
        "max_position_embeddings": 64,
        "sliding_window": 6,
    },
    "gemma2": {
        "model_type": "gemma2",
        "vocab_size": 61,
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 0.05,
        "final_logit_softcapping": 0.2,
        "sliding_window": 6,
    },
    "olmo2": {
        "model_type": "olmo2",
        **GROUPED,
        "max_position_embeddings": 64,
    },
}
DECODERS["deepseek_v2"] = {
    "model_type": "deepseek_v2",
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 8, "q_lora_rank": None, "kv_lora_rank": 12},
    **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 1.5},
    **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "aux_loss_alpha": 0.5},
    "initializer_range": 0.3,
    "max_position_embeddings": 32,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "beta_fast": 32}
    | {"beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7},
}
DECODERS["deepseek_v3"] = {key: value for key, value in DECODERS["deepseek_v2"].items() if "topk_m" not in key} | {
    **{"model_type": "deepseek_v3", "q_lora_rank": 10, "first_k_dense_replace": 1, "attention_bias": True},
    **{"num_key_value_heads": 8, "num_nextn_predict_layers": 0},
}
DECODERS["gemma3_text"] = DECODERS["gemma2"] | {
    **{"model_type": "gemma3_text", "sliding_window_pattern": 3, "rope_local_base_freq": 100.0},
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")),
}
