"""The order of samples that lie in files by number: another in each epoch of training, one for all evaluation."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_train.data.sampling import samples_at
from shardwright_train.data.split import WHOLE, Split, SplitPart

_ORDER_OF_SPLITS = 2**40
"""Seed that no run has, which assigns samples to splits independently of the run."""


class Shuffled(NamedTuple):
    """The order of a split of so many samples.

    Files often have samples of one kind one after the other: the splits are those of one shuffled order of all.
    """

    samples: int
    seed: int
    part: SplitPart = WHOLE

    @property
    def per_epoch(self) -> int:
        """Return the number of samples of the split."""
        first, end = self._bounds
        return end - first

    def chosen(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places in the files of the samples with these numbers, counted over all epochs."""
        if self.part.split is Split.TRAIN:
            indices = samples_at(indices, self.per_epoch, self.seed)
        if self.part == WHOLE:
            return indices
        return samples_at(self._bounds[0] + indices % self.per_epoch, self.samples, _ORDER_OF_SPLITS)

    @property
    def _bounds(self) -> tuple[int, int]:
        begin, end = (round(share * self.samples) for share in self.part.bounds)
        return begin, end
