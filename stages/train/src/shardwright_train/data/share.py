"""The part of a global batch that one rank works on."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = dict[str, Tensor]
"""Inputs and `labels` of some samples, which are the first dim of each; labels that are IGNORED do not count."""


class Share(NamedTuple):
    """A rank's share of a global batch: the samples of every microbatch that its pipeline stage reads."""

    microbatches: int
    microbatch_samples: int
    first: int = 0
    """Number of the first sample in a microbatch."""
    samples: int | None = None
    """Number of samples of each microbatch; None: all."""
    left_out: frozenset[str] = frozenset()
    """Tensors that only other pipeline stages read."""

    @property
    def global_samples(self) -> int:
        """Return the number of samples of the whole batch."""
        return self.microbatches * self.microbatch_samples

    @property
    def of_each(self) -> int:
        """Return the number of samples of each microbatch."""
        return self.microbatch_samples if self.samples is None else self.samples

    @property
    def rows(self) -> NDArray[np.int64]:
        """Return the numbers of the rank's samples in the global batch, one microbatch after the other."""
        starts = np.arange(self.microbatches)[:, None] * self.microbatch_samples + self.first
        return (starts + np.arange(self.of_each)).ravel()

    def of(self, batch: Batch) -> Batch:
        """Return the rank's part of a global batch."""
        return {name: x[self.rows] for name, x in batch.items() if name not in self.left_out}


def on_host(batch: Batch, device: torch.device) -> Batch:
    """Return a batch in host memory that a GPU can copy from asynchronously."""
    if device.type != "cuda":
        return batch
    with torch.cuda.device(device):  # in a new thread it is another
        return {name: x.pin_memory() for name, x in batch.items()}
