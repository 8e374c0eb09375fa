"""Encoder-decoders, whose decoder blocks also attend to the encoder's output: T5 and Whisper.

T5 (Raffel et al. 2020) reads text; Whisper (Radford et al. 2022) reads spectrograms.
"""

from shardwright.models import traits
from shardwright.models.facts import Family
from shardwright.models.parameters import Parameters, linear, norm, vocabulary
from shardwright.models.traits import Config, Only, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter

_ENCODER, _DECODER = "encoder", "decoder"


def _t5_parameters(layer: str, config: Config) -> Parameters:
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


def _feed_forward(config: Config) -> traits.FeedForward:
    """Return the activation that feed_forward_proj specifies; transformers' gated-gelu is the tanh form of GELU."""
    function = config["feed_forward_proj"]
    if function == "gated-gelu":
        return traits.FeedForward("gelu_new", gated=True)
    return traits.FeedForward(function.removeprefix("gated-"), gated=function.startswith("gated-"))


T5 = Family(
    model_type="t5",
    stock=traits.StockModel(
        "T5ForConditionalGeneration",
        tied=(("shared.weight", "lm_head.weight"),),
        places={stack: f"{stack}.block.{{}}" for stack in (_ENCODER, _DECODER)},
    ),
    runtime="encoder_decoder:T5",
    keys=traits.Keys(
        {"d_kv": 64, "dropout_rate": 0.1, "feed_forward_proj": "relu", "relative_attention_num_buckets": 32},
        lengths=("vocab_size", "relative_attention_num_buckets"),
        aliases={
            **{"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
            "head_dim": "d_kv",
        },
        # transformers ties embedding and head whatever the configuration says.
        implied=lambda config: {
            "num_decoder_layers": config.get("num_decoder_layers") or config.get("num_layers"),
            "tie_word_embeddings": True,
        },
        ignored=("decoder_start_token_id", "n_positions"),
    ),
    parameters=_t5_parameters,
    stacks=(
        Stack("num_layers", (_ENCODER,), lambda *_: _ENCODER, "encoder_states"),
        Stack("num_decoder_layers", (_DECODER,), lambda *_: _DECODER, "decoder_states"),
    ),
    divided=traits.Divided(("num_heads", "d_ff")),
    attention=traits.AttentionFacts(traits.Mask.BIAS, "relative"),
    # The stock model has an RMSNorm; estimates do not yet count what it keeps in addition.
    norm=traits.Norm("LayerNorm", "layer_norm_epsilon", ends=()),
    feed_forward=_feed_forward,
    dropouts=traits.Dropouts(attention="dropout_rate", hidden="dropout_rate", ends=("full",)),
)

_ENCODED, _DECODED = "encoder_states", "decoder_states"
_CONVOLVED = 3
"""Number of frames that a convolution covers."""


def _whisper_parameters(layer: str, config: Config) -> Parameters:
    hidden, shapes = config["d_model"], {**config, **_shapes(layer, config)}
    if layer == EMBEDDING:
        yield from vocabulary("model.decoder.embed_tokens.weight", config)
        yield Parameter(name="model.decoder.embed_positions.weight", shape=(config["max_target_positions"], hidden))
        for name, channels in (("conv1", config["num_mel_bins"]), ("conv2", hidden)):
            yield Parameter(name=f"model.encoder.{name}.weight", shape=(hidden, channels, _CONVOLVED))
            yield Parameter(name=f"model.encoder.{name}.bias", shape=(hidden,))
        # Sines, which are not trained.
        shape = (config["max_source_positions"], hidden)
        yield Parameter(name="model.encoder.embed_positions.weight", shape=shape, frozen=True)
    elif layer == HEAD:
        yield from norm("model.decoder.layer_norm", hidden)
        yield from vocabulary("proj_out.weight", config)
    else:
        for name in ("self_attn", "encoder_attn") if layer == _DECODER else ("self_attn",):
            for part in ("k", "v", "q"):
                yield from linear(f"{name}.{part}_proj", hidden, hidden, "columns", bias=part != "k")
            yield from linear(f"{name}.out_proj", hidden, hidden, "rows", bias=True)
            yield from norm(f"{name}_layer_norm", hidden)
        yield from linear("fc1", shapes["intermediate_size"], hidden, "columns", bias=True)
        yield from linear("fc2", hidden, shapes["intermediate_size"], "rows", bias=True)
        yield from norm("final_layer_norm", hidden)
        if layer == _ENCODER:
            for kind in ("weight", "bias"):
                yield Parameter(name=f"layer_norm.{kind}", shape=(hidden,), shared=True)


def _wrong(config: Config) -> str | None:
    """Return a message if the number of heads does not divide the width, or None."""
    for stack in (_ENCODER, _DECODER):
        width, heads = config["d_model"], config[key := f"{stack}_attention_heads"]
        if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
            return f"d_model {width} is not a multiple of {key} {heads}"
    return None


def _shapes(layer: str, config: Config) -> Config:
    stack = _DECODER if layer == _DECODER else _ENCODER
    heads = config[f"{stack}_attention_heads"]
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": config["d_model"] // heads}
    return {**shape, "intermediate_size": config[f"{stack}_ffn_dim"]}


WHISPER = Family(
    model_type="whisper",
    stock=traits.StockModel(
        "WhisperForConditionalGeneration",
        tied=(("model.decoder.embed_tokens.weight", "proj_out.weight"),),
        places={stack: f"model.{stack}.layers.{{}}" for stack in (_ENCODER, _DECODER)},
    ),
    runtime="encoder_decoder:Whisper",
    keys=traits.Keys(
        {
            **{"vocab_size": 51865, "num_mel_bins": 80, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4},
            **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536},
            **{"decoder_ffn_dim": 1536, "activation_function": "gelu", "dropout": 0.0, "attention_dropout": 0.0},
            **{"max_source_positions": 1500, "max_target_positions": 448, "tie_word_embeddings": True},
        },
        lengths=(
            *("vocab_size", "num_mel_bins", "d_model", "max_source_positions", "max_target_positions"),
            *(f"{stack}_{key}" for stack in (_ENCODER, _DECODER) for key in ("attention_heads", "ffn_dim")),
        ),
        aliases={
            **dict.fromkeys(("num_key_value_heads", "num_attention_heads"), "encoder_attention_heads"),
            **{"hidden_size": "d_model", "num_hidden_layers": "encoder_layers"},
        },
        implied=lambda config: {"max_position_embeddings": config["max_target_positions"]},
        wrong=_wrong,
        ignored=("forced_decoder_ids", "max_length", "max_position_embeddings"),
        only={
            **dict.fromkeys(
                ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), Only(0.0, "no block has it")
            ),
            **dict.fromkeys(("scale_embedding", "apply_spec_augment"), Only(False, "inputs enter as they are")),
            "tie_word_embeddings": Only(True, "the head's matrix is the token table"),
        },
    ),
    parameters=_whisper_parameters,
    stacks=(
        Stack(
            *("encoder_layers", (_ENCODER,), lambda *_: _ENCODER, _ENCODED),
            length=lambda config: config["max_source_positions"],
        ),
        Stack("decoder_layers", (_DECODER,), lambda *_: _DECODER, _DECODED),
    ),
    divided=traits.Divided(("num_attention_heads", "intermediate_size")),
    # Only the decoder's attention to itself is causal. Queries are laid out by heads, and so is attention's result: the
    # next matrix reads a copy.
    attention=traits.AttentionFacts(traits.Mask.NONE, "learned_absolute", joins_features=True),
    norm=traits.Norm("LayerNorm", None, ends=()),
    feed_forward=lambda config: traits.FeedForward(config["activation_function"], gated=False),
    dropouts=traits.Dropouts(attention="attention_dropout", hidden="dropout", embedding="dropout", ends=("full",)),
    shapes=_shapes,
)
