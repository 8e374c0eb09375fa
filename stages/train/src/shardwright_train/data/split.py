"""Which part of the data a run trains on, and which it is evaluated on."""

from enum import StrEnum
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput


class Split(StrEnum):
    """A part of the data."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


class Fractions(NamedTuple):
    """How much of the data each split has; training has what is left."""

    valid: float = 0.0
    test: float = 0.0

    def bounds(self, split: Split) -> tuple[float, float]:
        """Where a split begins and ends, as shares of the whole: training comes first, the test split last.

        Raises BadInput where nothing is left to train on.
        """
        if self.valid + self.test >= 1:
            what = f"{self.valid} of the data to validate and {self.test} to test leave none to train on"
            raise BadInput("--valid-fraction, --test-fraction", what, "ask for less")
        ends = (0.0, 1.0 - self.valid - self.test, 1.0 - self.test, 1.0)
        number = list(Split).index(split)
        return ends[number], ends[number + 1]


class Part(NamedTuple):
    """A split of data that is divided so."""

    split: Split = Split.TRAIN
    fractions: Fractions = Fractions()

    @property
    def bounds(self) -> tuple[float, float]:
        """Where it begins and ends, as shares of the whole."""
        return self.fractions.bounds(self.split)

    @property
    def identity(self) -> list[float | str]:
        """What tells it from another part of the same data; empty where it is all of it."""
        return [] if self == WHOLE else [self.split.value, *self.fractions]


WHOLE = Part()
"""All data, to train on."""
