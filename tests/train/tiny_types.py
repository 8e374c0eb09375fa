"""Tiny configurations of any causal type of transformers: of its class's defaults, cut by rules on keys' names."""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shardwright_train.models.traced import stock_class

__all__ = ["TOKENS", "TYPES", "tiny_config"]

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LAYERS, WIDTH, HEADS, HEAD, TOKENS, INNER, EXPERTS = 4, 64, 4, 16, 128, 96, 8
_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)

Value = Callable[[Any, Mapping[str, Any]], Any]
"""The value of a key, of its default and of all defaults."""


def _whole(value: int) -> Value:
    return lambda default, _: value if isinstance(default, int) and not isinstance(default, bool) else default


def _at_most(value: int) -> Value:
    return lambda default, _: min(default, value) if isinstance(default, int) else default


def _given(value: int) -> Value:
    return lambda default, _: value if default else default


def _kv_heads(default: Any, defaults: Mapping[str, Any]) -> Any:
    if default in (None, 1):
        return default
    return HEADS if default == defaults.get("num_attention_heads", defaults.get("n_heads")) else 2


def _inner(default: Any, _: Mapping[str, Any]) -> Any:
    if isinstance(default, list):
        return [INNER] * LAYERS
    return INNER if isinstance(default, int) and default else default


_RULES: tuple[tuple[str, Value], ...] = (
    (
        r"num_hidden_layers(_\w+)?|n_layers?|num_layers|num_blocks|(en|de)coder_layers|num_(en|de)coder_layers",
        lambda *_: LAYERS,
    ),
    (r".*vocab_size(_per_layer_input)?", lambda *_: TOKENS),
    (
        r"hidden_size|n_embd|d_model|dim|emb_dim|embedding_size|word_embed_proj_dim|embed_dim|hidden_dim|lru_width"
        r"|attention_hidden_size|input_embedding_size|output_embedding_size|embedding_dim|encoder_hidden_dim",
        _whole(WIDTH),
    ),
    (
        r"num_attention_heads|n_heads?|num_heads|(num_)?(en|de)coder_(num_)?attention_heads|index_n_heads"
        r"|linear_num_(attention_)?heads|(num_)?swa_(num_)?attention_heads|indexer_num_heads|num_local_heads",
        _whole(HEADS),
    ),
    (
        r"num_key_value_heads|num_kv_heads|num_global_key_value_heads|swa_num_key_value_heads|multi_query_group_num"
        r"|n_kv_heads?",
        _kv_heads,
    ),
    (
        r"((global|swa|swa_v|index|attention|attn|linear|linear_key|linear_value|v)_)?head_dim|d_kv|kv_channels",
        _whole(HEAD),
    ),
    (r"qk_(rope|nope)_head_dim|rotary_dim|qk_rope_dim", _whole(8)),
    (r"qk_head_dim", _whole(HEAD)),
    (r"(q|kv|o|qkv|v|a|g|w)_lora_rank|hidden_size_per_layer_input|time_step_rank|mamba_dt_rank", _given(16)),
    (
        r"((moe|shared_expert|expert|moe_shared_expert|shared|moe_latent|dense)_)?"
        r"(intermediate_size|ffn_hidden_size|ffn_dim|latent_size)\w*"
        r"|n_inner|(de|en)coder_ffn_dim|d_inner|d_ff|(de|en)coder_intermediate_size|intermediate_dim",
        _inner,
    ),
    (
        r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|num_moe_experts",
        _given(EXPERTS),
    ),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts", _at_most(2)),
    (r"n_group|num_expert_group", lambda default, _: 2 if default and default > 1 else default),
    (r"topk_group|num_limited_groups", _given(1)),
    (
        r"sliding_window(_size)?|attention_chunk_size|window_size|local_attention|attention_window_size",
        _whole(8),
    ),
    (
        r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_target_positions",
        _at_most(256),
    ),
    (
        r".*(dropout|drop|pdrop|layerdrop|drop_rate|jitter\w*)(_rate|_prob|_p)?",
        lambda default, _: 0.0 if isinstance(default, float) else default,
    ),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_(key|value)_heads|mamba_nheads", _whole(HEADS)),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", _whole(32)),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_d_ssm", _whole(16)),
    (r"mamba_n_groups|n_groups|mamba_ngroups", _at_most(2)),
    (r"mamba_chunk_size|chunk_size", _whole(8)),
    (
        r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_dense_first_layers|first_num_dense_layers"
        r"|num_dense_first",
        _given(1),
    ),
    (r"max_window_layers", lambda *_: 2),
    (r"index_topk|indexer_topk|index_top_k", _whole(4)),
    (
        r"\w*token_(id|index)|image_token\w*|\w+_token_ids?",
        lambda default, _: 3 + default % 50 if type(default) is int and default >= TOKENS else default,
    ),
)
"""The first rule that a whole key matches says its value."""

