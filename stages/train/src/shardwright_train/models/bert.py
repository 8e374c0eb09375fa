"""BERT (Devlin et al. 2019), trained as a masked language model."""

from typing import Any

import torch
from torch import Tensor

from shardwright_models.facts import BLOCK
from shardwright_train.data.objectives import Masked
from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.base import Family
from shardwright_train.models.stock import Pieces
from shardwright_train.parallel.sharding_rules import Parts
from shardwright_train.parallel.vocab import positions_of, token_embedding

_EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "dropout")


class Bert(Family):
    """The BERT family: column-parallel q, k, v, intermediate; row-parallel outputs; norms, head's dense replicated."""

    embedding = tuple(f"bert.embeddings.{name}" for name in _EMBEDDINGS)
    head: tuple[str, ...] = ("cls.predictions.transform", "cls.predictions.decoder")
    parts = {
        BLOCK: Parts(
            "bert.encoder.layer",
            attention=("attention",),
            mlp=("feed_forward_chunk",),
            products=("attention.self", "intermediate"),
        )
    }
    plan = {
        "word_embeddings": "embedding_rowwise",
        **dict.fromkeys(("query", "key", "value", "intermediate.dense"), "colwise"),
        "output.dense": "rowwise",
        "decoder": "colwise_gather_output",
    }
    objective = Masked

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the sum of the vectors of token, position and type (always 0), normed."""
        stock: Any = pieces.get_submodule(self.embedding[0].rpartition(".")[0])
        positions = self.numbers(pieces, batch)
        summed = token_embedding(stock.word_embeddings, batch["tokens"], pieces.tensor_parallel)
        summed = summed + stock.position_embeddings(positions)
        summed = summed + stock.token_type_embeddings(torch.zeros_like(positions))
        return (stock.dropout(stock.LayerNorm(summed)),)

    def numbers(self, pieces: Pieces, batch: Batch) -> Tensor:
        """Return the rows of the table of positions of this rank's tokens."""
        return positions_of(batch["tokens"], pieces.tensor_parallel, batch.get(POSITIONS))
