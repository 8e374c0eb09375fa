"""Encoders trained by masked language modelling: BERT, RoBERTa and ModernBERT.

BERT: Devlin et al. 2019. RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020) have BERT's blocks, and their
positions begin after the padding's position. Blocks of ModernBERT (Warner et al. 2024) attend within a window; every
third block attends to whole samples.
"""

from msgspec.structs import replace

from shardwright.models import traits
from shardwright.models.facts import Family
from shardwright.models.parameters import Parameters, linear, norm, vocabulary
from shardwright.models.traits import BLOCK, FULL, SLIDING, Config, Only, Stack
from shardwright.types import EMBEDDING, HEAD, Parameter

_HEAD = "cls.predictions"


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if layer == EMBEDDING:
        yield from _embeddings("bert", config)
    elif layer == HEAD:
        yield from linear(f"{_HEAD}.transform.dense", hidden, hidden, bias=True)
        yield from norm(f"{_HEAD}.transform.LayerNorm", hidden)
        yield from vocabulary(f"{_HEAD}.decoder.weight", config)
        yield Parameter(name=f"{_HEAD}.bias", shape=(config["vocab_size"],), tp_dim=0)
    else:
        for name in ("query", "key", "value"):
            yield from linear(f"attention.self.{name}", hidden, hidden, "columns", bias=True)
        yield from linear("attention.output.dense", hidden, hidden, "rows", bias=True)
        yield from norm("attention.output.LayerNorm", hidden)
        yield from linear("intermediate.dense", inner, hidden, "columns", bias=True)
        yield from linear("output.dense", hidden, inner, "rows", bias=True)
        yield from norm("output.LayerNorm", hidden)


def _embeddings(base: str, config: Config) -> Parameters:
    """Yield the parameters of the token, position and type tables and of the norm, named as in a base model."""
    hidden = config["hidden_size"]
    yield from vocabulary(f"{base}.embeddings.word_embeddings.weight", config)
    for name, rows in (("position", "max_position_embeddings"), ("token_type", "type_vocab_size")):
        yield Parameter(name=f"{base}.embeddings.{name}_embeddings.weight", shape=(config[rows], hidden))
    yield from norm(f"{base}.embeddings.LayerNorm", hidden)


