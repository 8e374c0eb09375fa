"""Options of a device group in the phases of a stage: the useful ones, their memory, and lower bounds.

The bounds are computed for runs of neighbouring layers, once for equal runs.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from shardwright.plan.schedules.schedule import ClosedForm
from shardwright_search.solver.problem import DeviceGroup, Options, Problem
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import LayerMemory, Phase, no_layers
from shardwright_search.step.pareto import Ints, Numbers, non_dominated, pairs

# Lower bounds on the cost of a run of layers within a memory budget: a linear programme.
#
# If every layer chose a mixture of its options, each type would move along the lower left hull of its points (memory,
# cost), steepest edges first: the least cost is a convex polyline in the memory. Its value is also the maximum over
# prices lambda of a byte of sum over layers of min over options (cost + lambda memory) - lambda M, at a slope of some
# hull (Sinha and Zoltners 1979, the multiple-choice knapsack). Whole options cost no less.


_ROUNDING = 1e-9


def rounded_down(cost: Numbers) -> Numbers:
    """Return a lower bound that rounding errors cannot have raised above the true value."""
    return cost * (1 - _ROUNDING) - 1


class Polyline(NamedTuple):
    """The least cost of some layers as a function of the memory available to them."""

    memory: Numbers
    cost: Numbers

    def at(self, left: Numbers) -> Numbers:
        """Return the least cost within amounts of memory; infinity if the layers do not fit."""
        return np.interp(left, self.memory, self.cost, left=np.inf)


class Dual:
    """The bound for one cost and one measure of memory, each given by layer type [options]."""

    def __init__(self, costs: Sequence[Numbers], memory: Sequence[Numbers]) -> None:
        self._hulls = [hull(cost, resident) for cost, resident in zip(costs, memory, strict=True)]
        slopes = {slope for points in self._hulls for slope in slopes_of(points)}
        # The dual is piecewise linear in the price, with corners at slopes of the hulls: one of them is the best price.
        self._prices = np.array(sorted(slopes | {0.0}))
        priced = [(points[:, 1:] + points[:, :1] * self._prices).min(0) for points in self._hulls]
        self._min_cost = np.stack(priced)
        self._min_memory = np.array([points[0, 0] for points in self._hulls])

    def runs(self, counts: Numbers, left: Numbers) -> Numbers:
        """Return the bounds of runs [runs] with memory `left` [runs]; infinity: a run does not fit.

        `counts`: the number of layers of each type [runs, types].
        """
        value = (counts @ self._min_cost - left[:, None] * self._prices).max(1)
        return np.where(counts @ self._min_memory <= left, rounded_down(value), np.inf)

    def prices(self, counts: Numbers, left: float, most: int) -> Numbers:
        """Return the price of a byte that gives the strongest bound for these numbers of layers, and nearby prices."""
        best = int((counts @ self._min_cost - left * self._prices).argmax())
        return self._prices[max(0, best - most // 2) : best + most // 2 + 1]

    def cheapest(self, counts: Numbers, ways: Iterable[tuple[float, float]]) -> Numbers:
        """Return the bounds of `runs` by the cheapest of several `ways`: pairs of a cost to add and memory left."""
        least, cost, memory = np.full(len(counts), np.inf), counts @ self._min_cost, counts @ self._min_memory
        for more, left in ways:
            value = more + rounded_down((cost - left * self._prices).max(1))
            np.minimum(least, value, out=least, where=memory <= left)
        return least

    def polyline(self, counts: Sequence[int]) -> Polyline:
        """Return the least cost of a number of layers of each type as a function of their memory."""
        edges: list[tuple[float, float, float]] = []
        start = np.zeros(2)
        for count, corners in zip(counts, self._hulls, strict=True):
            if count:
                start = start + count * corners[0]
                steps = np.diff(corners, axis=0) * count
                edges += [(y / x, x, y) for x, y in steps.tolist()]
        # The steepest steps first, from whichever type: the sum of convex curves is convex.
        edges.sort()
        points = np.cumsum([start, *((x, y) for _, x, y in edges)], axis=0)
        return Polyline(points[:, 0], rounded_down(points[:, 1]))


def hull(cost: Numbers, memory: Numbers) -> Numbers:
    """Return the lower left hull of the points (memory, cost) [points, 2], by ascending memory."""
    points: list[tuple[float, float]] = []
    for row in np.lexsort((cost, memory)):
        x, y = float(memory[row]), float(cost[row])
        # More memory for no less cost is never taken.
        if points and y >= points[-1][1]:
            continue
        while len(points) > 1:
            (x0, y0), (x1, y1) = points[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            points.pop()
        points.append((x, y))
    return np.array(points)


def slopes_of(points: Numbers) -> list[float]:
    """Return the prices of a byte along a convex hull: the negative slopes."""
    steps = np.diff(points, axis=0)
    return [-y / x for x, y in steps.tolist()]


# Runs of neighbouring layers, and the options of a stage.


class Run(NamedTuple):
    """The layer types of a run, and of the layer before it (-1 at the start)."""

    before: int
    layers: tuple[int, ...]


class PivotGroup(NamedTuple):
    """Runs that end alike: with a layer of one type, and with or without the head after it."""

    kind: int
    """The layer's type; -1: the runs hold no layer."""
    behind: int
    """The head's type; -1: nothing follows the layer."""
    rows: Ints
    counts: Numbers
    """[rows, types]: number of layers of each type before the layer; all of them if there is no layer."""


