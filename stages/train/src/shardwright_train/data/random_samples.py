"""Random samples, for timing alone: no data is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwright_formats.io import BadInput, sha256_of_value
from shardwright_train.data.share import Batch, Share
from shardwright_train.data.split import Part, Split
from shardwright_train.parallel.rng import seed_of
from shardwright_train.parallel.vocab import IGNORED

RANDOM = Path("random")
"""Name in place of a data folder that selects random samples."""
_EPOCH = 1 << 20


class _Objective(Protocol):
    def random_batch(self, samples: int, generator: torch.Generator) -> Batch:
        """Return inputs and labels of random samples."""


@dataclass(frozen=True)
class RandomBatches:
    """The global batches of a run on random samples: a function of seed and step alone, whatever the plan."""

    objective: _Objective
    seed: int

    @property
    def sha256(self) -> str:
        """Return the identity of the kind of samples."""
        return sha256_of_value([str(RANDOM), repr(self.objective)])

    @property
    def per_epoch(self) -> int:
        """Return the nominal length of an epoch; the samples are endless."""
        return _EPOCH

    def read(self, first: int, share: Share) -> Batch:
        """Return a rank's share of the batch that begins with a sample's number; every rank makes the same samples."""
        made = [self._sample(first + int(row)) for row in share.rows]
        return {name: torch.cat([one[name] for one in made]) for name in made[0] if name not in share.left_out}

    def counted(self, first: int, samples: int) -> int:
        """Return the number of labels of a batch that count."""
        made = (self._sample(first + number)["labels"] for number in range(samples))
        return sum(int((labels != IGNORED).sum().item()) for labels in made)

    def check_contents(self) -> None:
        """Do nothing: there are no files to check."""

    def _sample(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(seed_of(self.seed, "random sample", index))
        return self.objective.random_batch(1, generator)


def random_batches(objective: _Objective, seed: int, part: Part) -> RandomBatches:
    """Return random samples to train on; raise BadInput for any other split."""
    if part.split is not Split.TRAIN:
        raise BadInput(RANDOM, f"random samples have no {part.split} split", "evaluate on data")
    return RandomBatches(objective, seed)
