"""The best plan over many configurations: bound all, then solve the most promising ones by bound tightening.

Each configuration is bounded first. The one with the least bound is solved below a limit a little above its bound. If
no plan is below that limit, the limit is the new bound, and the next limit is further above it. The search ends when
no bound is below the best plan. If it is stopped early, it still knows the least bound of what is left, and so the gap.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from math import inf
from typing import Generic, NamedTuple

import numpy as np

from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.stopping import Spent, ended
from shardwright_search.solver.targets import AT_ONCE, GUESSED, WIDE, Best, C, Optimum, Solvable, Target, best_guess

_MAX_NEAR_LABELS = 100_000
"""Most labels made to find plans near the best one, once the best one is proven to be within the gap."""
_MAX_WIDER_LABELS = 6_000
"""Most labels made to find a configuration's plans above the limit that it was solved below."""
_RELAXED = -1
"""The value of `tries` for a configuration that has only a relaxed bound."""
_LIMITS = (0.001, 0.0015, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0)
"""Shares by which each limit exceeds the one before it; the first exceeds the bound."""


class Open(NamedTuple):
    """A configuration that is not solved yet, sorted by its bound; `tries`: how many limits have no plan below them."""

    bound: float
    number: int
    tries: int
    guess: float | None = None
    """The score of a guessed plan; infinity: no plan was found; None: no plan has been guessed yet."""


_NOTHING = Open(np.inf, -1, 0)
"""No configuration."""


def _cuts_of(here: Open, limit: float) -> list[float]:
    """Return the ascending limits to try for a configuration, from one above its bound up to `limit`."""
    cuts = list(accumulate(_LIMITS[here.tries :], lambda cut, more: cut * (1 + more), initial=here.bound))[1:]
    return [*(cut for cut in cuts if cut < limit), limit]


def optimize(
    targets: Sequence[Target[C]],
    solvable: Callable[[C], Solvable],
    near: float = 0.0,
    most: int = 1,
    deadline: float | None = None,
    report: Callable[[float, float, int], None] = lambda best, bound, left: None,
    max_labels: float = np.inf,
    waits: Callable[[C], bool] = lambda configuration: False,
    wide: bool = False,
    gap: float = 0.0,
) -> Optimum[C]:
    """Return the best plan of all configurations, and up to `most` plans of each with scores within `near` of the best.

    `near` and `gap` are shares. With a `gap` the search ends as soon as the best plan is proven to be within that share
    of the least bound; plans near it are then looked for only as far as that is little work, and the best of all is the
    answer. `deadline`, Ctrl-C and `max_labels` labels end the search early. `report` receives the best score, the least
    bound and the number of configurations left. Configurations for which `waits` is true are solved after all others,
    so that a search that is stopped meanwhile has the best plan of the others. `wide`: bounds are loose, so plans are
    guessed far above them, and further plans must be better than the guessed ones.
    """
    search = Search(targets, solvable, most, max_labels, wide)

    def progress(bound: float, left: int) -> None:
        known = search.best_known
        report(np.inf if known is None else known.score, bound, left)

    stopped = not ended(partial(search.run, lambda _: search.best_score / (1 + gap), progress, waits=waits), deadline)
    best, limit = search.best_known if stopped else search.best, search.best_score * (1 + near)
    if not stopped and best is not None:
        # Plans near the best only serve the later choice by simulated time: with a gap they may not cost much.
        stopped = not ended(partial(search.find_all, limit, _MAX_NEAR_LABELS if gap else np.inf), deadline)
    known = (one for plans in search.plans.values() for one in plans if one.score <= limit)
    close = sorted(known, key=_score)
    if best is not None and (not close or best.score < close[0].score):
        close = [best, *close]  # a guess
    best, bounds = close[0] if close else best, search.bounds()
    # Whatever is open, closed or solved bounds the optimum, and so does the best plan itself.
    bound = min(search.min_bound, *(each for each, _ in bounds[:1]), np.inf if best is None else best.score)
    return Optimum(best, tuple(close), bound, bounds, search.looked_at, len(search.plans), stopped)


