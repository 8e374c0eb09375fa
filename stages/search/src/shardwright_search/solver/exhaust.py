"""Solves every target up to its own limit, which may fall as plans of other targets are found."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.branch_and_bound import Search
from shardwright_search.solver.stopping import ended
from shardwright_search.solver.targets import Best, C, Solvable, Target


class Exhausted(NamedTuple):
    """The bounds at the end of a search."""

    bounds: tuple[float, ...]
    """Lower bound of the scores of a target's plans, unless its limit is lower; infinity: it has no plan."""
    open: tuple[int, ...]
    """The targets that may have a plan below their limit: none, unless the search was stopped."""
    looked_at: int
    solved: int
    stopped: bool


def exhaust(
    targets: Sequence[Target[C]],
    solvable: Callable[[C], Solvable],
    limit_of: Callable[[Target[C]], float],
    take: Callable[[Best[C]], None],
    deadline: float | None = None,
    report: Callable[[float, int], None] = lambda bound, left: None,
) -> Exhausted:
    """Pass the best plan of each target below its limit to `take`, as soon as it is found.

    Targets are worked on by ascending bound. So where limits come from plans with a lower score alone, a target is
    solved no further than it must be: all plans below its bound are known. `deadline` and Ctrl-C end the search early.
    `report` hears the least bound and how many targets are left.
    """
    search = Search(targets, solvable, 1, np.inf, True)
    stopped = not ended(partial(search.run, limit_of, report, take), deadline)
    left = search.unsolved()
    bounds = [inf] * len(targets)
    for number, bound in (search.final_scores() | left).items():
        bounds[number] = bound
    open_ = {number for number, bound in left.items() if bound < limit_of(targets[number])}
    return Exhausted(tuple(bounds), tuple(sorted(open_)), search.looked_at, len(search.plans), stopped)
