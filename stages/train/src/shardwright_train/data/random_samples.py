"""Random samples, for timing alone: no data is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import sha256_of_value
from shardwright_train.data.share import Batch, Share
from shardwright_train.data.split import Part, Split
from shardwright_train.parallel.rng import seed_of
from shardwright_train.parallel.vocab import IGNORED

RANDOM = Path("random")
"""Stands for a folder of data where none is to be read."""
_EPOCH = 1 << 20


class _Objective(Protocol):
    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Inputs and labels of random samples."""


@dataclass(frozen=True)
class RandomBatches:
    """The global batches of a run on random samples: a function of seed and step alone, whatever the plan."""

    objective: _Objective
    seed: int

    @property
    def sha256(self) -> str:
        """Identity of the kind of samples."""
        return sha256_of_value([str(RANDOM), repr(self.objective)])

    @property
    def per_epoch(self) -> int:
        """There is no end to them; an epoch is this many."""
        return _EPOCH

    def read(self, first: int, share: Share) -> Batch:
        """A rank's share of the batch that begins with a sample's number; of a sample every rank makes the same."""
        made = [self._sample(first + int(row)) for row in share.rows]
        return {name: torch.cat([one[name] for one in made]) for name in made[0] if name not in share.left_out}

    def counted(self, first: int, samples: int) -> int:
        """Number of labels of a batch that count."""
        made = (self._sample(first + number)["labels"] for number in range(samples))
        return sum(int((labels != IGNORED).sum().item()) for labels in made)

    def check_contents(self) -> None:
        """There are none."""

    def _sample(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "random sample", index))
        return self.objective.random_batch(1, generator)


def random_batches(objective: _Objective, seed: int, part: Part) -> RandomBatches:
    """Random samples to train on; BadInput for another split."""
    if part.split is not Split.TRAIN:
        raise BadInput(RANDOM, f"random samples have no {part.split} split", "evaluate on data")
    return RandomBatches(objective, seed)
