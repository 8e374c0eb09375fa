"""config.json of models whose blocks have windows by type, as published, and what of them cannot be trained."""

from typing import Any

Config = dict[str, Any]


def _shape(hidden: int, feed_forward: int, layers: int, heads: int, kv_heads: int) -> Config:
    shape = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    known = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "initializer_range": 0.02}
    return shape | known | {"use_cache": True, "torch_dtype": "bfloat16"}


def gemma_2(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "cache_implementation": "hybrid"}
    tokens = {"vocab_size": 256000, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    bounds = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
    activation = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    numbers = {"head_dim": 256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "sliding_window": 4096}
    usual = {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 10000.0}
    # Published files leave out that the embedding is tied.
    return _shape(*shape) | kind | tokens | bounds | activation | numbers | usual | more


def gemma_3(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "cache_implementation": "hybrid"}
    tokens = {"vocab_size": 262144, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    bounds = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "query_pre_attn_scalar": 256}
    numbers = {"head_dim": 256, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "sliding_window": 512}
    angles = {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window_pattern": 6}
    usual = {"attention_bias": False, "attention_dropout": 0.0, "hidden_activation": "gelu_pytorch_tanh"}
    return _shape(*shape) | kind | tokens | bounds | numbers | angles | usual | more


def command_r(*shape: int, **more: Any) -> Config:
    kind = {"model_type": "cohere", "architectures": ["CohereForCausalLM"], "hidden_act": "silu", "pretraining_tp": 1}
    tokens = {"vocab_size": 256000, "bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0}
    numbers = {"layer_norm_eps": 1e-05, "logit_scale": 0.0625, "rope_theta": 8000000.0, "attention_dropout": 0.0}
    lengths = {"max_position_embeddings": 8192, "model_max_length": 131072, "attention_bias": False}
    return _shape(*shape) | kind | tokens | numbers | lengths | more


def command_r7b(**more: Any) -> Config:
    windows = {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_switch": 4, "cache_implementation": "hybrid"}
    words = {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"}
    blocks = {"use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True}
    numbers = {"head_dim": 128, "rotary_pct": 1.0, "rope_scaling": None, "rope_theta": 50000, "logit_scale": 0.25}
    kind = {"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "max_position_embeddings": 132096}
    base = command_r(4096, 14336, 32, 32, 8)
    kept = {key: value for key, value in base.items() if key not in ("pretraining_tp", "model_max_length")}
    return kept | windows | words | blocks | numbers | kind | {"use_parallel_embedding": True} | more


_LINEAR = {"factor": 8.0, "rope_type": "linear"}
_GEMMA_3_1B = gemma_3(1152, 6912, 26, 4, 1)


def gpt_oss(layers: int, experts: int, **more: Any) -> Config:
    kind = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_act": "silu", "head_dim": 64}
    tokens = {"vocab_size": 201088, "eos_token_id": 200002, "pad_token_id": 199999, "tie_word_embeddings": False}
    routing = {"num_local_experts": experts, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0}
    loss = {"router_aux_loss_coef": 0.9, "output_router_logits": False}
    window = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    scaling = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False}
    angles = {"rope_theta": 150000, "rope_scaling": scaling | {"original_max_position_embeddings": 4096}}
    usual = {"attention_bias": True, "attention_dropout": 0.0, "rms_norm_eps": 1e-05, "initial_context_length": 4096}
    long = {"max_position_embeddings": 131072}
    return _shape(2880, 2880, layers, 64, 8) | kind | tokens | routing | loss | window | angles | usual | long | more


WINDOWED: dict[str, tuple[Config, int, int]] = {
    "gemma-2-2b": (gemma_2(2304, 9216, 26, 8, 4), 4096, 2_614_341_888),
    "gemma-2-2b beyond its window": (gemma_2(2304, 9216, 26, 8, 4), 8192, 2_614_341_888),
    "gemma-2-9b": (gemma_2(3584, 14336, 42, 16, 8, sliding_window_size=4096), 4096, 9_241_705_984),
    "gpt-oss-20b": (gpt_oss(24, 32), 4096, 20_914_757_184),
    "gpt-oss-120b": (gpt_oss(36, 128), 4096, 116_829_156_672),
    "gpt-oss-20b within its window": (gpt_oss(24, 32), 128, 20_914_757_184),
    "gemma-2-27b": (
        gemma_2(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
        4096,
        27_227_128_320,
    ),
    "gemma-3-1b": (_GEMMA_3_1B, 8192, 999_885_952),
    "gemma-3-1b, as transformers writes it now": (
        {key: value for key, value in _GEMMA_3_1B.items() if not key.startswith(("rope", "sliding_window_p"))}
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            }
        },
        256,
        999_885_952,
    ),
    # Published with a vision tower of 416 866 032 and a projector of 2 951 680 parameters: 4 300 079 472 in all.
    "gemma-3-4b, its language model": (
        gemma_3(2560, 10240, 34, 8, 4, vocab_size=262208, sliding_window=1024, rope_scaling=_LINEAR)
        | {"max_position_embeddings": 131072},
        16384,
        3_880_263_168,
    ),
    "c4ai-command-r-v01": (command_r(8192, 22528, 40, 64, 64), 8192, 34_980_831_232),
    "c4ai-command-r-plus": (
        command_r(12288, 33792, 64, 96, 8, use_qk_norm=True, logit_scale=0.8333333333333334, rope_theta=75000000.0),
        8192,
        103_810_674_688,
    ),
    "c4ai-command-r7b-12-2024": (command_r7b(), 16384, 8_028_033_024),
}
"""config.json, a length to train with, and the published number of parameters."""

_GEMMA_2_2B = WINDOWED["gemma-2-2b"][0]
REFUSED_WINDOWED: list[tuple[Config, int, str]] = [
    (_GEMMA_2_2B | {"final_logit_softcapping": 0.0}, 4096, "final_logit_softcapping 0.0 must be above 0"),
    (_GEMMA_2_2B | {"attn_logit_softcapping": -1.0}, 4096, "attn_logit_softcapping -1.0 must be above"),
    (_GEMMA_2_2B | {"sliding_window": 2.5}, 8192, "sliding_window"),
    (_GEMMA_3_1B | {"attn_logit_softcapping": 50.0}, 512, "attn_logit_softcapping 50.0 cannot be trained"),
    (_GEMMA_3_1B | {"rope_scaling": {"rope_type": "su", "factor": 2.0}}, 512, "rope_type 'su' cannot be trained"),
    (command_r7b(rotary_pct=0.5), 512, "rotary_pct 0.5 cannot be trained: all features of a head are rotated"),
    (command_r7b(use_parallel_block=False), 512, "use_parallel_block false cannot be trained"),
    (command_r7b(sliding_window=0), 512, "sliding_window must be a whole number from 1"),
    (gpt_oss(24, 32, hidden_act="gelu"), 512, 'hidden_act "gelu" cannot be trained: experts have a clamped SwiGLU'),
    (_GEMMA_3_1B | {"layer_types": ["local"] * 26}, 512, "layer_types"),
    (_GEMMA_3_1B | {"sliding_window_pattern": 0}, 512, "sliding_window_pattern must be a whole number from 1"),
]
