"""The part of a global batch that one rank works on."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Batch = dict[str, Tensor]
"""Inputs and `labels` of some samples, which are the first dim of each; labels that are IGNORED do not count."""


class Share(NamedTuple):
    """The same samples of every micro-batch, of each what the rank's pipeline stage reads."""

    microbatches: int
    microbatch_samples: int
    first: int = 0
    """Number of the first sample of a micro-batch."""
    samples: int | None = None
    """How many of each micro-batch; None: all."""
    left_out: frozenset[str] = frozenset()
    """The tensors that other pipeline stages alone read."""

    @property
    def global_samples(self) -> int:
        """Samples of the whole batch."""
        return self.microbatches * self.microbatch_samples

    @property
    def of_each(self) -> int:
        """Samples of each micro-batch."""
        return self.microbatch_samples if self.samples is None else self.samples

    @property
    def rows(self) -> NDArray[np.int64]:
        """Numbers of the rank's samples in the global batch, one micro-batch after the other."""
        starts = np.arange(self.microbatches)[:, None] * self.microbatch_samples + self.first
        return (starts + np.arange(self.of_each)).ravel()

    def of(self, batch: Batch) -> Batch:
        """The rank's part of a global batch."""
        return {name: x[self.rows] for name, x in batch.items() if name not in self.left_out}


def on_host(batch: Batch, device: torch.device) -> Batch:
    """A batch in host memory that a GPU copies from while the host goes on."""
    if device.type != "cuda":
        return batch
    with torch.cuda.device(device):  # in a new thread it is another
        return {name: x.pin_memory() for name, x in batch.items()}
