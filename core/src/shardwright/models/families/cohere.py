"""Command R and R7B (Cohere 2024): attention and feed-forward in parallel, after one norm."""

from msgspec.structs import replace

from shardwright.models.families.llama import LLAMA, grouped_attention, of_sliding, windowed, with_blocks
from shardwright.models.parameters import Parameters, gated, norm
from shardwright.models.traits import FULL, SLIDING, Config, Norm, Only, Systems
from shardwright.types import Parameter


def _block(_layer: str, config: Config) -> Parameters:
    hidden = config["hidden_size"]
    yield from grouped_attention(config)
    heads = {"q_norm": config["num_attention_heads"], "k_norm": config["num_key_value_heads"]}
    for name, count in heads.items() if config.get("use_qk_norm") else ():
        yield Parameter(name=f"self_attn.{name}.weight", shape=(count, config["head_dim"]), tp_dim=0)
    yield from gated("mlp", hidden, config["intermediate_size"])
    yield from norm("input_layernorm", hidden, bias=False)


COHERE = replace(
    LLAMA,
    model_type="cohere",
    stock=LLAMA.stock._replace(name="CohereForCausalLM"),
    runtime="llama:Cohere",
    keys=LLAMA.keys._replace(
        defaults={
            **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "layer_norm_eps": 1e-5},
            **{"logit_scale": 0.0625, "tie_word_embeddings": True, "max_position_embeddings": 8192},
            "use_qk_norm": False,
        },
        ignored=("model_max_length",),
    ),
    parameters=with_blocks(_block),
    norm=Norm("LayerNorm", "layer_norm_eps", ends=(), in_float32=True, shared=True),
    systems=Systems(),
)

_PATTERN = "sliding_window_pattern"
_ONLY = {
    "use_gated_activation": Only(True, "feed-forward parts have a gate"),
    "use_parallel_block": Only(True, "attention and feed-forward run in parallel"),
    "rotary_pct": Only(1.0, "all features of a head are rotated"),
    "position_embedding_type": Only("rope_gptj", "features of a head are rotated in pairs"),
    "order_of_interleaved_layers": Only("local_attn_first", "the last of some blocks has no window"),
}
_IGNORED = "cache_implementation", "layer_switch", "use_parallel_embedding", "use_embedding_sharing"
# Only blocks with a window rotate queries and keys, so that blocks are never alike.
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    stock=COHERE.stock._replace(name="Cohere2ForCausalLM"),
    keys=COHERE.keys._replace(
        defaults={**COHERE.keys.defaults, "sliding_window": 4096, _PATTERN: 4},
        lengths=(*COHERE.keys.lengths, _PATTERN),
        ignored=(_PATTERN, *_IGNORED, *_ONLY),
        only=_ONLY,
    ),
    stacks=windowed(lambda config, index: SLIDING if (index + 1) % config[_PATTERN] else FULL, alike=False),
    attention=COHERE.attention._replace(window=of_sliding),
)
