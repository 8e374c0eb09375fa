"""Configurations of two published models, and of 13 families with one width, without dropout and balance losses."""

from typing import Any

FAMILIES = (
    *("llama", "qwen3", "gpt2", "bert", "t5", "vit", "gemma2", "olmo2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4_text"),
)
_HEADS = 8
_EXPERTS, _CHOSEN = 8, 2


# TinyLlama's sizes (Zhang et al. 2024): its checkpoint is written in seconds.
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# Experts of half the width, as in OLMoE (Muennighoff et al. 2024), but fewer of them.
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "moe_intermediate_size": 1024,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.0,
}


def configuration(family: str, width: int, layers: int, vocabulary: int, length: int) -> dict[str, Any]:
    """Return the configuration of a family's model with heads of 1/8 of the width and, if it has experts, 2 of 8."""
    match family:
        case "gpt2":
            off = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
            sizes = {"n_embd": width, "n_layer": layers, "n_head": _HEADS, "n_positions": length}
            tokens = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
            return {"model_type": "gpt2", **tokens, **sizes, **off}
        case "bert":
            off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
            tokens = {"vocab_size": vocabulary, "pad_token_id": vocabulary - 2, "mask_token_id": vocabulary - 1}
            more = {"num_attention_heads": _HEADS, "max_position_embeddings": length}
            return {"model_type": "bert", **tokens, **sizes, **more, **off}
        case "t5":
            sizes = {"d_model": width, "d_kv": width // _HEADS, "d_ff": 3 * width, "num_heads": _HEADS}
            stacks = {"num_layers": layers // 2, "num_decoder_layers": layers // 2, "feed_forward_proj": "gated-gelu"}
            tokens = {"vocab_size": vocabulary, "decoder_start_token_id": 3}
            return {"model_type": "t5", **tokens, **sizes, **stacks, "dropout_rate": 0.0}
        case "vit":
            sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
            image = {"image_size": int(length**0.5) * 16, "patch_size": 16, "num_labels": 10}
            return {"model_type": "vit", "num_attention_heads": _HEADS, **sizes, **image}
        case _:
            return _decoder(family, width, layers, vocabulary, length)


def _decoder(family: str, width: int, layers: int, vocabulary: int, length: int) -> dict[str, Any]:
    """Return a configuration like Llama's: blocks of grouped attention and a gated feed-forward part or experts."""
    sizes = {
        "model_type": family,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS // 2,
        "max_position_embeddings": length,
        "tie_word_embeddings": False,
    }
    head = {"head_dim": width // _HEADS}
    window = {"sliding_window": length // 2}
    routed = {"num_local_experts": _EXPERTS, "num_experts_per_tok": _CHOSEN, "router_aux_loss_coef": 0.0}
    more: dict[str, dict[str, Any]] = {
        "llama": {},
        "olmo2": {},
        "qwen3": head,
        "gemma2": head | window | {"query_pre_attn_scalar": width // _HEADS},
        "mixtral": routed,
        "qwen3_moe": head
        | {"num_experts": _EXPERTS, "moe_intermediate_size": width, "num_experts_per_tok": _CHOSEN}
        | {"router_aux_loss_coef": 0.0, "norm_topk_prob": True},
        "gpt_oss": head | window | routed | {"intermediate_size": width},
        "deepseek_v3": {"num_key_value_heads": _HEADS, "moe_intermediate_size": width, "first_k_dense_replace": 1}
        | {"q_lora_rank": width // 2, "kv_lora_rank": width // 4, "v_head_dim": width // _HEADS}
        | {"qk_nope_head_dim": width // _HEADS, "qk_rope_head_dim": width // _HEADS}
        | {"n_routed_experts": _EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": _CHOSEN}
        | {"n_group": 4, "topk_group": 2, "aux_loss_alpha": 0.0, "num_nextn_predict_layers": 0},
        "llama4_text": head
        | routed
        | {"num_experts_per_tok": 1, "intermediate_size": width, "intermediate_size_mlp": 3 * width}
        | {"interleave_moe_layer_step": 2},
    }
    return sizes | more[family]
