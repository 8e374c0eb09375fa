"""Gemma 2 (Gemma team 2024)."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright_formats.types import EMBEDDING
from shardwright_train.data.share import Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.llama import Llama
from shardwright_train.models.stock import Pieces


class Gemma2(Llama):
    """Llama with scaled embeddings and bounded logits; the stock blocks have the rest."""

    def module(self, stock: Any, kind: str, index: int) -> nn.Module:
        """Return the modules of a layer, of which the table is a plain one: `embed` scales its rows."""
        module = super().module(stock, kind, index)
        if kind == EMBEDDING:
            rows, features = stock.model.embed_tokens.weight.shape
            padding, weight = stock.model.embed_tokens.padding_idx, stock.model.embed_tokens.weight
            table = nn.Embedding(rows, features, padding, device=weight.device, dtype=weight.dtype)
            module.set_submodule(self.embedding[0], table)
        return module

    def embed(self, pieces: Pieces, batch: Batch) -> States:
        """Return the embedding, scaled in its format by the root of the number of features."""
        (rows,) = super().embed(pieces, batch)
        return (rows * torch.tensor(pieces.config.hidden_size**0.5).to(rows.dtype),)

    def logits(self, pieces: Pieces, inputs: Tensor) -> Tensor:
        """Return the logits, which a hyperbolic tangent bounds."""
        logits, bound = super().logits(pieces, inputs), pieces.config.final_logit_softcapping
        return logits if bound is None else torch.tanh(logits / bound) * bound
