"""Llama (Touvron et al. 2023) and its kin, which differ in biases, norms of heads and defaults."""

from functools import partial
from typing import Any

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import FULL, SLIDING, Config, Dropouts, Family, FeedForward, Layers, Mask, Norm, Stack
from shardwright_models.parameters import Parameters, linear, norm, vocabulary
from shardwright_models.torchtitan import Torchtitan


def _parameters(layer: str, config: Config, input_biases: bool = False, head_norms: bool = False) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if layer == EMBEDDING:
        yield from vocabulary("model.embed_tokens.weight", config)
    elif layer == HEAD:
        yield from norm("model.norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from _grouped_attention(config, input_biases, head_norms)
        for name in ("gate_proj", "up_proj"):
            yield from linear(f"mlp.{name}", inner, hidden, "columns", config["mlp_bias"])
        yield from linear("mlp.down_proj", hidden, inner, "rows", config["mlp_bias"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from norm(name, hidden, bias=False)


def _grouped_attention(config: Config, input_biases: bool, head_norms: bool) -> Parameters:
    hidden, size, bias = config["hidden_size"], config["head_dim"], config["attention_bias"]
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    for name, count in heads.items():
        yield from linear(f"self_attn.{name}_proj", count * size, hidden, "columns", input_biases or bias)
    yield from linear("self_attn.o_proj", hidden, heads["q"] * size, "rows", bias)
    for name in ("q_norm", "k_norm") if head_norms else ():
        yield Parameter(name=f"self_attn.{name}.weight", shape=(size,), inside=True)


def _kin(stock: str, parameters: Layers = _parameters, torchtitan: Torchtitan | None = None, **defaults: Any) -> Family:
    """Return the facts of a family by its stock model and what differs from Llama's."""
    usual = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "mlp_bias": False}
    return Family(
        model_type=stock.removesuffix("ForCausalLM").lower(),
        stock=stock,
        runtime="llama:Llama",
        parameters=parameters,
        stacks=(Stack(),),
        defaults={**usual, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **defaults},
        lengths=("vocab_size",),
        divided=("num_attention_heads", "num_key_value_heads", "intermediate_size"),
        tied=(("model.embed_tokens.weight", "lm_head.weight"),),
        mask=Mask.CAUSAL,
        norm=Norm("RMSNorm", "rms_norm_eps"),
        positions="rope",
        feed_forward=lambda config: FeedForward(config["hidden_act"], gated=True),
        dropouts=Dropouts(attention="attention_dropout", hidden=None),
        ends_in_norm=(),
        megatron="bridged",
        torchtitan=torchtitan,
    )


_LLAMA3 = Torchtitan(
    "llama3",
    {
        (4096, 32, 32, 8, 14336, 128256, None): "8B",
        (8192, 80, 64, 8, 28672, 128256, None): "70B",
        (16384, 126, 128, 8, 53248, 128256, None): "405B",
    },
)
LLAMA = _kin("LlamaForCausalLM", torchtitan=_LLAMA3)
MISTRAL = replace(
    _kin("MistralForCausalLM", num_key_value_heads=8, sliding_window=4096),
    window=lambda _layer, config: config["sliding_window"],
)


def _windowed(family: Family) -> Family:
    """Return the facts of a family of Qwen: the blocks from one on may have a window, if the configuration says so."""
    return replace(
        family,
        stacks=(Stack(types=(SLIDING, FULL), type_at=_type_at, typed_by="layer_types", alike_within_window=True),),
        window=lambda layer, config: _window(config) if layer == SLIDING else None,
    )


def _type_at(config: Config, index: int) -> str:
    first = config.get("max_window_layers", 28)
    return FULL if _window(config) is None or index < first else SLIDING


def _window(config: Config) -> int | None:
    """Return the window, which transformers gives a default where it is used."""
    return config.get("sliding_window", 4096) if config["use_sliding_window"] else None


_QWEN: dict[str, Any] = {"num_key_value_heads": 32, "use_sliding_window": False}
# Biases of queries, keys and values alone, whatever the configuration says.
QWEN2 = _windowed(_kin("Qwen2ForCausalLM", partial(_parameters, input_biases=True), **_QWEN))
_QWEN3 = Torchtitan(
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
QWEN3 = _windowed(_kin("Qwen3ForCausalLM", partial(_parameters, head_norms=True), _QWEN3, head_dim=128, **_QWEN))