class Runs(NamedTuple):
    """Every run of a chain of layers."""

    number: Ints
    """[start, end]: which run it is; -1 if end <= start."""
    runs: tuple[Run, ...]
    counts: Numbers
    """[runs, types]: number of layers of each type."""
    first: Ints
    """[runs]: type of the first layer."""
    last: Ints
    groups: tuple[PivotGroup, ...]


def pivot_of(layers: Sequence[int], head: int) -> tuple[int | None, int]:
    """Return the index of a run's last block, and the type of the head after it or -1; None: a run without blocks."""
    if layers[-1] != head:
        return len(layers) - 1, -1
    return (len(layers) - 2, head) if len(layers) > 1 else (None, -1)


@lru_cache(maxsize=8)
def runs_of(layers: tuple[int, ...]) -> Runs:
    """Return the runs of a chain."""
    total = len(layers)
    number = np.full((total + 1, total + 1), -1)
    known: dict[Run, int] = {}
    for start in range(total):
        before = layers[start - 1] if start else -1
        for end in range(start + 1, total + 1):
            # Most layers are alike, so of all ranges only few are different runs.
            number[start, end] = known.setdefault(Run(before, layers[start:end]), len(known))
    counts = np.array([[run.layers.count(kind) for kind in range(max(layers) + 1)] for run in known], float)
    first, last = (np.array([run.layers[i] for run in known]) for i in (0, -1))
    return Runs(number, tuple(known), counts, first, last, _groups(tuple(known), counts, layers[-1]))


def _groups(runs: Sequence[Run], counts: Numbers, head: int) -> tuple[PivotGroup, ...]:
    rows_of: dict[tuple[int, int], list[int]] = {}
    for number, run in enumerate(runs):
        pivot, behind = pivot_of(run.layers, head)
        rows_of.setdefault((-1 if pivot is None else run.layers[pivot], behind), []).append(number)
    kinds = np.arange(counts.shape[1])
    return tuple(
        PivotGroup(kind, behind, np.array(rows), counts[rows] - (kinds == kind) - (kinds == behind))
        for (kind, behind), rows in rows_of.items()
    )


_FEW_LAYERS = 2
_FEW_PLANS = 5_000

Weights = tuple[float, float]
"""Weights of A (time of a microbatch) and U (time once a step) in a cost."""


def weightings(problem: Problem, group: int) -> tuple[Weights, Weights, Weights]:
    """Return the three weightings to bound: time; the slowest stage's part of T; T if all stages took the mean.

    The mean is weighted by ranks: as a wide stage runs its layers in less time, ranks times time bounds T more closely
    than time by itself.
    """
    form = problem.closed_form
    alone = float(form.fill + form.steady), float(form.once)
    return (float(form.fill), 0.0), alone, mean_weights(form, problem.pp_size, problem.relative_weights[group])


