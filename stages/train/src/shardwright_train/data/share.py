"""A rank's share of a global batch, and reading it before the step that needs it."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shardwright.launch.backend import on_accelerator
from shardwright_train.data.split import Boundaries
from shardwright_train.parallel.vocab import IGNORED

DOCUMENTS, POSITIONS = "documents", "positions"
"""Keys of the tensors [samples, positions] of a batch with each position's document, and its position in it."""
Batch = dict[str, Tensor]
"""Inputs and `labels`, samples first; labels equal to IGNORED do not count towards the loss."""
T = TypeVar("T")
_AHEAD = 2
"""Number of steps read ahead: one is ready while another is read."""


class BatchShare(NamedTuple):
    """A rank's share of a global batch: the samples of every microbatch that its pipeline stage reads."""

    microbatches: int
    microbatch_samples: int
    first: int = 0
    """Index of the rank's first sample in a microbatch."""
    samples: int | None = None
    """Number of samples of each microbatch; None: all."""
    left_out: frozenset[str] = frozenset()
    """Tensors that only other pipeline stages read."""
    depths: int = 0
    """Number of tokens after the next one that each position also predicts."""

    @property
    def global_samples(self) -> int:
        """Return the number of samples of the whole batch."""
        return self.microbatches * self.microbatch_samples

    @property
    def local_samples(self) -> int:
        """Return the rank's number of samples in each micro-batch."""
        return self.microbatch_samples if self.samples is None else self.samples

    @property
    def rows(self) -> NDArray[np.int64]:
        """Return the indices of the rank's samples in the global batch, one micro-batch after the other."""
        starts = np.arange(self.microbatches)[:, None] * self.microbatch_samples + self.first
        return (starts + np.arange(self.local_samples)).ravel()

    def part_of(self, batch: Batch) -> Batch:
        """Return the rank's part of a global batch."""
        return {name: x[self.rows] for name, x in batch.items() if name not in self.left_out}


def on_host(batch: Batch, device: torch.device) -> Batch:
    """Return a batch in host memory from which a GPU can copy asynchronously."""
    if not on_accelerator(device):
        return batch
    with torch.accelerator.device_index(device.index):  # a new thread starts on device 0
        return {name: x.pin_memory() for name, x in batch.items()}


def with_boundaries(batch: Batch, documents: Tensor, boundaries: Boundaries, *, predicts_next: bool) -> Batch:
    """Return a batch with the tensors that mark its documents.

    `documents` [n, positions + 1]: each token's document number, ascending in a sample. If labels are the next tokens
    (`predicts_next`) and attention stays within documents, a label that begins the next document does not count.
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


@contextmanager
def read_ahead(read: Callable[[int], T], steps: Iterable[int]) -> Iterator[Iterator[T]]:
    """Yield an iterator over `read(step)` for each step; a thread reads ahead of the consumer.

    An error of `read` is raised when the consumer takes that step's data, not when it is read.
    """
    with ThreadPoolExecutor(1, "reader") as thread:
        try:
            yield _taken(thread, read, iter(steps))
        finally:
            thread.shutdown(cancel_futures=True)


def _taken(thread: ThreadPoolExecutor, read: Callable[[int], T], steps: Iterator[int]) -> Iterator[T]:
    ahead: deque[Future[T]] = deque()
    for step in steps:
        ahead.append(thread.submit(read, step))
        if len(ahead) > _AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()
