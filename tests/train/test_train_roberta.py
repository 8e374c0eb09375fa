"""RoBERTa's positions are the stock model's, wherever padding stands and documents begin."""

import pytest
import torch
from tiny_models import tiny
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from shardwright_train.data.share import POSITIONS
from shardwright_train.models.base import family_named
from shardwright_train.models.bert import Roberta

PADDING = 5
LENGTHS = (7, 1, 8)
"""Of the documents of each sample."""


class Share:
    """Tensor parallelism whose ranks hold half of the positions each."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def positions(self, length: int) -> slice:
        return slice(self.rank * length // 2, (self.rank + 1) * length // 2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("documents", [False, True])
def test_positions_count_the_tokens_that_are_not_padding(rank: int, documents: bool) -> None:
    model, family = tiny("roberta"), family_named("roberta", "test")
    assert isinstance(family, Roberta)
    tokens = torch.randint(3, 8, (20, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    parts = tokens.split(LENGTHS if documents else sum(LENGTHS), 1)
    stock = [RobertaEmbeddings.create_position_ids_from_input_ids(part, PADDING) for part in parts]
    batch = {"tokens": tokens}
    if documents:
        batch[POSITIONS] = torch.cat([torch.arange(length) for length in LENGTHS]).expand_as(tokens)
    with torch.device("meta"):
        pieces = family.build(model, "embedding")
    pieces.tensor_parallel = Share(rank)
    held = Share(rank).positions(sum(LENGTHS))
    assert torch.equal(family.numbers(pieces, batch), torch.cat(stock, 1)[:, held])