def mean_weights(form: ClosedForm, pp_size: int, relative_weight: float) -> Weights:
    """Return the weights of A and U that bound T as if all stages took the mean: the third of `weightings`.

    `relative_weight`: that stage's weight, over the mean of all stages.
    """
    return form.fill + form.steady * relative_weight / pp_size, form.once * relative_weight / pp_size


def largest_weights(form: ClosedForm) -> Weights:
    """Return the weights of A and U in Z: the coefficients in T of the largest A and the largest U."""
    return float(form.steady), float(form.once)


class Measure(NamedTuple):
    """A lower bound of a stage's peak memory that is a sum over layers.

    While the last layer works, a stage holds all static bytes and activations, and that layer's workspace and late
    bytes; while the first works, all static and late bytes, and that layer's activation and workspace. The measure is
    `share` of the former and the rest of the latter: no mixture of the two is more than the peak.
    """

    share: float
    memory: tuple[Numbers, ...]
    """Bytes by type [options]."""
    first: Numbers
    """Least that the first layer adds, by type."""
    last: Numbers
    """Least that the last layer adds, by type."""


class Pivot(NamedTuple):
    """The last block of a run, and the head if it follows: their workspace determines the peak.

    So each of their options is an entry of its own; options that another one dominates are left out.
    """

    cost: Numbers
    memory: Numbers
    """Bytes by the measure with `share` 1, with the workspace at the end of the run."""


