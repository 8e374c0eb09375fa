"""The best plan over many cases: bound all of them, then solve the most promising ones in growing windows.

Each case is bounded first. The one with the least bound is solved below a window a little above it; a window without a
plan is a proof that raises the bound. The search ends when no bound is below the best plan. Stopped early, it still
knows the least bound of what is left, and so the gap.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shardwright_search.solver.partition import Found

__all__ = ["Best", "Optimum", "Solvable", "Stopped", "Target", "optimise"]

_GLANCED = -1
_WINDOWS = (0.001, 0.002, 0.005, 0.015, 0.05, 0.2, 1.0, np.inf)


class Solvable(Protocol):
    """A case that can be bounded, and solved below a window."""

    @property
    def glance_ps(self) -> float:
        """A quick lower bound on T."""
        ...

    @property
    def lower_ps(self) -> float:
        """A lower bound on T."""
        ...

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[Found, ...]:
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
    """Every case that a plan may fit in, with what is known of its least score, the least first."""
    looked_at: int
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
    most_labels: float = np.inf,
) -> Optimum[C]:
    """The best plan of all cases, and up to `most` of each case within `near` of it.

    `deadline` is a time of `monotonic`; it and Ctrl-C end the search early. `report` hears the best score, the least
    bound and how many cases are left. After `most_labels` labels it ends early, too.
    """
    labels = 0

    def tick(made: int = 0) -> None:
        nonlocal labels
        labels += made
        if labels > most_labels or (deadline is not None and monotonic() > deadline):
            raise Stopped

    heap: list[_Open] = []
    plans: dict[int, tuple[Best[C], ...]] = {}
    best: Best[C] | None = None
    now, stopped = _Open(0.0, -1, 0), False
    solved: set[int] = set()
    looked_at = 0

    def solve(here: _Open, limit: float) -> None:
        """Below the next window of a case; without a plan there its bound is higher, or it has none."""
        nonlocal now
        now, target = here, targets[here.number]
        cut = min(here.bound * (1 + _WINDOWS[here.window]), limit)
        solved.add(here.number)
        found = solvable(target.case).solve_below(target.time_ps(cut), most, tick)
        plans[here.number] = tuple(Best(target, one, target.score(one.objective_ps)) for one in found)
        if not found and np.isfinite(cut):
            heapq.heappush(heap, _Open(cut, here.number, min(here.window + 1, len(_WINDOWS) - 1)))
        now = _Open(np.inf, -1, 0)

    def bounded(here: _Open) -> None:
        """Bound a case that was only glanced at."""
        nonlocal now
        now = here
        bound = max(here.bound, targets[here.number].score(solvable(targets[here.number].case).lower_ps))
        if np.isfinite(bound):
            heapq.heappush(heap, _Open(bound, here.number, 0))
        now = _Open(np.inf, -1, 0)

    try:
        for number, target in enumerate(targets):
            tick()
            bound = target.score(solvable(target.case).glance_ps)
            looked_at += 1
            if np.isfinite(bound):
                heap.append(_Open(bound, number, _GLANCED))
        heapq.heapify(heap)
        now = _Open(np.inf, -1, 0)
        while heap and (best is None or heap[0].bound < best.score):
            report(np.inf if best is None else best.score, heap[0].bound, len(heap))
            here = heapq.heappop(heap)
            if here.window == _GLANCED:
                bounded(here)
                continue
            solve(here, np.inf if best is None else best.score)
            best = min((*plans[here.number][:1], *((best,) if best is not None else ())), key=_score, default=None)
    except (Stopped, KeyboardInterrupt):
        stopped = True
    left = min([now.bound, *(one.bound for one in heap)], default=np.inf)
    bound = min(left, np.inf if best is None else best.score)
    try:
        while not stopped and best is not None and heap and heap[0].bound <= best.score * (1 + near):
            here = heapq.heappop(heap)
            if here.window == _GLANCED:
                bounded(here)
            else:
                solve(here, np.nextafter(best.score * (1 + near), np.inf))
    except (Stopped, KeyboardInterrupt):
        stopped = True
    close = [one for of_case in plans.values() for one in of_case if best and one.score <= best.score * (1 + near)]
    return Optimum(
        best,
        tuple(sorted(close, key=_score)) or (() if best is None else (best,)),
        bound,
        _bounds(targets, heap, plans),
        looked_at,
        len(solved),
        stopped,
    )


class _Open(NamedTuple):
    """A case that is not solved yet, by its bound, and the next window to solve it below."""

    bound: float
    number: int
    window: int


def _score(best: Best[C]) -> float:
    return best.score


def _bounds(
    targets: Sequence[Target[C]], heap: Sequence[_Open], plans: Mapping[int, Sequence[Best[C]]]
) -> tuple[tuple[float, Target[C]], ...]:
    known = {one.number: one.bound for one in heap} | {number: own[0].score for number, own in plans.items() if own}
    return tuple((bound, targets[number]) for number, bound in sorted(known.items(), key=lambda item: item[::-1]))
