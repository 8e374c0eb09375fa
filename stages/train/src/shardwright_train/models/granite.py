"""Granite 3 (Granite team 2024)."""

from torch import Tensor

from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.llama import Llama
from shardwright_train.models.stock import Pieces


class Granite(Llama):
    """Llama with scaled embeddings and logits; the stock blocks scale scores and sums."""

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding, multiplied as the configuration says."""
        (rows,) = super().embed(pieces, batch)
        return (rows * pieces.config.embedding_multiplier,)

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits, divided as the configuration says."""
        scaling: float = pieces.config.logits_scaling
        return super().logits(pieces, inputs) / scaling
