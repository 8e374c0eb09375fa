"""Lower bounds on T, for a whole configuration and for every pipeline stage that a plan below some T can have.

Let T = sum A + s max A + max U be the closed form over p stages. For a stage, let a be the least A, z the least
(1 + s) A + U less a, and g the least (1 + s/p) A + U/p. Then T >= sum a + max z, and T >= sum g, because no maximum is
less than the mean. Both are minimised over the cuts by dynamic programmes forward and backward, which then bound T for
every stage and every run of layers it may hold. With several node types, bands bound sum and maximum together.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_search.solver.problem import Cut, DeviceGroup, Position, Problem, Start
from shardwright_search.solver.stage_options import GroupCosts, largest_weights, runs_of, weightings
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import Phase, min_phases, phases
from shardwright_search.step.pareto import Ints, Numbers

# Bounds for plans grouped by their largest Z: a stage's A times the steady count, plus its U.
#
# With several node types, few layers on the slow ones make the sum of A small, and many make the largest Z small, so
# the least sum plus the least maximum bounds little. The largest Z of a plan lies between two edges of a scale. Then no
# stage of the plan holds a run of layers whose least Z is above the upper edge, and T is no less than the sum of A plus
# the lower edge. The least over all bands holds for every plan.
#
# A stage's Z is bounded below by the least of s A + U. (What the bounds below call z, the least of (1 + s) A + U less
# the least A, is no bound on Z: it may exceed Z, and is valid only in addition to the least sum of A.)


_FIRST, _STEP, _COUNT = 0.9, 1.025, 32
"""Band edges: ratio of the lowest to the least possible largest Z, ratio of each to the one before, and number."""


class StageLowerBounds(NamedTuple):
    """Lower bounds for a pipeline stage on one device group [start, end]; infinity: that run of layers does not fit."""

    time: Numbers
    """A: the time of a microbatch in the stage."""
    largest: Numbers
    """Z: A times the coefficient of the slowest stage in T, plus U."""


class Move(NamedTuple):
    """A pipeline stage: the position before it, its device group, and the position after it."""

    stage: int
    position: Position
    group: int
    after: Position


class Sums(NamedTuple):
    """Lower bounds of what all stages except one add to T, for each run that this one may hold [runs]."""

    total: Numbers
    """Sum of their A."""
    with_largest: Numbers
    """Sum of their A and the largest Z of all stages."""


class Known(NamedTuple):
    """Bounds of one stage and of all other stages together, without bands [runs]."""

    time: Numbers
    """The stage's A."""
    slowest: Numbers
    """The least by which T exceeds the sum of A, from all stages; `slowest_of_others`: from the other stages only."""
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
        """Return the least of sum of A plus largest Z of all, given the layers and the others' largest Z [labels]."""
        # In the band of the others' largest Z that Z itself counts; in any higher one a stage to come has a larger Z,
        # which is no less than the band's lower edge.
        band = np.searchsorted(self.floors, largest, side="right")
        least: Numbers = np.minimum(self.sums[band - 1, layers] + largest, self.with_floors[band, layers])
        return least


