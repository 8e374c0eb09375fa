"""Gemma 2 (Gemma team 2024): norms before and behind each part, and bounds of attention scores and logits."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_models.facts import FULL, SLIDING, Config, FeedForward, Norm, Only, Stack
from shardwright_models.families.llama import LLAMA
from shardwright_models.parameters import Parameters, norm


def _parameters(layer: str, config: Config) -> Parameters:
    yield from LLAMA.parameters(layer, {**config, "mlp_bias": False})
    if layer not in (EMBEDDING, HEAD):
        for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
            yield from norm(name, config["hidden_size"], bias=False)


def _type_at(_config: Config, index: int) -> str:
    """Return the type of a block: every second has no window."""
    return FULL if index % 2 else SLIDING


GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    stock="Gemma2ForCausalLM",
    runtime="gemma2:Gemma2",
    stacks=(Stack(types=(SLIDING, FULL), type_at=_type_at, typed_by="layer_types", alike_within_window=True),),
    window=lambda layer, config: config["sliding_window"] if layer == SLIDING else None,
    parameters=_parameters,
    defaults={
        **{"attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        **{"head_dim": 256, "num_key_value_heads": 4, "hidden_activation": "gelu_pytorch_tanh"},
        **{"sliding_window": 4096, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0},
    },
    feed_forward=lambda config: FeedForward(config["hidden_activation"], gated=True),
    norm=Norm("RMSNorm", "rms_norm_eps", in_float32=True),
    norms=2,
    ends_in_norm=("full",),
    soft_caps=True,
    above_zero=("attn_logit_softcapping", "final_logit_softcapping"),
    megatron=None,
    torchtitan=None,
    # Published files name the activation function twice, and the window.
    ignored=("hidden_act", "cache_implementation", "sliding_window_size"),
    only={"use_bidirectional_attention": Only(False, "attention is causal")},
)