_MIXED = ["sliding_attention", "full_attention"] * 2
_INDEXER = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
    "indexer_compress_ratio": 2,
}
_OTHERWISE: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},  # the sparse one is of 64 positions and more
    "cohere_compass_text": {
        "layer_types": None,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "n_heads": 4,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32},
    "gemma3n_text": {"layer_types": _MIXED, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        **{"axial_pos_embds": False, "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [32, 32], "is_decoder": True},
        **{"attn_layers": ["local", "lsh"] * 2, "attention_head_size": 16},
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}
"""Keys of types that the rules make no model of; a list or mapping of defaults that is null is left out."""
_LEFT_OUT = frozenset(
    (
        *("transformers_version", "architectures", "id2label", "label2id", "is_decoder", "is_encoder_decoder"),
        *("problem_type", "dtype", "chunk_size_feed_forward"),
    )
)


def tiny_config(kind: str) -> dict[str, Any]:
    """The config.json of a tiny model of a type; raises what transformers raises where it has none."""
    named, own = CONFIG_MAPPING[kind], getattr(stock_class(kind), "config_class", None)
    made: Any = own if own is not None and not issubclass(named, own) else named
    others = _OTHERWISE.get(kind, {})
    keys = {key: value for key, value in _shrunk(made).items() if key not in others}
    config = made(**keys, **{key: value for key, value in others.items() if value is not None})
    if hasattr(text := config.get_text_config(decoder=True), "is_decoder"):
        text.is_decoder = True
    told: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return {key: x for key, x in told.items() if x is not None and key not in _OF_TRANSFORMERS} | {"model_type": kind}


_OF_TRANSFORMERS = ("transformers_version", "_name_or_path", "architectures", "dtype")


def _shrunk(made: Any) -> dict[str, Any]:
    default = made()
    names = (
        [field.name for field in dataclasses.fields(made)]
        if dataclasses.is_dataclass(made)
        else [name for name in inspect.signature(made.__init__).parameters if name not in ("self", "kwargs")]
    )
    defaults = {name: _read(default, name) for name in names}
    layers = next((defaults[key] for key in _COUNTS if isinstance(defaults.get(key), int)), None)
    parts = made.sub_configs or {}
    found: dict[str, Any] = {}
    for key, value in defaults.items():
        if key in parts:
            if hasattr(value, "to_dict"):
                found[key] = type(value)(**_shrunk(type(value)))
        elif key.startswith("rope_") and isinstance(value, dict):
            found[key] = _rope(value)
        elif isinstance(value, list | tuple) and layers and layers > 3 and len(value) == layers:
            found[key] = _cut(list(value))
        elif (rule := next((rule for pattern, rule in _RULES if re.fullmatch(pattern, key)), None)) is not None:
            found[key] = rule(value, defaults)
    return {key: value for key, value in found.items() if key not in _LEFT_OUT}


def _read(config: Any, name: str) -> Any:
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


def _cut(values: list[Any]) -> list[Any]:
    """As many values as layers, all kinds among them if there is room."""
    kinds = list({str(value): value for value in values}.values())
    if len({str(value) for value in values[:LAYERS]}) == len(kinds):
        return values[:LAYERS]
    return [kinds[i % min(len(kinds), LAYERS)] for i in range(LAYERS)]


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    tiny: dict[str, Any] = {
        "mrope_section": [4, 2, 2],
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * (HEAD // 2),
        "long_factor": [1.0] * (HEAD // 2),
    }
    return {k: _rope(v) if isinstance(v, dict) else tiny.get(k, v) for k, v in parameters.items()}
