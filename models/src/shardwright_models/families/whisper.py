"""Whisper (Radford et al. 2022): an encoder of spectrograms, and a decoder whose blocks also attend to its states."""

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Dropouts, Family, FeedForward, Mask, Norm, Only, Stack
from shardwright_models.parameters import Parameters, linear, norm, vocabulary

_ENCODER, _DECODER = "encoder", "decoder"
_ENCODED, _DECODED = "encoder_states", "decoder_states"
_WIDTH = 3
"""Frames that a convolution looks at."""


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, shapes = config["d_model"], {**config, **_shapes(layer, config)}
    if layer == EMBEDDING:
        yield from vocabulary("model.decoder.embed_tokens.weight", config)
        yield Parameter(name="model.decoder.embed_positions.weight", shape=(config["max_target_positions"], hidden))
        for name, channels in (("conv1", config["num_mel_bins"]), ("conv2", hidden)):
            yield Parameter(name=f"model.encoder.{name}.weight", shape=(hidden, channels, _WIDTH))
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
    """Return what is wrong with the heads, which must divide the width."""
    for stack in (_ENCODER, _DECODER):
        width, heads = config["d_model"], config[key := f"{stack}_attention_heads"]
        if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
            return f"d_model {width} is no multiple of {key} {heads}"
    return None


def _shapes(layer: str, config: Config) -> Config:
    stack = _DECODER if layer == _DECODER else _ENCODER
    heads = config[f"{stack}_attention_heads"]
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": config["d_model"] // heads}
    return {**shape, "intermediate_size": config[f"{stack}_ffn_dim"]}


WHISPER = Family(
    model_type="whisper",
    stock="WhisperForConditionalGeneration",
    runtime="whisper:Whisper",
    parameters=_parameters,
    stacks=(
        Stack("encoder_layers", (_ENCODER,), lambda *_: _ENCODER, _ENCODED),
        Stack("decoder_layers", (_DECODER,), lambda *_: _DECODER, _DECODED),
    ),
    aliases={
        **dict.fromkeys(("num_key_value_heads", "num_attention_heads"), "encoder_attention_heads"),
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    },
    defaults={
        **{"vocab_size": 51865, "num_mel_bins": 80, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4},
        **{"encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536},
        **{"decoder_ffn_dim": 1536, "activation_function": "gelu", "dropout": 0.0, "attention_dropout": 0.0},
        **{"max_source_positions": 1500, "max_target_positions": 448, "tie_word_embeddings": True},
    },
    implied=lambda config: {"max_position_embeddings": config["max_target_positions"]},
    shapes=_shapes,
    wrong=_wrong,
    state_lengths=lambda config: {_ENCODED: config["max_source_positions"]},
    lengths=(
        *("vocab_size", "num_mel_bins", "d_model", "max_source_positions", "max_target_positions"),
        *(f"{stack}_{key}" for stack in (_ENCODER, _DECODER) for key in ("attention_heads", "ffn_dim")),
    ),
    divided=("num_attention_heads", "intermediate_size"),
    tied=(("model.decoder.embed_tokens.weight", "proj_out.weight"),),
    # The decoder's attention to itself alone is causal.
    mask=Mask.NONE,
    norm=Norm("LayerNorm", None),
    positions="learned_absolute",
    # Queries are laid out by heads, and so is what attention gives; the next matrix takes a copy.
    joins_features=True,
    feed_forward=lambda config: FeedForward(config["activation_function"], gated=False),
    dropouts=Dropouts(attention="attention_dropout", hidden="dropout", embedding="dropout", ends=("full",)),
    ends_in_norm=(),
    ignored=("forced_decoder_ids", "max_length", "max_position_embeddings"),
    only={
        **dict.fromkeys(("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), Only(0.0, "no block has it")),
        **dict.fromkeys(("scale_embedding", "apply_spec_augment"), Only(False, "inputs enter as they are")),
        "tie_word_embeddings": Only(True, "the head's matrix is the token table"),
    },
)
