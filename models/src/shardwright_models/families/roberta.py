"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020): BERT's blocks, and positions behind padding's."""

from msgspec.structs import replace

from shardwright_formats.types import EMBEDDING, HEAD, Parameter
from shardwright_models.facts import Config
from shardwright_models.families.bert import BERT, embeddings
from shardwright_models.parameters import Parameters, linear, norm, vocabulary


def _parameters(layer: str, config: Config) -> Parameters:
    hidden = config["hidden_size"]
    if layer == EMBEDDING:
        yield from embeddings("roberta", config)
    elif layer == HEAD:
        yield from linear("lm_head.dense", hidden, hidden, bias=True)
        yield from norm("lm_head.layer_norm", hidden)
        yield from vocabulary("lm_head.decoder.weight", config)
        yield Parameter(name="lm_head.bias", shape=(config["vocab_size"],), tp_dim=0)
    else:
        yield from BERT.parameters(layer, config)


def _before(config: Config) -> int:
    """Return the rows up to padding's, which no token has; a configuration without padding is refused elsewhere."""
    padding = config["pad_token_id"]
    return padding + 1 if isinstance(padding, int) else 0


ROBERTA = replace(
    BERT,
    model_type="roberta",
    stock="RobertaForMaskedLM",
    runtime="roberta:Roberta",
    parameters=_parameters,
    defaults={**BERT.defaults, "pad_token_id": 1},
    tied=(("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),),
    positions_before=_before,
)
XLM_ROBERTA = replace(ROBERTA, model_type="xlm-roberta", stock="XLMRobertaForMaskedLM")
