"""BERT (Devlin et al. 2019), trained as a masked language model."""

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config, Dropouts, Family, FeedForward, Mask, Norm, Only, Stack
from shardwright_models.parameters import Parameters, linear, norm, vocabulary

_HEAD = "cls.predictions"


def _parameters(layer: str, config: Config) -> Parameters:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if layer == EMBEDDING:
        yield from embeddings("bert", config)
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


def embeddings(base: str, config: Config) -> Parameters:
    """Yield those of the tables of tokens, positions and types, and of the norm, of a base model by its name."""
    hidden = config["hidden_size"]
    yield from vocabulary(f"{base}.embeddings.word_embeddings.weight", config)
    for name, rows in (("position", "max_position_embeddings"), ("token_type", "type_vocab_size")):
        yield Parameter(name=f"{base}.embeddings.{name}_embeddings.weight", shape=(config[rows], hidden))
    yield from norm(f"{base}.embeddings.LayerNorm", hidden)


BERT = Family(
    model_type="bert",
    stock="BertForMaskedLM",
    runtime="bert:Bert",
    parameters=_parameters,
    stacks=(Stack(),),
    defaults={"hidden_act": "gelu", "hidden_dropout_prob": 0.1, "tie_word_embeddings": True, "type_vocab_size": 2},
    lengths=("vocab_size", "max_position_embeddings", "type_vocab_size"),
    divided=("num_attention_heads", "intermediate_size"),
    tied=(("bert.embeddings.word_embeddings.weight", f"{_HEAD}.decoder.weight"),),
    mask=Mask.PADDING,
    norm=Norm("LayerNorm", "layer_norm_eps"),
    positions="learned_absolute",
    feed_forward=lambda config: FeedForward(config["hidden_act"], gated=False),
    dropouts=Dropouts(attention="attention_probs_dropout_prob", hidden="hidden_dropout_prob"),
    ends_in_norm=("full", "attention", "mlp"),
    ignored=("mask_token_id", "position_embedding_type"),
    only={
        "is_decoder": Only(False, "it fills in hidden tokens"),
        "add_cross_attention": Only(False, "there is one stack"),
        "position_embedding_type": Only("absolute", "transformers has no others"),
        "tie_word_embeddings": Only(True, "the head's matrix is the token table"),
    },
)
