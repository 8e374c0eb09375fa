"""Configurations of DeepSeek, as published, and what of them cannot be trained."""

from typing import Any

Config = dict[str, Any]


def deepseek(hidden: int, inner: int, of_expert: int, layers: int, heads: int, **more: Any) -> Config:
    """The keys that V2 and V3 have in common."""
    scaling = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
    shape = {"hidden_size": hidden, "intermediate_size": inner, "moe_intermediate_size": of_expert}
    numbers = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    rest = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02}
    rest |= {"max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "use_cache": True}
    rest |= {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "ep_size": 1, "moe_layer_freq": 1}
    return shape | numbers | latents | rest | {"auto_map": {}, "rope_scaling": scaling | more.pop("scaling")} | more


def deepseek_v2(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400}
    kind |= {"bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "scoring_func": "softmax"}
    experts = {"n_shared_experts": 2, "num_experts_per_tok": 6, "norm_topk_prob": False, "seq_aux": True}
    scaling = {"mscale": 0.707, "mscale_all_dim": 0.707}
    return deepseek(*shape, scaling=scaling, aux_loss_alpha=0.001, **kind, **experts, **more)


_LITE = deepseek_v2(
    *(2048, 10944, 1408, 27, 16),
    **{"n_routed_experts": 64, "q_lora_rank": None, "routed_scaling_factor": 1.0},
    **{"topk_method": "greedy", "n_group": 1, "topk_group": 1},
)
_V2 = deepseek_v2(
    *(5120, 12288, 1536, 60, 128),
    **{"n_routed_experts": 160, "q_lora_rank": 1536, "routed_scaling_factor": 16.0},
    **{"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
)


def deepseek_v3(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280}
    kind |= {"bos_token_id": 0, "eos_token_id": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    experts = {"n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_nextn_predict_layers": 1}
    experts |= {"n_routed_experts": 256, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
    scaling = {"mscale": 1.0, "mscale_all_dim": 1.0}
    return deepseek(*shape, scaling=scaling, q_lora_rank=1536, **kind | experts | more)


_V3 = deepseek_v3(7168, 18432, 2048, 61, 128, routed_scaling_factor=2.5)
LATENTS = {
    "DeepSeek-V2-Lite": (_LITE, 4096, 15_706_484_224),
    "DeepSeek-V2": (_V2, 4096, 235_741_434_880),
    # Without the layer that predicts a further token.
    "DeepSeek-V3": (_V3, 4096, 671_026_404_352),
}
REFUSED_LATENTS = [
    (_LITE | {"num_key_value_heads": 8}, 64, "num_key_value_heads 8 is not num_attention_heads 16"),
    (_LITE | {"topk_method": "noaux_tc"}, 64, "topk_method 'noaux_tc' is neither greedy nor group_limited_greedy"),
    (_LITE | {"scoring_func": "sigmoid"}, 64, 'scoring_func "sigmoid" cannot be trained: transformers has no other'),
    (_LITE | {"moe_layer_freq": 2}, 64, "moe_layer_freq 2 cannot be trained: all blocks after the first"),
    (_LITE | {"n_shared_experts": 0}, 64, "n_shared_experts must be a whole number from 1"),
    (_V3 | {"scoring_func": "softmax"}, 64, 'scoring_func "softmax" cannot be trained: transformers has no other'),
    (_V3 | {"topk_method": "greedy"}, 64, 'topk_method "greedy" cannot be trained: experts are chosen by corrected'),
    (_V3 | {"n_group": 256, "topk_group": 8}, 64, "n_group 256 makes no groups of 2 or more of n_routed_experts 256"),
    (_V2 | {"n_group": 7}, 64, "n_group 7 makes no groups of 1 or more of n_routed_experts 160"),
    (_V2 | {"topk_group": 9}, 64, "topk_group 9 is over n_group 8"),
    (_V2 | {"num_experts_per_tok": 61}, 64, "num_experts_per_tok 61 is over the 60 experts of 3 groups"),
]
