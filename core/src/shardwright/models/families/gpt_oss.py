"""gpt-oss (OpenAI 2025): experts with biases and a clamped SwiGLU, attention sinks, a window in every second block."""

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.families.llama import LLAMA, grouped_attention, of_sliding, windowed, with_blocks
from shardwright.models.parameters import Parameters, linear, norm
from shardwright.models.traits import BLOCK, FULL, SLIDING, Config, ExpertKeys, Only
from shardwright.types import Parameter

_EXPERTS = ExpertKeys(
    number="num_local_experts",
    features="intermediate_size",
    router="mlp.router",
    types=(BLOCK, SLIDING, FULL),
    # Two matrix products and their results: the clamped SwiGLU is recomputed.
    kept=3,
)


def _block(_layer: str, config: Config) -> Parameters:
    # The stock model lists a module's direct parameters before the parameters of its submodules.
    yield Parameter(name="self_attn.sinks", shape=(config["num_attention_heads"],), tp_dim=0)
    yield from grouped_attention(config)
    yield from _expert_parameters(config)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield from norm(name, config["hidden_size"], bias=False)


def _expert_parameters(config: Config) -> Parameters:
    """Yield the parameters of router and experts, in whose first matrices columns of gate and values alternate."""
    number, inner, hidden = config[_EXPERTS.number], config[_EXPERTS.features], config["hidden_size"]
    for parameter in linear(_EXPERTS.router, number, hidden, bias=True):
        yield replace(parameter, inside=True)
    yield Parameter(name="mlp.experts.gate_up_proj", shape=(number, hidden, 2 * inner), tp_dim=2, ep_dim=0)
    yield Parameter(name="mlp.experts.gate_up_proj_bias", shape=(number, 2 * inner), tp_dim=1, ep_dim=0)
    yield Parameter(name="mlp.experts.down_proj", shape=(number, inner, hidden), tp_dim=1, ep_dim=0)
    yield Parameter(name="mlp.experts.down_proj_bias", shape=(number, hidden), inside=True, ep_dim=0)


GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    stock=LLAMA.stock._replace(name="GptOssForCausalLM"),
    runtime="gpt_oss:GptOss",
    keys=traits.Keys(
        {
            **{"attention_bias": True, "attention_dropout": 0.0, "hidden_act": "silu", "rms_norm_eps": 1e-5},
            **{"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "tie_word_embeddings": False},
            **{_EXPERTS.number: 128, _EXPERTS.top_k: 4, _EXPERTS.balance: 0.001, "intermediate_size": 2880},
            **{"max_position_embeddings": 131072, "mlp_bias": False, "vocab_size": 201088},
        },
        lengths=("vocab_size", _EXPERTS.number, _EXPERTS.top_k),
        aliases={"num_experts": _EXPERTS.number},
        # Keys of the published files that repeat other keys.
        ignored=("experts_per_token", "initial_context_length", "swiglu_limit"),  # the last one up to transformers 5.19
        only={"hidden_act": Only("silu", "experts have a clamped SwiGLU")},
    ),
    parameters=with_blocks(_block),
    stacks=windowed(lambda _config, index: FULL if index % 2 else SLIDING),
    attention=LLAMA.attention._replace(window=of_sliding, sinks=True),
    norm=traits.Norm("RMSNorm", "rms_norm_eps", ends=(), in_float32=True),
    feed_forward=lambda _config: traits.FeedForward("silu", gated=True),
    experts=_EXPERTS,
    systems=traits.Systems(
        torchtitan=traits.Torchtitan(
            "gpt_oss",
            {(2880, 24, 64, 8, 2880, 201088, 32): "20b", (2880, 36, 64, 8, 2880, 201088, 128): "120b"},
            pipelines=False,
            contexts=False,
        )
    ),
)
