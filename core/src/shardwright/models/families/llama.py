"""Llama (Touvron et al. 2023), and families whose blocks have the same matrices: Mistral, Qwen, Granite, SmolLM.

They differ in biases, norms of heads, windows, rotary positions by block, and defaults.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.facts import Family
from shardwright.models.parameters import Parameters, gated, linear, norm, vocabulary
from shardwright.models.traits import FULL, SLIDING, Config, Layers, Only, Stack
from shardwright.types import EMBEDDING, HEAD, Attention, Parameter


def _parameters(layer: str, config: Config, input_biases: bool = False, head_norms: bool = False) -> Parameters:
    hidden = config["hidden_size"]
    if layer == EMBEDDING:
        yield from vocabulary("model.embed_tokens.weight", config)
    elif layer == HEAD:
        yield from norm("model.norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from grouped_attention(config, input_biases, head_norms)
        yield from gated("mlp", hidden, config["intermediate_size"], config["mlp_bias"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from norm(name, hidden, bias=False)


def grouped_attention(config: Config, input_biases: bool = False, head_norms: bool = False) -> Parameters:
    """Yield the parameters of attention in which groups of queries share keys and values."""
    hidden, size, bias = config["hidden_size"], config["head_dim"], config["attention_bias"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for name, count in heads.items():
        yield from linear(f"self_attn.{name}_proj", count * size, hidden, "columns", input_biases or bias)
    yield from linear("self_attn.o_proj", hidden, heads["q"] * size, "rows", bias)
    for name in ("q_norm", "k_norm") if head_norms else ():
        yield Parameter(name=f"self_attn.{name}.weight", shape=(size,), inside=True)


def with_blocks(block: Layers) -> Layers:
    """Return the function of a family's parameters, with Llama's embedding and head, and other blocks."""

    def parameters(layer: str, config: Config) -> Parameters:
        return (LLAMA.parameters if layer in (EMBEDDING, HEAD) else block)(layer, config)

    return parameters


def _kin(
    stock: str, parameters: Layers = _parameters, torchtitan: traits.Torchtitan | None = None, **defaults: Any
) -> Family:
    """Return the facts of a family, given its stock model and its differences from Llama."""
    usual = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "mlp_bias": False}
    return Family(
        model_type=stock.removesuffix("ForCausalLM").lower(),
        stock=traits.StockModel(stock, tied=(("model.embed_tokens.weight", "lm_head.weight"),)),
        runtime="llama:Llama",
        keys=traits.Keys(
            {**usual, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **defaults}, lengths=("vocab_size",)
        ),
        parameters=parameters,
        stacks=(Stack(),),
        divided=traits.Divided(("num_attention_heads", "num_key_value_heads", "intermediate_size")),
        attention=traits.AttentionFacts(traits.Mask.CAUSAL, "rope"),
        norm=traits.Norm("RMSNorm", "rms_norm_eps", ends=()),
        feed_forward=lambda config: traits.FeedForward(config["hidden_act"], gated=True),
        dropouts=traits.Dropouts(attention="attention_dropout", hidden=None),
        systems=traits.Systems("bridged", torchtitan),
    )


_LLAMA3 = traits.Torchtitan(
    "llama3",
    {
        (4096, 32, 32, 8, 14336, 128256, None): "8B",
        (8192, 80, 64, 8, 28672, 128256, None): "70B",
        (16384, 126, 128, 8, 53248, 128256, None): "405B",
    },
)
LLAMA = replace(_kin("LlamaForCausalLM", torchtitan=_LLAMA3), mtp_trained=("llama",))
# models/auto/modeling_auto.py of transformers 5.23 builds Llama for these; defaults are from their own classes.
_FEW_KEYS = {"head_dim": 128, "rms_norm_eps": 1e-5}
INTERNLM3 = traits.OtherName(
    "internlm3", "llama", {"qkv_bias": "attention_bias", "bias": "mlp_bias"}, _FEW_KEYS | {"num_key_value_heads": 2}
)
IQUESTCODER = traits.OtherName("iquestcoder", "llama", {}, _FEW_KEYS | {"num_key_value_heads": 8})


def of_sliding(layer: str, config: Config) -> int | None:
    """Return the window of a block type: only the sliding type has one."""
    window: int | None = config["sliding_window"] if layer == SLIDING else None
    return window


def in_all(_layer: str, config: Config) -> int | None:
    """Return the attention window, which is the same for all blocks."""
    window: int | None = config["sliding_window"]
    return window


def windowed(type_at: Callable[[Config, int], str], alike: bool = True) -> tuple[Stack, ...]:
    """Return a stack in which some blocks have a window, by layer_types or a rule.

    `alike`: whether blocks are equal if the window covers whole samples.
    """
    return (Stack(types=(SLIDING, FULL), type_at=type_at, typed_by="layer_types", alike_within_window=alike),)


_MISTRAL = _kin("MistralForCausalLM", num_key_value_heads=8, sliding_window=4096)
MISTRAL = replace(_MISTRAL, attention=_MISTRAL.attention._replace(window=in_all))
# Ministral (Mistral AI 2024): Mistral's blocks, some of which have a window.
MINISTRAL = replace(
    MISTRAL,
    model_type="ministral",
    stock=MISTRAL.stock._replace(name="MinistralForCausalLM"),
    runtime="llama:Ministral",
    stacks=windowed(lambda config, _index: FULL if config["sliding_window"] is None else SLIDING),
    attention=MISTRAL.attention._replace(window=of_sliding),
    systems=traits.Systems(),
)


_BETA, _ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def _unscaled(config: Config) -> str | None:
    """Return a message if a number by which queries are scaled is missing from rope_parameters, or None.

    Without rope_parameters, transformers' defaults contain both numbers.
    """
    rotary = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rotary, Mapping):
        return None
    for key in (_BETA, _ORIGINAL):
        value = rotary.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value < (key == _ORIGINAL):
            return f"rope_parameters: {key} {value!r} is not a number that queries can be scaled by"
    return None


# Ministral 3 (Mistral AI 2025), its language model: Mistral's blocks, whose queries are scaled up with their positions.
MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    stock=MISTRAL.stock._replace(name="Ministral3ForCausalLM"),
    runtime="llama:Ministral3",
    keys=MISTRAL.keys._replace(
        defaults={
            **MISTRAL.keys.defaults,
            **{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34},
            **{"num_attention_heads": 32, "head_dim": 128, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5},
            "sliding_window": None,
        },
        rotary=(_BETA, "max_position_embeddings"),
        wrong=_unscaled,
    ),
    # It would treat positions that restart inside a sample, which blocks pass on to it, as the beginning of another
    # sample.
    attention=MISTRAL.attention._replace(without=(Attention.FLASH_ATTENTION_2,)),
    systems=traits.Systems(),
)


def _qwen(family: Family) -> Family:
    """Return the facts of a Qwen family: blocks from some index on may have a window, if that is configured."""
    window = family.attention._replace(window=lambda layer, config: _window(config) if layer == SLIDING else None)
    return replace(family, stacks=windowed(_type_at), attention=window)


def _type_at(config: Config, index: int) -> str:
    first = config.get("max_window_layers", 28)
    return FULL if _window(config) is None or index < first else SLIDING


def _window(config: Config) -> int | None:
    """Return the window if it is enabled; transformers has a default size."""
    return config.get("sliding_window", 4096) if config["use_sliding_window"] else None


_QWEN: dict[str, Any] = {"num_key_value_heads": 32, "use_sliding_window": False}
# Only queries, keys and values have biases, whatever the configuration says.
QWEN2 = _qwen(_kin("Qwen2ForCausalLM", partial(_parameters, input_biases=True), **_QWEN))
_QWEN3 = traits.Torchtitan(
    "qwen3",
    {
        (1024, 28, 16, 8, 3072, 151936, None): "0.6B",
        (2048, 28, 16, 8, 6144, 151936, None): "1.7B",
        (2560, 36, 32, 8, 9728, 151936, None): "4B",
        (4096, 36, 32, 8, 12288, 151936, None): "8B",
        (5120, 40, 40, 8, 17408, 151936, None): "14B",
        (5120, 64, 64, 8, 25600, 151936, None): "32B",
        (2048, 48, 32, 4, 6144, 151936, 128): "30B-A3B",
        (4096, 94, 64, 4, 12288, 151936, 128): "235B-A22B",
    },
    pipelines=False,
    ties=True,
)
QWEN3 = _qwen(_kin("Qwen3ForCausalLM", partial(_parameters, head_norms=True), _QWEN3, head_dim=128, **_QWEN))

# Granite 3 (Granite team 2024): embedding, attention scores, residual sums and logits are scaled; no other system
# supports it.
GRANITE = replace(
    LLAMA,
    model_type="granite",
    stock=LLAMA.stock._replace(name="GraniteForCausalLM"),
    runtime="llama:Granite",
    keys=LLAMA.keys._replace(above_zero=("logits_scaling",)),
    systems=traits.Systems(),
)

ROTATED, UNROTATED = "rope", "no_rope"


def _turns_at(config: Config, index: int) -> str:
    return UNROTATED if (index + 1) % config["no_rope_layer_interval"] == 0 else ROTATED


# SmolLM 3 (Bakouch et al. 2025): each fourth block does not rotate queries and keys.
SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    stock=LLAMA.stock._replace(name="SmolLM3ForCausalLM"),
    runtime="llama:SmolLM3",
    stacks=(
        Stack(
            types=(ROTATED, UNROTATED),
            type_at=_turns_at,
            typed_by="no_rope_layers",
            written={ROTATED: 1, UNROTATED: 0},
        ),
    ),
    keys=traits.Keys(
        {
            **{**LLAMA.keys.defaults, "tie_word_embeddings": True, "num_key_value_heads": 4},
            **{"no_rope_layer_interval": 4, "max_position_embeddings": 32768, "use_sliding_window": False},
            "pad_token_id": 128004,
        },
        lengths=(*LLAMA.keys.lengths, "no_rope_layer_interval"),
        ignored=("max_window_layers",),
        only={"use_sliding_window": Only(False, "attention is whole")},
    ),
    systems=traits.Systems(),
)
