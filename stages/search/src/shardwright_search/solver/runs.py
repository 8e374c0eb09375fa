"""The runs of neighbouring elements that a pipeline stage can hold, equal ones told once."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.pareto import Ints, Numbers

__all__ = ["Run", "Runs", "runs_of"]


class Run(NamedTuple):
    """The types of a run's elements, and of the element before it (-1 at the start)."""

    before: int
    elements: tuple[int, ...]


class Runs(NamedTuple):
    """Every run of a chain of elements."""

    number: Ints
    """[start, end]: which run it is; -1 where end <= start."""
    runs: tuple[Run, ...]
    counts: Numbers
    """[runs, types]: how many elements of each type."""


@lru_cache(maxsize=8)
def runs_of(elements: tuple[int, ...]) -> Runs:
    """The runs of a chain; they depend on nothing else."""
    total = len(elements)
    number = np.full((total + 1, total + 1), -1)
    known: dict[Run, int] = {}
    for start in range(total):
        before = elements[start - 1] if start else -1
        for end in range(start + 1, total + 1):
            number[start, end] = known.setdefault(Run(before, elements[start:end]), len(known))
    counts = [[run.elements.count(kind) for kind in range(max(elements) + 1)] for run in known]
    return Runs(number, tuple(known), np.array(counts, float))