class GroupCosts:
    """The useful options of a device group in a stage's phases, and bounds from them."""

    def __init__(self, group: DeviceGroup, parts: tuple[Phase, ...]) -> None:
        self.group, self.phases = group, parts
        hosted = [options.hosted(max(phase.in_flight for phase in parts)) for options in group.options]
        self.useful = tuple(_useful(options, parts) for options in hosted)
        self.options = tuple(o.take(rows) for o, rows in zip(hosted, self.useful, strict=True))
        self.memory = tuple(o.memory(parts) for o in self.options)
        self._first_phase = [LayerMemory._make(column[:, 0] for column in memory) for memory in self.memory]
        # Without late gradients, mixtures only leave out activations.
        late = any(memory.late.any() for memory in self._first_phase)
        self.measures = tuple(self._measure(share) for share in ((1.0, 0.5, 0.0) if late else (1.0,)))

    @cached_method
    def least(self, layers: tuple[int, ...], weights: Weights) -> Numbers:
        """Return a lower bound on the cost of each run [runs], without redistribution and sends; infinity: no fit."""
        runs = runs_of(layers)
        # Each measure of memory gives a valid bound by itself, so the largest bound is valid.
        least = self._min_with_pivot(runs, weights)
        for measure, dual in zip(self.measures[1:], self._duals(weights)[1:], strict=True):
            left = self.group.budget_bytes - measure.first[runs.first] - measure.last[runs.last]
            least = np.maximum(least, dual.runs(runs.counts, left))
        for number, run in enumerate(runs.runs):
            if len(run.layers) <= _FEW_LAYERS and (known := self._enumerated(run.layers)) is not None:
                cheapest = weights[0] * known[0] + weights[1] * known[1]
                least[number] = max(least[number], rounded_down(cheapest.min(initial=np.inf)))
        return least

    def min_rest(self, weights: Weights, rest: tuple[int, ...], resident: Numbers, peak: Numbers) -> Numbers:
        """Return a lower bound on the cost of `rest` after labels with this memory in the first phase [labels]."""
        budget, lines = self.group.budget_bytes, self._lines(weights, rest)
        at, behind = pivot_of(rest, self._head)
        if at is None:
            least = lines[0].at(budget - self.measures[0].last[rest[-1]] - resident)
        else:
            pivot = self._pivot(weights, rest[at], behind)
            least = (pivot.cost[:, None] + lines[0].at(budget - pivot.memory[:, None] - resident)).min(0)
        for measure, line in zip(self.measures[1:], lines[1:], strict=True):
            taken = measure.share * resident + (1 - measure.share) * peak
            least = np.maximum(least, line.at(budget - measure.last[rest[-1]] - taken))
        return least

    @property
    def _head(self) -> int:
        """Number of the head's type, which is the last: types are numbered in the order of the layers."""
        return len(self.options) - 1

    @cached_method
    def _duals(self, weights: Weights) -> tuple[Dual, ...]:
        """Return one bound for each measure of memory."""
        costs = [options.cost(weights) for options in self.options]
        return tuple(Dual(costs, measure.memory) for measure in self.measures)

    @cached_method
    def _lines(self, weights: Weights, rest: tuple[int, ...]) -> tuple[Polyline, ...]:
        """Return the least cost of the remaining layers as a function of their memory, for each measure.

        The first one does not include the pivot.
        """
        before = rest[: pivot_of(rest, self._head)[0]]
        counted = [before, *(rest for _ in self.measures[1:])]
        return tuple(
            dual.polyline([layers.count(kind) for kind in range(len(self.options))])
            for dual, layers in zip(self._duals(weights), counted, strict=True)
        )

    def _min_with_pivot(self, runs: Runs, weights: Weights) -> Numbers:
        dual, budget = self._duals(weights)[0], self.group.budget_bytes
        least = np.full(len(runs.runs), np.inf)
        for kind, behind, rows, counts in runs.groups:
            if kind < 0:
                least[rows] = dual.runs(counts, budget - self.measures[0].last[runs.last[rows]])
                continue
            pivot = self._pivot(weights, kind, behind)
            least[rows] = dual.cheapest(counts, zip(pivot.cost, budget - pivot.memory, strict=True))
        return least

    @cached_method
    def _pivot(self, weights: Weights, kind: int, behind: int) -> Pivot:
        """Return the pivot of a block's type; `behind` is the type of the one layer after it, or -1."""
        cost, held, measure = self.options[kind].cost(weights), self._first_phase[kind], self.measures[0].memory
        end = held.late + held.workspace
        memory = measure[kind] + end
        if behind >= 0:
            after = self._first_phase[behind]
            cost = (cost[:, None] + self.options[behind].cost(weights)).ravel()
            most = np.maximum(end[:, None] + after.late - after.activation, after.late + after.workspace)
            memory = (measure[kind][:, None] + measure[behind] + most).ravel()
        rows = non_dominated(np.stack([cost, memory], 1), np.zeros(len(cost), np.int64))
        return Pivot(cost[rows], memory[rows])

    def _measure(self, share: float) -> Measure:
        """Return a measure of the first phase."""
        memory = tuple(o.static + share * o.activation + (1 - share) * o.late for o in self._first_phase)
        first = [(1 - share) * (o.activation + o.workspace).min() for o in self._first_phase]
        last = [share * (o.late + o.workspace).min() for o in self._first_phase]
        return Measure(share, memory, np.array(first), np.array(last))

    @cached_method
    def _enumerated(self, layers: tuple[int, ...]) -> tuple[Numbers, Numbers] | None:
        """Return A and U of every choice of options for a short run that fits in the first phase, in any layouts.

        None: there are too many choices. For short runs the linear programme is a loose bound.
        """
        if prod(len(self.options[kind].time_ps) for kind in layers) > _FEW_PLANS:
            return None
        time, exposed, held = np.zeros(1), np.zeros(1), no_layers(self.phases, np.zeros(1))
        for kind in layers:
            options = self.options[kind]
            parent, option = pairs(np.arange(len(time)), len(options.time_ps))
            time, exposed = time[parent] + options.time_ps[option], exposed[parent] + options.exposed_ps[option]
            held = held.take(parent).then(self.memory[kind].take(option))
        fits = held.peak[:, 0] <= self.group.budget_bytes
        return time[fits], exposed[fits]


def _useful(options: Options, parts: tuple[Phase, ...]) -> Ints:
    """Return the options that no other option with the same layouts dominates in memory, time and U."""
    memory = options.memory(parts)
    peak, end = memory.static + memory.late, memory.static + memory.activation
    # More U for less A is no loss as long as A + U does not grow.
    columns = [options.time_ps, options.time_ps + options.exposed_ps]
    columns += [*peak.T, *(peak + memory.activation + memory.workspace).T, *end.T]
    columns += [options.host_bytes] * bool(options.host_bytes.any())
    key = options.input_layout * (int(options.output_layout.max()) + 1) + options.output_layout
    return np.sort(non_dominated(np.stack(columns, 1), key))
