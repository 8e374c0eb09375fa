"""The best plan over many cases: bound all of them, then solve the most promising ones in growing windows.

Each case is bounded first. The one with the least bound is solved below a window a little above it; a window without a
plan is a proof that raises the bound. The search ends when no bound is below the best plan. Stopped early, it still
knows the least bound of what is left, and so the gap.
"""

import heapq
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shardwright_search.solver.partition import Found

__all__ = ["Best", "Optimum", "Solvable", "Stopped", "Target", "optimise"]

_WINDOWS = (0.002, 0.01, 0.04, 0.15, 0.6, np.inf)
_FIRST = 1
"""Plans that a window is asked for while the best one is looked for."""


class Solvable(Protocol):
    """A case that is bounded and can be solved below a window."""

    lower_ps: float

    def solve_below(self, below_ps: float, most: int, tick: Callable[[], None]) -> tuple[Found, ...]:
        """As `partition.solve_below`."""
        ...


C = TypeVar("C")


class Target(NamedTuple, Generic[C]):
    """A case and how its T becomes the number that cases are compared by: (T + offset_ps) * scale."""

    case: C
    offset_ps: float
    scale: float

    def score(self, time_ps: float) -> float:
        """What is minimised."""
        return (time_ps + self.offset_ps) * self.scale

    def time_ps(self, score: float) -> float:
        """The T of a score."""
        return score / self.scale - self.offset_ps


class Best(NamedTuple, Generic[C]):
    """A plan of a case, and its score."""

    target: Target[C]
    found: Found
    score: float


class Optimum(NamedTuple, Generic[C]):
    """What the search knows in the end."""

    best: Best[C] | None
    near: tuple[Best[C], ...]
    """Plans of a score within the asked share of the best, the best first."""
    bound: float
    """No plan of any case has a lower score."""
    bounds: tuple[tuple[float, Target[C]], ...]
    """Every case that a plan may fit in, with the bound on its score, the least first."""
    bounded: int
    solved: int
    stopped: bool


class Stopped(Exception):
    """Time is up."""


def optimise(
    targets: Sequence[Target[C]],
    solvable: Callable[[C], Solvable],
    near: float = 0.0,
    most: int = 1,
    deadline: float | None = None,
    report: Callable[[float, float, int], None] = lambda best, bound, left: None,
    known: Best[C] | None = None,
) -> Optimum[C]:
    """The best plan of all cases, and up to `most` of each case within `near` of it.

    `deadline` is a time of `monotonic`; it and Ctrl-C end the search early. `report` hears the best score, the least
    bound and how many cases are left. `known` is a plan to start from.
    """

    def tick() -> None:
        if deadline is not None and monotonic() > deadline:
            raise Stopped

    heap: list[tuple[float, int, int]] = []
    best, solved, bounded, current = known, set[int](), 0, -np.inf
    every: list[tuple[float, Target[C]]] = []
    try:
        for number, target in enumerate(targets):
            tick()
            bound = target.score(solvable(target.case).lower_ps)
            bounded += 1
            if np.isfinite(bound):
                heap.append((bound, number, 0))
                every.append((bound, target))
        heapq.heapify(heap)
        while heap and (best is None or heap[0][0] < best.score):
            bound, number, window = heapq.heappop(heap)
            current, target = bound, targets[number]
            report(np.inf if best is None else best.score, bound, len(heap) + 1)
            cut = min(bound * (1 + _WINDOWS[window]), np.inf if best is None else best.score)
            found = solvable(target.case).solve_below(target.time_ps(cut), _FIRST, tick)
            solved.add(number)
            current = np.inf
            if found:
                best = Best(target, found[0], target.score(found[0].objective_ps))
            elif np.isfinite(cut):
                heapq.heappush(heap, (cut, number, window + 1))
        if best is None:
            return Optimum(None, (), np.inf, tuple(sorted(every, key=_by_bound)), bounded, len(solved), False)
        near_by = _near(every, solvable, best, near, most, tick)
        return Optimum(best, near_by, best.score, tuple(sorted(every, key=_by_bound)), bounded, len(solved), False)
    except (Stopped, KeyboardInterrupt):
        left = [bound for bound, _, _ in heap] + [current]
        lower = 0.0 if bounded < len(targets) else min([bound for bound in left if bound > -np.inf], default=0.0)
        bound = min(lower, np.inf if best is None else best.score)
        return Optimum(
            best,
            () if best is None else (best,),
            bound,
            tuple(sorted(every, key=_by_bound)),
            bounded,
            len(solved),
            True,
        )


def _near(
    every: Sequence[tuple[float, Target[C]]],
    solvable: Callable[[C], Solvable],
    best: Best[C],
    near: float,
    most: int,
    tick: Callable[[], None],
) -> tuple[Best[C], ...]:
    """Plans within a share of the best: the best one of each case, and those that were found beside it."""
    limit = best.score * (1 + near)
    found: list[Best[C]] = []
    for bound, target in sorted(every, key=_by_bound):
        if bound > limit or most <= 1:
            break
        for window in _WINDOWS:
            cut = np.nextafter(min(limit, bound * (1 + window)), np.inf)
            plans = solvable(target.case).solve_below(target.time_ps(cut), most, tick)
            found += [Best(target, one, target.score(one.objective_ps)) for one in plans]
            if plans or cut > limit:
                break
    others = [one for one in found if one.found.solution != best.found.solution or one.target != best.target]
    return (best, *sorted(others, key=lambda one: one.score))


def _by_bound(bounded: tuple[float, Target[C]]) -> float:
    return bounded[0]
