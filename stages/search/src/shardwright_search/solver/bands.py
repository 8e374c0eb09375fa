"""Bounds for plans grouped by their largest Z: a stage's A times the steady count, plus its U.

With several node types few layers on the slow ones make the sum of A small and many make the largest Z small, so the
least of each together bounds little. The largest Z of a plan lies between two edges of a scale. No stage of the plan
then has a larger Z than the upper edge, which runs of layers whose least Z is above it cannot be in; and T is no less
than the sum of A and the lower edge. The least over all bands holds for every plan.

A stage's Z is bounded below by the least of its own sum. (What `configuration_bounds` calls z, the least of
m A + U less the least of A, is no bound on Z: it may be above it, and only adds up with the least sum of A.)
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.problem import Position, Problem
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.pareto import Ints, Numbers

_FIRST, _STEP, _COUNT = 0.9, 1.025, 32
"""Band edges: the lowest over the least possible largest Z, each over the one before, and their number."""


class StageLowerBounds(NamedTuple):
    """Lower bounds for a pipeline stage on one device group [start, end]; infinity: that run of layers does not fit."""

    time: Numbers
    """A."""
    largest: Numbers
    """Z."""


class Move(NamedTuple):
    """A pipeline stage: the position before it, its device group, and the position after it."""

    stage: int
    position: Position
    group: int
    after: Position


class Sums(NamedTuple):
    """Least that all stages but one add to T [runs of that one]."""

    total: Numbers
    """Sum of their A."""
    with_largest: Numbers
    """Sum of their A and the largest Z of all stages."""


class Known(NamedTuple):
    """Bounds of one stage and of all other stages together, without bands [runs]."""

    time: Numbers
    """The stage's A."""
    slowest: Numbers
    """The least that is added to the sum of A, over all stages; `slowest_of_others`: over the other stages."""
    slowest_of_others: Numbers
    sums: Sums
    limit: float
    """Limit that T is to stay below."""


class Rests(NamedTuple):
    """Lower bounds of what some stages add to T, given the others' largest Z, by the layer where they begin or end."""

    sums: Numbers
    """[bands, layers + 1]: of A; never larger in a higher band."""
    with_floors: Numbers
    """[bands + 1, layers + 1]: the least of sum and lower edge in this or a higher band; infinity after the last."""
    floors: Numbers
    """[bands]: the lower edges, ascending."""

    def least(self, layers: Ints, largest: Numbers) -> Numbers:
        """Return the least sum of A and largest Z, given the other stages' largest Z and a layer [labels]."""
        # In the band of the others' largest Z that Z itself counts; in any higher one a stage to come has a larger Z,
        # which is no less than the band's lower edge.
        band = np.searchsorted(self.floors, largest, side="right")
        least: Numbers = np.minimum(self.sums[band - 1, layers] + largest, self.with_floors[band, layers])
        return least


class Bands:
    """The bounds of one configuration; `slowest`: lower bound of the part of T in excess of the sum of A.

    `costs_of` gives the same object where costs are the same.
    """

    def __init__(self, problem: Problem, costs_of: Callable[[Move], StageLowerBounds], slowest: float) -> None:
        # A geometric scale: within a band, the lower edge is at most a step below the largest Z.
        edges = slowest * _FIRST * _STEP ** np.arange(_COUNT)
        self.floors, self._ceilings = np.r_[0.0, edges], np.r_[edges, np.inf]
        self._problem, self._costs_of, self._slowest = problem, costs_of, slowest

    @cached_property
    def _before(self) -> list[dict[Position, Numbers]]:
        return self._pass(range(self._problem.pp_size), forward=True)

    @cached_property
    def _after(self) -> list[dict[Position, Numbers]]:
        return self._pass(range(self._problem.pp_size - 1, -1, -1), forward=False)[::-1]

    @property
    def lower_ps(self) -> float:
        """Return a lower bound on the step time T, without tied parameters."""
        whole = self._after[0].get(self._problem.start_position)
        return np.inf if whole is None else float((whole[:, 0] + np.maximum(self.floors, self._slowest)).min())

    @cached_method
    def after(self, stage: int, position: Position) -> Rests:
        """Return the bounds of a stage and the stages after it, if the stages before it occupy `position`."""
        sums = self._after[stage][position]
        above = np.minimum.accumulate((sums + self.floors[:, None])[::-1])[::-1]
        return Rests(sums, np.concatenate([above, np.full((1, sums.shape[1]), np.inf)]), self.floors)

    def sums(self, move: Move, runs: tuple[Ints, Ints], known: Known) -> Sums:
        """Return the known sums, raised for a stage with runs that start and end there; infinity: no plan is below."""
        (start, end), floors = runs, self.floors[:, None]
        others = self._before[move.stage][move.position][:, start] + self._after[move.stage + 1][move.after][:, end]
        largest = self._costs_of(move).largest[start, end]
        least = others + known.time + np.maximum(floors, np.maximum(known.slowest, largest))
        # A band in which this run cannot be, or in which no plan is below the limit, must not lower the bound.
        others[(largest > self._ceilings[:, None]) | (least >= known.limit)] = np.inf
        with_largest = (others + np.maximum(floors, known.slowest_of_others)).min(0)
        return Sums(*map(np.maximum, known.sums, (others.min(0), with_largest)))

    def _pass(self, stages: range, forward: bool) -> list[dict[Position, Numbers]]:
        """Return the least sums of A [bands, layers + 1] of the stages passed, before the first and after each."""
        problem, shape = self._problem, (len(self.floors), len(self._problem.layers) + 1)
        nothing = np.full(shape, np.inf)
        nothing[:, 0 if forward else -1] = 0.0
        levels = [dict.fromkeys(problem.positions[0 if forward else -1], nothing)]
        for stage in stages:
            level: dict[Position, Numbers] = {}
            known: dict[int, Numbers] = {}
            starts, ends = self._runs(stage)
            passed, reached = (starts, ends) if forward else (ends, starts)
            for position, moves in problem.placements[stage].items():
                for group, after in moves:
                    here, there = (position, after) if forward else (after, position)
                    costs = self._costs_of(Move(stage, position, group, after))
                    # Positions are many, distinct costs few: equal ones are the same object.
                    if id(costs) not in known:
                        known[id(costs)] = self._in_bands(costs, starts, ends, forward)
                    reached_sums = (levels[-1][here][:, None, passed] + known[id(costs)]).min(2)
                    into = level.setdefault(there, np.full(shape, np.inf))[:, reached]
                    np.minimum(into, reached_sums, out=into)
            levels.append(level)
        return levels

    def _runs(self, stage: int) -> tuple[slice, slice]:
        """Return where a stage's runs can start and end so that each stage has a layer."""
        total, later = len(self._problem.layers), self._problem.pp_size - 1 - stage
        starts = slice(stage, total - later) if stage else slice(0, 1)
        return starts, slice(stage + 1, total - later + 1) if later else slice(total, total + 1)

    def _in_bands(self, costs: StageLowerBounds, starts: slice, ends: slice, forward: bool) -> Numbers:
        """Return A [bands, reached, passed] if no Z is above the band, else infinity."""
        time, largest = (values[starts, ends] for values in costs)
        if forward:
            time, largest = time.T, largest.T
        return np.where(largest <= self._ceilings[:, None, None], time, np.inf)
