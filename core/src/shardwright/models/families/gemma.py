"""The language models of Gemma 2 and 3 (Gemma team 2024, 2025): norms before and after each part.

Gemma 2 soft-caps attention scores and logits. Gemma 3 norms heads, does not soft-cap, and has two bases for rotary
angles.
"""

from msgspec.structs import replace

from shardwright.models.families.llama import LLAMA, of_sliding, windowed, with_blocks
from shardwright.models.parameters import Parameters, norm
from shardwright.models.traits import FULL, SLIDING, Config, FeedForward, Keys, Norm, Only, Systems
from shardwright.types import EMBEDDING, HEAD, Parameter


def _block(layer: str, config: Config) -> Parameters:
    yield from LLAMA.parameters(layer, {**config, "mlp_bias": False})
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


_BOUNDS = ("attn_logit_softcapping", "final_logit_softcapping")
GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    stock=LLAMA.stock._replace(name="Gemma2ForCausalLM"),
    runtime="llama:Gemma2",
    keys=Keys(
        {
            **{"attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
            **{"head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"},
            **{"sliding_window": 4096, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0},
        },
        lengths=LLAMA.keys.lengths,
        above_zero=_BOUNDS,
        # Published files state the activation function twice, and the window.
        ignored=("hidden_act", "cache_implementation", "sliding_window_size"),
        only={"use_bidirectional_attention": Only(False, "attention is causal")},
    ),
    parameters=with_blocks(_block),
    stacks=windowed(lambda _config, index: FULL if index % 2 else SLIDING),
    attention=LLAMA.attention._replace(window=of_sliding, soft_caps=True),
    norm=Norm("RMSNorm", "rms_norm_eps", ends=("full",), in_float32=True, of_part=2),
    feed_forward=lambda config: FeedForward(config["hidden_activation"], gated=True),
    systems=Systems(),
)

_PATTERN = "sliding_window_pattern"
_LAST_OF_ATTENTION = {False: "self_attn.o_proj.weight", True: "self_attn.o_proj.bias"}


def _with_normed_heads(layer: str, config: Config) -> Parameters:
    for parameter in GEMMA2.parameters(layer, config):
        yield parameter
        if layer not in (EMBEDDING, HEAD) and parameter.name == _LAST_OF_ATTENTION[config["attention_bias"]]:
            for name in ("q_norm", "k_norm"):
                yield Parameter(name=f"self_attn.{name}.weight", shape=(config["head_dim"],), inside=True)


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    stock=GEMMA2.stock._replace(name="Gemma3ForCausalLM", module="gemma3"),
    runtime="llama:Gemma3",
    keys=Keys(
        {
            **{key: value for key, value in GEMMA2.keys.defaults.items() if key not in _BOUNDS},
            **{"vocab_size": 262208, "num_attention_heads": 8, "max_position_embeddings": 131072, _PATTERN: 6},
        },
        lengths=(*GEMMA2.keys.lengths, _PATTERN),
        ignored=(*GEMMA2.keys.ignored, _PATTERN, "rope_local_base_freq"),
        only={
            **GEMMA2.keys.only,
            **dict.fromkeys(_BOUNDS, Only(None, "no model of the family bounds scores or logits")),
        },
    ),
    parameters=_with_normed_heads,
    # Rotary angles differ, too, so that blocks are never alike.
    stacks=windowed(lambda config, index: SLIDING if (index + 1) % config[_PATTERN] else FULL, alike=False),
    attention=GEMMA2.attention._replace(soft_caps=False),
)