def plans_below(
    targets: Sequence[Target[C]], solvable: Callable[[C], Solvable], limit: float, most: int, max_labels: float
) -> Iterator[Best[C]]:
    """Yield up to `most` plans of each configuration with scores below `limit`, until `max_labels` labels are made."""
    search = Search(targets, solvable, most, max_labels)
    with suppress(Spent):
        for target in targets:
            for plan in solvable(target.configuration).solve_below(target.time_ps(limit), most, search.tick):
                yield Best(target, plan, target.score(plan.objective_ps))


class Search(Generic[C]):
    """The configurations of a search, and their bounds and plans so far, which are valid whenever the search stops."""

    def __init__(
        self,
        targets: Sequence[Target[C]],
        solvable: Callable[[C], Solvable],
        most: int,
        max_labels: float,
        wide: bool = False,
    ) -> None:
        self._wide = wide
        self._targets, self._solvable, self._most = list(targets), solvable, most
        self._max_labels, self._labels = max_labels, 0
        self._now = Open(0.0, -1, 0)
        self.heap: list[Open] = []
        self._waiting: list[Open] = []
        self._closed: list[Open] = []
        """Configurations whose bound is not below their limit."""
        self.plans: dict[int, tuple[Best[C], ...]] = {}
        """Plans below the limit, by configuration; empty if none was found."""
        self.guesses: dict[int, Best[C]] = {}
        """Guessed plans below their limits, by configuration, even if that is not solved yet."""
        self._reach: dict[int, float] = {}
        """For each configuration with plans: the score below which all its plans are known, up to `most` of them."""
        self.best: Best[C] | None = None
        self.looked_at = 0

    @property
    def best_score(self) -> float:
        """Score that other plans must be below; infinity if there is none."""
        return np.inf if self.best is None else self.best.score

    @property
    def best_known(self) -> Best[C] | None:
        """Best plan so far, including guesses: unless `wide`, other plans need not be better than a guess."""
        return min((*self.guesses.values(), *self._best), key=_score, default=None)

    @property
    def min_bound(self) -> float:
        """A lower bound of the scores of plans of the remaining configurations, the current one included."""
        return min([self._now.bound, *(one.bound for one in (*self.heap[:1], *self._waiting))])

    @property
    def _left(self) -> list[Open]:
        return [*self.heap, *self._waiting]

    @property
    def _open(self) -> dict[int, float]:
        """Return the bounds of unsolved configurations by number, including the one being solved."""
        now = {self._now.number: self._now.bound} if self._now.number >= 0 else {}
        return {one.number: one.bound for one in self._left} | now

    @property
    def num_left(self) -> int:
        """Number of configurations that are not solved."""
        return len(self._left)

    def run(
        self,
        limit_of: Callable[[Target[C]], float],
        report: Callable[[float, int], None],
        take: Callable[[Best[C]], None] = lambda best: None,
        waits: Callable[[C], bool] = lambda configuration: False,
    ) -> None:
        """Solve every configuration up to its limit, by ascending bound, and pass the plans found to `take`.

        Limits may fall meanwhile. `report` receives the least bound and the number of configurations left.
        Configurations for which `waits` is true are solved after all others; they are bounded earlier if their relaxed
        bound is the least of all.
        """
        self._relax(waits)
        while self.heap or self._end_wait():
            if self._bound_waiting():
                continue
            here = self.heap[0]
            limit = limit_of(self._targets[here.number])
            # Not dropped: plans near the best, under a higher limit, may be in it.
            if here.bound >= limit:
                self._closed.append(here)
                heapq.heappop(self.heap)
                continue
            report(self.min_bound, self.num_left)
            # A guess may exist from an earlier step: `take` receives it only once.
            before = self.guesses.get(here.number)
            self._step(here, limit)
            guessed = self.guesses.get(here.number)
            if guessed is not None and guessed is not before:
                take(guessed)
            for best in self.plans.get(here.number, ()):
                take(best)
            self._now = _NOTHING

    def _bound_waiting(self) -> bool:
        """Bound the most promising waiting configuration, if its relaxed bound is the lowest of all."""
        here = self._waiting[0] if self._waiting else _NOTHING
        if here.tries != _RELAXED or here.bound >= self.heap[0].bound:
            return False
        heapq.heappop(self._waiting)
        self._bound(here, self._waiting)
        self._now = _NOTHING
        return True

    def _end_wait(self) -> bool:
        """Queue the waiting configurations for solving; return whether there are any."""
        self.heap, self._waiting = self._waiting, []
        return bool(self.heap)

    def find_all(self, limit: float, max_labels: float = np.inf) -> None:
        """Find all plans with scores up to `limit`, until `max_labels` more labels have been made."""
        self.heap, self._closed = [*self.heap, *self._closed], []
        heapq.heapify(self.heap)
        # Either limit on labels may end the work here; `Spent` is passed on only for the limit of the whole search.
        whole, self._max_labels = self._max_labels, min(self._max_labels, self._labels + max_labels)
        try:
            while self.heap and self.heap[0].bound <= limit:
                # Solving finds plans below a limit, and here those at the limit count, too.
                self._step(self.heap[0], float(np.nextafter(limit, np.inf)))
                self._now = _NOTHING
        except Spent:
            if self._labels > whole:
                raise
        self._widen(limit)

    def unsolved(self) -> dict[int, float]:
        """Return the bounds of configurations neither solved nor ruled out, by number; 0: not bounded yet."""
        # A stop may come before every configuration has a bound, and 0 holds without one.
        return {number: 0.0 for number in range(self.looked_at, len(self._targets))} | self._open

    def final_scores(self) -> dict[int, float]:
        """Return by configuration number the best plan's score, or the bound if that is not below the limit."""
        closed = {one.number: one.bound for one in self._closed}
        return closed | {number: plans[0].score for number, plans in self.plans.items() if plans}

    def tick(self, made: int = 0) -> None:
        """Count labels; raise Spent if their limit is exceeded."""
        self._labels += made
        if self._labels > self._max_labels:
            raise Spent

    def _relax(self, waits: Callable[[C], bool]) -> None:
        """Compute the relaxed bound of every configuration."""
        for number, target in enumerate(self._targets):
            bound = target.score(self._solvable(target.configuration).relaxed_bound_ps)
            if np.isfinite(bound):
                queue = self._waiting if waits(target.configuration) else self.heap
                queue.append(Open(bound, number, _RELAXED))
            self.looked_at = number + 1
        heapq.heapify(self.heap)
        heapq.heapify(self._waiting)
        self._now = _NOTHING

    def _step(self, here: Open, limit: float) -> None:
        """Bound the most promising configuration if it has only a relaxed bound, else solve below its next limit."""
        self._now = here
        heapq.heappop(self.heap)
        if here.tries == _RELAXED:
            self._bound(here, self.heap)
        else:
            self._solve(here, self._targets[here.number], limit)

    def _bound(self, here: Open, queue: list[Open]) -> None:
        """Bound a configuration that has only a relaxed bound, and queue it again if a plan may fit in it."""
        self._now, target = here, self._targets[here.number]
        # Neither bound implies the other: the relaxed one pools all memory, the other one cuts layers into stages.
        bound = max(here.bound, target.score(self._solvable(target.configuration).lower_ps))
        if np.isfinite(bound):
            heapq.heappush(queue, Open(bound, here.number, 0))

    def _solve(self, here: Open, target: Target[C], limit: float) -> None:
        """Solve a configuration below its next limit; if no plan is found, its bound rises, or it is infeasible.

        Limits that a guessed plan is not below are skipped. Of the plans found below a wider limit, only those below
        the narrowest limit that has any are kept, so that skipping does not change the result.
        """
        solvable, cuts = self._solvable(target.configuration), _cuts_of(here, limit)
        self.plans.setdefault(here.number, ())
        known, cut = here.guess, cuts[0]
        if known is None and len(cuts) == 1:
            known = np.inf  # there is nothing to pass over
        elif known is None:
            guessed = self._guess(here, target, limit)
            known = np.inf if guessed is None else target.score(guessed.objective_ps)
            if guessed is not None and known < limit:
                self._take_guess(here.number, Best(target, guessed, known))
        wanted = next((cut for cut in cuts if known < cut), limit)
        # Labels grow fast with the limit: far above the bound, a narrow limit is the cheaper proof.
        if wanted <= here.bound * (1 + AT_ONCE):
            cut = wanted
        solved = solvable.solve_below(target.time_ps(cut), self._most, self.tick)
        scored = (Best(target, one, target.score(one.objective_ps)) for one in solved)
        # The time of a score is rounded: a plan that is no better than the limit may be below it.
        plans = tuple(best for best in scored if best.score < limit)
        tries = here.tries + cuts.index(cut)
        if plans:
            narrowest = next(cut for cut in cuts if plans[0].score < cut)
            plans = tuple(best for best in plans if best.score < narrowest)
            self._reach[here.number] = narrowest
        self.plans[here.number] = plans
        if plans:
            self.best = min((*plans[:1], *self._best), key=_score)
        # That no plan is below the cut makes it the new bound; without a limit there is no plan at all.
        elif np.isfinite(cut):
            heapq.heappush(self.heap, Open(cut, here.number, min(tries + 1, len(_LIMITS)), known))

    def _take_guess(self, number: int, best: Best[C]) -> None:
        self.guesses[number] = best
        if self._wide:
            self.best = self.best_known

    def _widen(self, limit: float) -> None:
        """For configurations solved below a lower limit, find all plans up to `limit` if that is little work."""
        for number, reach in self._reach.items():
            plans, above = self.plans[number], float(np.nextafter(limit, np.inf))
            if plans and reach < above:
                known = [plans[0].target], self._solvable, above, self._most, _MAX_WIDER_LABELS
                self.plans[number] = tuple(plans_below(*known)) or plans

    def _guess(self, here: Open, target: Target[C], limit: float) -> PricedSolution | None:
        """Return the best plan that a heuristic finds; None if it finds none.

        If bounds are loose (`wide`) or no plan is known, guess with growing limits until a plan is found.
        """
        solvable, enough = self._solvable(target.configuration), target.time_ps(here.bound * (1 + AT_ONCE))
        further = [above for above in WIDE if self._wide or above >= GUESSED]
        for above in further if self._wide or self.best is None else further[:1]:
            below = min(limit, here.bound * (1 + above))
            if (plan := best_guess(solvable, target.time_ps(below), enough)) is not None or below == limit:
                return plan
        return None

    @property
    def _best(self) -> tuple[Best[C], ...]:
        return () if self.best is None else (self.best,)

    def bounds(self) -> tuple[tuple[float, Target[C]], ...]:
        """Return each configuration that a plan may fit in, with a lower bound on its score, the least first."""
        known = self._open | self.final_scores()
        return tuple((bound, self._targets[number]) for number, bound in sorted(known.items(), key=lambda i: i[::-1]))


def _score(best: Best[C]) -> float:
    return best.score


# Solves every target up to its own limit, which may fall as plans of other targets are found.


class Exhausted(NamedTuple):
    """The bounds at the end of a search."""

    bounds: tuple[float, ...]
    """By target: a lower bound of its plans' scores, raised no further than its limit; infinity: it has no plan."""
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

    Targets are worked on by ascending bound, so all plans with scores below a target's bound are known when it is
    solved. If limits depend only on plans with lower scores, no target is solved further than necessary. `deadline` and
    Ctrl-C end the search early. `report` receives the least bound and the number of targets left.
    """
    search = Search(targets, solvable, 1, np.inf, True)
    stopped = not ended(partial(search.run, limit_of, report, take), deadline)
    left = search.unsolved()
    bounds = [inf] * len(targets)
    for number, bound in (search.final_scores() | left).items():
        bounds[number] = bound
    open_ = {number for number, bound in left.items() if bound < limit_of(targets[number])}
    return Exhausted(tuple(bounds), tuple(sorted(open_)), search.looked_at, len(search.plans), stopped)
