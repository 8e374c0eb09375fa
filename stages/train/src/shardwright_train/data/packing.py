"""Several documents in one sample, and what a model is told of where they meet."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright_train.data.boundaries import DOCUMENTS, POSITIONS, Boundaries
from shardwright_train.data.share import Batch
from shardwright_train.parallel.vocab import IGNORED


def with_boundaries(batch: Batch, documents: Tensor, boundaries: Boundaries, *, predicts_next: bool) -> Batch:
    """A batch with what tells its documents apart; documents [n, positions + 1] number those of each sample, ascending.

    Where each label is the token behind its position, and attention stays inside of documents, those that begin another
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
