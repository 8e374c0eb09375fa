"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020), trained as masked language models."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

from shardwright_train.data.share import POSITIONS, Batch
from shardwright_train.models.auxiliary_loss import States
from shardwright_train.models.bert import Bert
from shardwright_train.models.stock import Pieces


class Roberta(Bert):
    """The BERT family, whose positions count the tokens that are not padding, from the row behind padding's."""

    embedding = tuple(path.replace("bert.", "roberta.", 1) for path in Bert.embedding)
    head = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
    parts = {kind: parts._replace(path=f"roberta.{parts.path.partition('.')[2]}") for kind, parts in Bert.parts.items()}

    def configured(self, config: Mapping[str, Any]) -> Any:
        """Return the configuration; raise ValueError where there is no padding, whose token positions begin behind."""
        configured = super().configured(config)
        if configured.pad_token_id is None:
            raise ValueError("pad_token_id null cannot be trained: positions begin behind it")
        return configured

    def numbers(self, pieces: Pieces, batch: Batch) -> Tensor:
        """Return the rows of the table of positions of this rank's tokens; each document of a sample begins anew."""
        padding, held = pieces.config.pad_token_id, pieces.tensor_parallel.positions(batch["tokens"].shape[1])
        real = (batch["tokens"] != padding).long()
        counted = real.cumsum(1)
        if POSITIONS in batch:
            begins = torch.arange(real.shape[1], device=real.device) - batch[POSITIONS]
            counted = counted - (counted - real).gather(1, begins)
        rows: Tensor = counted * real + padding
        return rows[:, held]

    def normed(self, pieces: Pieces, states: States) -> Tensor:
        """Return the last states, transformed and normed."""
        dense, norm = (pieces.get_submodule(path) for path in self.head[:-1])
        normed: Tensor = norm(gelu(dense(states[-1])))
        return normed
