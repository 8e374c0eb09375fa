"""Settings of a run's data: the split into training, validation and test, and the treatment of document boundaries."""

from enum import StrEnum
from typing import NamedTuple

from shardwright.io import BadInput


class Split(StrEnum):
    """The splits of data: training, validation, test."""

    TRAIN = "train"
    VALID = "valid"
    TEST = "test"


class Fractions(NamedTuple):
    """The fractions of the validation and test splits; training has the rest."""

    valid: float = 0.0
    test: float = 0.0

    def bounds(self, split: Split) -> tuple[float, float]:
        """Return the beginning and end of a split, as fractions of the data; training comes first, the test split last.

        Raises BadInput if nothing is left to train on.
        """
        if self.valid + self.test >= 1:
            problem = f"{self.valid} of the data to validate and {self.test} to test leave none to train on"
            raise BadInput("--valid-fraction, --test-fraction", problem, "ask for less")
        ends = (0.0, 1.0 - self.valid - self.test, 1.0 - self.test, 1.0)
        number = list(Split).index(split)
        return ends[number], ends[number + 1]


class LossOn(StrEnum):
    """Which tokens of a text are learned."""

    ALL = "all"
    """Each token."""
    COMPLETIONS = "completions"
    """What is marked as the answer to a prompt; the rest is only read."""


class SplitPart(NamedTuple):
    """A split of data divided by given fractions."""

    split: Split = Split.TRAIN
    fractions: Fractions = Fractions()

    @property
    def bounds(self) -> tuple[float, float]:
        """The beginning and end of the part, as fractions of the data."""
        return self.fractions.bounds(self.split)

    @property
    def identity(self) -> list[float | str]:
        """Return values that distinguish this split from other splits of the same data; empty for all data."""
        return [] if self == WHOLE else [self.split.value, *self.fractions]


WHOLE = SplitPart()
"""The part with all data, to train on."""


class Boundaries(NamedTuple):
    """The treatment of document boundaries in a sample, with Megatron-LM's names for the settings."""

    reset_attention_mask: bool = False
    """Whether attention and prediction stay within each document."""
    reset_position_ids: bool = False
    """Whether positions are numbered from 0 in each document."""


ACROSS = Boundaries()
"""Boundaries that are ignored: a sample is treated as one text, whatever its documents."""