BERT = Family(
    model_type="bert",
    stock=traits.StockModel(
        "BertForMaskedLM",
        tied=(("bert.embeddings.word_embeddings.weight", f"{_HEAD}.decoder.weight"),),
        places={BLOCK: "bert.encoder.layer.{}"},
    ),
    runtime="bert:Bert",
    keys=traits.Keys(
        {"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "tie_word_embeddings": True, "type_vocab_size": 2},
        lengths=("vocab_size", "max_position_embeddings", "type_vocab_size"),
        ignored=("mask_token_id", "position_embedding_type"),
        only={
            "is_decoder": Only(False, "it fills in hidden tokens"),
            "add_cross_attention": Only(False, "there is one stack"),
            "position_embedding_type": Only("absolute", "transformers has no others"),
            "tie_word_embeddings": Only(True, "the head's matrix is the token table"),
        },
    ),
    parameters=_parameters,
    stacks=(Stack(),),
    divided=traits.Divided(("num_attention_heads", "intermediate_size")),
    attention=traits.AttentionFacts(traits.Mask.PADDING, "learned_absolute"),
    norm=traits.Norm("LayerNorm", "layer_norm_eps", ends=("full", "attention", "mlp")),
    feed_forward=lambda config: traits.FeedForward(config["hidden_act"], gated=False),
    dropouts=traits.Dropouts(attention="attention_probs_dropout_prob", hidden="hidden_dropout_prob"),
)


def _roberta_parameters(layer: str, config: Config) -> Parameters:
    hidden = config["hidden_size"]
    if layer == EMBEDDING:
        yield from _embeddings("roberta", config)
    elif layer == HEAD:
        yield from linear("lm_head.dense", hidden, hidden, bias=True)
        yield from norm("lm_head.layer_norm", hidden)
        yield from vocabulary("lm_head.decoder.weight", config)
        yield Parameter(name="lm_head.bias", shape=(config["vocab_size"],), tp_dim=0)
    else:
        yield from BERT.parameters(layer, config)


def _before(config: Config) -> int:
    """Return the number of table rows up to the padding token's row, which no token uses; 0 without padding."""
    padding = config["pad_token_id"]
    return padding + 1 if isinstance(padding, int) else 0


ROBERTA = replace(
    BERT,
    model_type="roberta",
    stock=traits.StockModel(
        "RobertaForMaskedLM",
        tied=(("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),),
        places={BLOCK: "roberta.encoder.layer.{}"},
    ),
    runtime="bert:Roberta",
    keys=BERT.keys._replace(defaults={**BERT.keys.defaults, "pad_token_id": 1}),
    parameters=_roberta_parameters,
    attention=BERT.attention._replace(positions_before=_before),
)
XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta", stock=ROBERTA.stock._replace(name="XLMRobertaForMaskedLM"))

FIRST = "first"
"""The type of the first block, whose input was normed by the embedding."""


def _modernbert_parameters(layer: str, config: Config) -> Parameters:
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
    """Yield the parameters of several matrices that are stored as one."""
    yield Parameter(name=f"{name}.weight", shape=(count, outputs, inputs), tp_dim=1)
    if bias:
        yield Parameter(name=f"{name}.bias", shape=(count, outputs), tp_dim=1)


def _type_at(config: Config, index: int) -> str:
    if index == 0:
        return FIRST
    return SLIDING if index % config["global_attn_every_n_layers"] else FULL


MODERNBERT = Family(
    model_type="modernbert",
    stock=traits.StockModel(
        "ModernBertForMaskedLM", tied=(("model.embeddings.tok_embeddings.weight", "decoder.weight"),)
    ),
    runtime="bert:ModernBert",
    keys=traits.Keys(
        {
            **{"attention_dropout": 0.0, "embedding_dropout": 0.0, "hidden_activation": "gelu", "norm_eps": 1e-5},
            **dict.fromkeys(("attention_bias", "classifier_bias", "mlp_bias", "norm_bias"), False),
            **{"decoder_bias": True, "global_attn_every_n_layers": 3, "local_attention": 128},
            **{"max_position_embeddings": 8192, "tie_word_embeddings": True},
        },
        lengths=("vocab_size", "global_attn_every_n_layers"),
        # Published files contain the norms' epsilon twice, and angles and windows as in older versions of transformers.
        ignored=(
            *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "layer_norm_eps"),
            *("mask_token_id", "position_embedding_type", "reference_compile", "repad_logits_with_grad"),
        ),
        only={
            **dict.fromkeys(("attention_dropout", "mlp_dropout"), Only(0.0, "blocks drop nothing")),
            "position_embedding_type": Only("absolute", "positions are rotary, whatever it says"),
            "tie_word_embeddings": Only(True, "the head's matrix is the token table"),
        },
    ),
    parameters=_modernbert_parameters,
    stacks=(
        Stack(
            types=(FIRST, FULL, SLIDING), type_at=_type_at, typed_by="layer_types", first=FIRST, written={FIRST: FULL}
        ),
    ),
    divided=traits.Divided(("num_attention_heads", "intermediate_size")),
    attention=traits.AttentionFacts(
        traits.Mask.PADDING,
        "rope",
        # Half of local_attention before each position, and half after it.
        window=lambda layer, config: config["local_attention"] // 2 + 1 if layer == SLIDING else None,
        keeps_unrotated=True,
    ),
    norm=traits.Norm("LayerNorm", "norm_eps", ends=()),
    feed_forward=lambda config: traits.FeedForward(config["hidden_activation"], gated=True),
    dropouts=traits.Dropouts(attention="attention_dropout", hidden=None, embedding="embedding_dropout"),
)
