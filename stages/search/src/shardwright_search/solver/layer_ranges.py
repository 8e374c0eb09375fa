"""The runs of neighbouring layers that a pipeline stage can hold, equal ones told once."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwright_search.step.arrays import Ints, Numbers


class Run(NamedTuple):
    """The types of a run's layers, and of the layer before it (-1 at the start)."""

    before: int
    layers: tuple[int, ...]


class PivotGroup(NamedTuple):
    """Runs that end alike: in a layer of one type, with or without the head behind it."""

    kind: int
    """The layer's type; -1: the runs hold no layer."""
    behind: int
    """The head's type; -1: nothing is behind the layer."""
    rows: Ints
    counts: Numbers
    """[rows, types]: how many layers of each type are before the layer; all of them where there is no layer."""


class Runs(NamedTuple):
    """Every run of a chain of layers."""

    number: Ints
    """[start, end]: which run it is; -1 where end <= start."""
    runs: tuple[Run, ...]
    counts: Numbers
    """[runs, types]: how many layers of each type."""
    first: Ints
    """[runs]: type of the first layer."""
    last: Ints
    groups: tuple[PivotGroup, ...]


def pivot_of(layers: Sequence[int], head: int) -> tuple[int | None, int]:
    """Where the last layer of a run is, if it is at the end or right before the head, and what is behind it or -1."""
    if layers[-1] != head:
        return len(layers) - 1, -1
    return (len(layers) - 2, head) if len(layers) > 1 else (None, -1)


@lru_cache(maxsize=8)
def runs_of(layers: tuple[int, ...]) -> Runs:
    """The runs of a chain; they depend on nothing else."""
    total = len(layers)
    number = np.full((total + 1, total + 1), -1)
    known: dict[Run, int] = {}
    for start in range(total):
        before = layers[start - 1] if start else -1
        for end in range(start + 1, total + 1):
            number[start, end] = known.setdefault(Run(before, layers[start:end]), len(known))
    counts = np.array([[run.layers.count(kind) for kind in range(max(layers) + 1)] for run in known], float)
    first, last = (np.array([run.layers[i] for run in known]) for i in (0, -1))
    return Runs(number, tuple(known), counts, first, last, _groups(tuple(known), counts, layers[-1]))


def _groups(runs: Sequence[Run], counts: Numbers, head: int) -> tuple[PivotGroup, ...]:
    found: dict[tuple[int, int], list[int]] = {}
    for number, run in enumerate(runs):
        pivot, behind = pivot_of(run.layers, head)
        found.setdefault((-1 if pivot is None else run.layers[pivot], behind), []).append(number)
    kinds = np.arange(counts.shape[1])
    return tuple(
        PivotGroup(kind, behind, np.array(rows), counts[rows] - (kinds == kind) - (kinds == behind))
        for (kind, behind), rows in found.items()
    )
