"""T5 (Raffel et al. 2020): an encoder, and a decoder whose blocks also attend to what the encoder made."""

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Dropouts, Family, FeedForward, Mask, Norm, Stack
from shardwright_models.parameters import Parameters, linear, norm, vocabulary

_ENCODER, _DECODER = "encoder", "decoder"


def _parameters(layer: str, config: Config) -> Parameters:
    hidden = config["hidden_size"]
    if layer == EMBEDDING:
        yield from vocabulary("shared.weight", config)
    elif layer == HEAD:
        yield from norm("decoder.final_layer_norm", hidden, bias=False)
        yield from vocabulary("lm_head.weight", config)
    else:
        yield from _attention("layer.0.SelfAttention", config)
        shape = (config["relative_attention_num_buckets"], config["num_attention_heads"])
        bias = "layer.0.SelfAttention.relative_attention_bias.weight"
        yield Parameter(name=bias, shape=shape, tp_dim=1, shared=True)
        yield from norm("layer.0.layer_norm", hidden, bias=False)
        if layer == _DECODER:
            yield from _attention("layer.1.EncDecAttention", config)
            yield from norm("layer.1.layer_norm", hidden, bias=False)
        last = "layer.2" if layer == _DECODER else "layer.1"
        for name in ("wi_0", "wi_1") if _feed_forward(config).gated else ("wi",):
            yield from linear(f"{last}.DenseReluDense.{name}", config["d_ff"], hidden, "columns")
        yield from linear(f"{last}.DenseReluDense.wo", hidden, config["d_ff"], "rows")
        yield from norm(f"{last}.layer_norm", hidden, bias=False)
        if layer == _ENCODER:
            yield Parameter(name="final_layer_norm.weight", shape=(hidden,), shared=True)


def _attention(name: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    for part in ("q", "k", "v"):
        yield from linear(f"{name}.{part}", inner, hidden, "columns")
    yield from linear(f"{name}.o", hidden, inner, "rows")


def _feed_forward(config: Config) -> FeedForward:
    """Return what feed_forward_proj means: transformers' gated-gelu has the tanh form of GELU."""
    function = config["feed_forward_proj"]
    if function == "gated-gelu":
        return FeedForward("gelu_new", gated=True)
    return FeedForward(function.removeprefix("gated-"), gated=function.startswith("gated-"))


T5 = Family(
    model_type="t5",
    stock="T5ForConditionalGeneration",
    runtime="t5:T5",
    parameters=_parameters,
    stacks=(
        Stack("num_layers", (_ENCODER,), lambda *_: _ENCODER, "encoder_states"),
        Stack("num_decoder_layers", (_DECODER,), lambda *_: _DECODER, "decoder_states"),
    ),
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    defaults={"d_kv": 64, "dropout_rate": 0.1, "feed_forward_proj": "relu", "relative_attention_num_buckets": 32},
    # transformers ties them whatever the configuration says.
    implied=lambda config: {
        "num_decoder_layers": config.get("num_decoder_layers") or config.get("num_layers"),
        "tie_word_embeddings": True,
    },
    lengths=("vocab_size", "relative_attention_num_buckets"),
    divided=("num_heads", "d_ff"),
    tied=(("shared.weight", "lm_head.weight"),),
    mask=Mask.BIAS,
    # The stock model's is an RMSNorm; estimates do not yet count what it keeps more.
    norm=Norm("LayerNorm", "layer_norm_epsilon"),
    positions="relative",
    feed_forward=_feed_forward,
    dropouts=Dropouts(attention="dropout_rate", hidden="dropout_rate", ends=("full",)),
    ends_in_norm=(),
    ignored=("decoder_start_token_id", "n_positions"),
)
