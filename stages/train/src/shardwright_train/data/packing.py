"""Boundaries of several documents in one sample, in the form that a model reads."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright_train.data.boundaries import DOCUMENTS, POSITIONS, Boundaries
from shardwright_train.data.share import Batch
from shardwright_train.parallel.vocab import IGNORED


def with_boundaries(batch: Batch, documents: Tensor, boundaries: Boundaries, *, predicts_next: bool) -> Batch:
    """Return a batch with the tensors that tell its documents apart.

    `documents` [n, positions + 1] number the documents of each sample, ascending.
    Where each label is the token after its position, and attention stays within documents, labels that begin another
    document do not count.
    """
    inputs = documents[:, :-1].contiguous()
    batch = dict(batch)
    if boundaries.reset_attention_mask:
        batch[DOCUMENTS] = inputs
        if predicts_next:
            batch["labels"] = batch["labels"].masked_fill(documents[:, 1:] != inputs, IGNORED)
    if boundaries.reset_position_ids:
        places = torch.arange(inputs.shape[1]).expand_as(inputs)
        begins = F.pad(inputs[:, 1:] != inputs[:, :-1], (1, 0), value=True)
        batch[POSITIONS] = places - places.where(begins, torch.zeros_like(places)).cummax(1).values
    return batch