class Bands:
    """The bounds of one configuration; `slowest`: a lower bound of the part of T that exceeds the sum of A.

    `costs_of` returns the same object for equal costs.
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
        """Return the bounds of a stage and all stages after it, if the stages before it occupy `position`."""
        sums = self._after[stage][position]
        above = np.minimum.accumulate((sums + self.floors[:, None])[::-1])[::-1]
        return Rests(sums, np.concatenate([above, np.full((1, sums.shape[1]), np.inf)]), self.floors)

    def sums(self, move: Move, runs: tuple[Ints, Ints], known: Known) -> Sums:
        """Return `known.sums`, raised by the bands, for a stage that holds `runs` (starts, ends) [runs].

        Infinity: no plan with T below the limit has this stage with this run.
        """
        (start, end), floors = runs, self.floors[:, None]
        others = self._before[move.stage][move.position][:, start] + self._after[move.stage + 1][move.after][:, end]
        largest = self._costs_of(move).largest[start, end]
        least = others + known.time + np.maximum(floors, np.maximum(known.slowest, largest))
        # A band in which this run cannot be, or in which no plan is below the limit, must not lower the bound.
        others[(largest > self._ceilings[:, None]) | (least >= known.limit)] = np.inf
        with_largest = (others + np.maximum(floors, known.slowest_of_others)).min(0)
        return Sums(*map(np.maximum, known.sums, (others.min(0), with_largest)))

    def _pass(self, stages: range, forward: bool) -> list[dict[Position, Numbers]]:
        """Return by position the least sum of A of the stages passed [bands, layers + 1], first of none of them."""
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
        """Return the least A of a stage [bands, layers reached, layers passed]; infinity if its Z is above the band."""
        time, largest = (values[starts, ends] for values in costs)
        if forward:
            time, largest = time.T, largest.T
        return np.where(largest <= self._ceilings[:, None, None], time, np.inf)


CostsOf = Callable[[DeviceGroup, tuple[Phase, ...]], GroupCosts]
"""`GroupCosts`, or a cache of them."""


class StageKind(NamedTuple):
    """Facts on which the labels of a pipeline stage depend in addition to its run of layers."""

    group: int
    phases: tuple[Phase, ...]
    start: Start


class Rest(NamedTuple):
    """Bounds on some stages of a plan, by the layer where they begin or end: sum of a, largest z, sum of g.

    a, z and g are defined in the module's docstring: least A, what the slowest stage adds, and the mean's share of T.
    """

    total: Numbers
    slowest: Numbers
    mean: Numbers

    def with_stage(self, costs: "Rest") -> "Rest":
        """Return the bounds with one more stage; `costs` is indexed by [end of these stages, end of the new one]."""
        return Rest(
            (self.total[:, None] + costs.total).min(0),
            np.maximum(self.slowest[:, None], costs.slowest).min(0),
            (self.mean[:, None] + costs.mean).min(0),
        )

    def or_(self, other: "Rest | None") -> "Rest":
        """Return the lower of two bounds."""
        return self if other is None else Rest(*map(np.minimum, self, other))


class TargetRun(NamedTuple):
    """A run of layers that a stage may hold, and the caps that its costs by the three `weightings` must stay below."""

    run: int
    caps: tuple[float, ...]


class ConfigurationBounds:
    """The bounds of one configuration; `rough` ones consider fewer counts of micro-batches in flight, and are lower."""

    def __init__(self, problem: Problem, costs_of: CostsOf, rough: bool = False) -> None:
        self.problem, self.costs_of = problem, costs_of
        counts = [_fewer(count) if rough else count for count in problem.in_flight]
        self.runs = runs_of(problem.layers)
        made = min_phases if rough else phases
        self._parts = [made(count, problem.num_microbatches, problem.keeps_sums) for count in counts]
        self.after = self._pass(range(problem.pp_size - 1, -1, -1), forward=False)[::-1]
        self._min_tied_ps = float(problem.tied_ps.min())
        whole = self.after[0].get(problem.start_position)
        self.lower_ps = np.inf
        self.bands: Bands | None = None
        if whole is None:
            return
        # The first is closer if one stage is slow, the second if all are even.
        lower = float(max(whole.total[0] + whole.slowest[0], whole.mean[0]))
        # On one node type the sum and the largest are small in the same plans, and bands would add little.
        if problem.is_mixed and np.isfinite(lower):
            self.bands = Bands(problem, self._in_bands, float(whole.slowest[0]))
            lower = max(lower, self.bands.lower_ps)
        self.lower_ps = lower + self._min_tied_ps

    @cached_property
    def _before(self) -> list[dict[Position, Rest]]:
        return self._pass(range(self.problem.pp_size), forward=True)

    def target_runs(self, below_ps: float) -> dict[StageKind, list[TargetRun]] | None:
        """Return the runs that stages of a plan with T < below_ps can hold; None: there is no such plan."""
        problem, limit = self.problem, below_ps - self._min_tied_ps
        caps: dict[StageKind, Numbers] = {}
        for stage in range(problem.pp_size):
            some = False
            for position, group, after in self._moves(stage):
                for start in {problem.start(before, group) for before in problem.positions[stage][position]}:
                    kind = StageKind(group, problem.phases(stage), start)
                    # Stages of a kind share their labels, so the highest cap of any of them counts.
                    known = caps.setdefault(kind, np.full((len(self.runs.runs), 3), -np.inf))
                    some |= self._raise_caps(known, stage, group, position, after, limit)
            if not some:
                return None
        reached = {kind: np.flatnonzero(rows[:, 0] > -np.inf).tolist() for kind, rows in caps.items()}
        return {
            kind: [TargetRun(run, tuple(caps[kind][run].tolist())) for run in runs] for kind, runs in reached.items()
        }

    def _raise_caps(
        self, caps: Numbers, stage: int, group: int, position: Position, after: Position, limit: float
    ) -> bool:
        """Raise `caps` [runs, weightings] to the caps of a stage on a group; return whether the stage can be there."""
        before = self._before[stage][position]
        send = self._send(stage, position, group, after)
        costs, behind = self._costs(stage, group, send), self.after[stage + 1][after]
        with np.errstate(invalid="ignore"):
            total = before.total[:, None] + behind.total
            slowest = np.maximum(before.slowest[:, None], behind.slowest)
            mean = before.mean[:, None] + behind.mean
            fits = total + costs.total + np.maximum(costs.slowest, slowest) < limit
            alive = fits & (mean + costs.mean < limit)
        start, end = np.nonzero(alive)
        sums = Sums(total[alive], total[alive] + slowest[alive])
        if self.bands is not None:
            stage_ps = costs.total[alive], np.maximum(costs.slowest, slowest)[alive]
            known = Known(*stage_ps, slowest[alive], sums, limit)
            sums = self.bands.sums(Move(stage, position, group, after), (start, end), known)
        with np.errstate(invalid="ignore"):
            capped = np.stack([limit - sums.with_largest, limit - sums.total, limit - mean[alive]], -1)
        # Labels have no sends yet, so their caps are lower by the least that sends take.
        sends = send * np.array([time for time, _ in weightings(self.problem, group)])
        possible = sums.total < np.inf
        np.maximum.at(caps, self.runs.number[alive][possible], (capped - sends)[possible])
        return bool(possible.any())

    def _moves(self, stage: int) -> Iterator[tuple[Position, int, Position]]:
        """Yield each position before a stage, with each group that the stage can be on and the position after it."""
        for position, moves in self.problem.placements[stage].items():
            for group, after in moves:
                yield position, group, after

    @cached_method
    def _costs(self, stage: int, group: int, send: float) -> Rest:
        """Return a, z and g [start, end] of a stage with this send time; infinity if it cannot hold a run."""
        costs = self.costs_of(self.problem.device_groups[group], self._parts[stage])
        a, both, g = (costs.least(self.problem.layers, w) + w[0] * send for w in weightings(self.problem, group))
        # The sum of a has each stage's least A already: z is only what comes on top.
        z = both - np.where(np.isfinite(a), a, 0)
        return Rest(*(np.where(self._able(stage), values[self.runs.number], np.inf) for values in (a, z, g)))

    @cached_method
    def _able(self, stage: int) -> NDArray[np.bool_]:
        """Return [start, end] whether a stage with this run of layers leaves each other stage a layer."""
        total = len(self.problem.layers)
        able = np.zeros((total + 1, total + 1), bool)
        for start in (0,) if stage == 0 else range(stage, total):
            ends = self.problem.ends(stage, start)
            able[start, ends.start : ends.stop] = True
        return able

    def _in_bands(self, move: Move) -> StageLowerBounds:
        """Return the lower bounds of a stage that `Bands` reads; the same object for the same costs."""
        return self._banded(move.stage, move.group, self._send(*move))

    @cached_method
    def _banded(self, stage: int, group: int, send: float) -> StageLowerBounds:
        stage_bounds, weights = self._costs(stage, group, send), largest_weights(self.problem.closed_form)
        costs = self.costs_of(self.problem.device_groups[group], self._parts[stage])
        largest = (costs.least(self.problem.layers, weights) + weights[0] * send)[self.runs.number]
        return StageLowerBounds(stage_bounds.total, np.where(stage_bounds.total < np.inf, largest, np.inf))

    @cached_method
    def _send(self, stage: int, position: Position, group: int, after: Position) -> float:
        """Return a lower bound of a stage's send time for any neighbours; with one node type, for any position."""
        problem, last = self.problem, self.problem.pp_size - 1
        if not problem.is_mixed:
            return self._min_sends(stage, group)
        least, before = problem.min_send_ps, problem.positions[stage][position] if stage else ()
        behind = [neighbour for neighbour, _ in problem.placements[stage + 1][after]] if stage < last else ()
        into = min((least[Cut(position, neighbour, group)] for neighbour in before), default=0.0)
        return into + min((least[Cut(after, group, neighbour)] for neighbour in behind), default=0.0)

    def _min_sends(self, stage: int, group: int) -> float:
        """Return the least time that a stage's sends take together, for any neighbours."""
        least = (({}, *self.problem.min_sends_ps, {}))[stage : stage + 2]
        into = min((time for (_, behind), time in least[0].items() if behind == group), default=0.0)
        return into + min((time for (before, _), time in least[1].items() if before == group), default=0.0)

    def _pass(self, stages: range, forward: bool) -> list[dict[Position, Rest]]:
        """Return the bounds on the stages passed, before the first and after each, by the position there."""
        problem = self.problem
        nothing = np.where(np.arange(len(problem.layers) + 1) == (0 if forward else len(problem.layers)), 0.0, np.inf)
        levels = [{at: Rest(nothing, nothing, nothing) for at in problem.positions[0 if forward else -1]}]
        for stage in stages:
            level: dict[Position, Rest] = {}
            for position, group, after in self._moves(stage):
                here, there = (position, after) if forward else (after, position)
                costs = self._costs(stage, group, self._send(stage, position, group, after))
                costs = costs if forward else Rest(*(values.T for values in costs))
                level[there] = levels[-1][here].with_stage(costs).or_(level.get(there))
            levels.append(level)
        return levels


def _fewer(in_flight: int) -> int:
    """Return the largest number of the form 2^n or 3 x 2^n that is not above a number in flight.

    With fewer microbatches in flight a stage needs no more memory or time.
    """
    # Few distinct counts let stages and configurations share their costs.
    power = 1 << (in_flight.bit_length() - 1)
    return power + power // 2 if power > 1 and in_flight >= power + power // 2 else power
