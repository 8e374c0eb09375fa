"""ModernBERT (Warner et al. 2024): an encoder whose blocks attend within a window, every third to whole samples."""

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import FULL, SLIDING, Config, Dropouts, Family, FeedForward, Mask, Norm, Only, Stack
from shardwright_models.parameters import Parameters, linear, norm, vocabulary

FIRST = "first"
"""The type of the first block, whose input the embedding has normed."""


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, norms = config["hidden_size"], config["norm_bias"]
    if layer == EMBEDDING:
        yield from vocabulary("model.embeddings.tok_embeddings.weight", config)
        yield from norm("model.embeddings.norm", hidden, norms)
    elif layer == HEAD:
        yield from norm("model.final_norm", hidden, norms)
        yield from linear("head.dense", hidden, hidden, bias=config["classifier_bias"])
        yield from norm("head.norm", hidden, norms)
        yield from vocabulary("decoder.weight", config)
        if config["decoder_bias"]:
            yield Parameter(name="decoder.bias", shape=(config["vocab_size"],), tp_dim=0)
    else:
        if layer != FIRST:
            yield from norm("attn_norm", hidden, norms)
        yield from _side_by_side("attn.Wqkv", 3, hidden, hidden, config["attention_bias"])
        yield from linear("attn.Wo", hidden, hidden, "rows", config["attention_bias"])
        yield from norm("mlp_norm", hidden, norms)
        yield from _side_by_side("mlp.Wi", 2, config["intermediate_size"], hidden, config["mlp_bias"])
        yield from linear("mlp.Wo", hidden, config["intermediate_size"], "rows", config["mlp_bias"])


def _side_by_side(name: str, count: int, outputs: int, inputs: int, bias: bool) -> Parameters:
    """Yield those of several matrices in one."""
    yield Parameter(name=f"{name}.weight", shape=(count, outputs, inputs), tp_dim=1)
    if bias:
        yield Parameter(name=f"{name}.bias", shape=(count, outputs), tp_dim=1)


def _type_at(config: Config, index: int) -> str:
    if index == 0:
        return FIRST
    return SLIDING if index % config["global_attn_every_n_layers"] else FULL


MODERNBERT = Family(
    model_type="modernbert",
    stock="ModernBertForMaskedLM",
    runtime="modernbert:ModernBert",
    parameters=_parameters,
    stacks=(
        Stack(
            types=(FIRST, FULL, SLIDING), type_at=_type_at, typed_by="layer_types", first=FIRST, written={FIRST: FULL}
        ),
    ),
    defaults={
        **{"attention_dropout": 0.0, "embedding_dropout": 0.0, "hidden_activation": "gelu", "norm_eps": 1e-5},
        **dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), False),
        **{"decoder_bias": True, "global_attn_every_n_layers": 3, "local_attention": 128},
        **{"max_position_embeddings": 8192, "tie_word_embeddings": True},
    },
    lengths=("vocab_size", "global_attn_every_n_layers"),
    divided=("num_attention_heads", "intermediate_size"),
    tied=(("model.embeddings.tok_embeddings.weight", "decoder.weight"),),
    mask=Mask.PADDING,
    # Half of local_attention before each position, and half behind.
    window=lambda layer, config: config["local_attention"] // 2 + 1 if layer == SLIDING else None,
    norm=Norm("LayerNorm", "norm_eps"),
    positions="rope",
    keeps_unrotated=True,
    feed_forward=lambda config: FeedForward(config["hidden_activation"], gated=True),
    dropouts=Dropouts(attention="attention_dropout", hidden=None, embedding="embedding_dropout"),
    ends_in_norm=(),
    # Published files name the norms' epsilon twice, and angles and windows as older versions of transformers did.
    ignored=(
        *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "layer_norm_eps", "mask_token_id"),
        *("position_embedding_type", "reference_compile", "repad_logits_with_grad"),
    ),
    only={
        **dict.fromkeys(("attention_dropout", "mlp_dropout"), Only(0.0, "blocks drop nothing")),
        "position_embedding_type": Only("absolute", "positions are rotary, whatever it says"),
        "tie_word_embeddings": Only(True, "the head's matrix is the token table"),
    },
)
