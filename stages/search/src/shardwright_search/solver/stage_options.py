"""What a device group with so many microbatches in flight does to a problem's options: memory, useful options.

In each phase the memory of a label is two numbers. `held`: what the elements so far hold at the end, activations of the
last microbatch included. `peak`: the most so far, and late bytes. An element that holds x all phase long raises them
to held + x + activation and x + late + max(peak, held + activation + transient).
"""

from math import prod
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.layer_ranges import Runs, pivot_of
from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.problem import DeviceGroup, Options, Phase, Problem, phases
from shardwright_search.solver.stage_bounds import Dual, Polyline

__all__ = ["GroupCosts", "Measure", "PhaseCosts", "Weights", "weightings"]

_FEW_ELEMENTS = 2
_FEW_PLANS = 5_000

Weights = tuple[float, float]
"""Of A and U in a cost."""


def weightings(problem: Problem) -> tuple[Weights, Weights, Weights]:
    """The costs that are bounded: time; what the slowest stage adds to T; T if all stages took the mean."""
    p, m = problem.pp_size, problem.num_microbatches
    return (1.0, 0.0), (float(m), 1.0), (1 + (m - 1) / p, 1 / p)


class Measure(NamedTuple):
    """An additive amount of memory that a stage cannot do without: `share` of it held, the rest peak.

    At the last element the peak is all x and activations, that element's transient and late bytes; at the first, all x
    and late bytes, that element's activation and transient. Any mixture of the two is no more than the peak.
    """

    share: float
    memory: tuple[Numbers, ...]
    """By type [options]."""
    first: Numbers
    """By type: the least that the first element adds."""
    last: Numbers
    """By type: the least that the last element adds."""


class Pivot(NamedTuple):
    """The last layer of a run, with the head if that is behind it: what they hold for a moment binds.

    So their options are told apart, one entry each; what another replaces is left out.
    """

    cost: Numbers
    memory: Numbers
    """What the measure of all memory held counts, and what is held for a moment at the end of the run."""


class PhaseCosts(NamedTuple):
    """What an element holds in one phase, by type [options]."""

    in_flight: int
    static: tuple[Numbers, ...]
    """All phase long: x."""
    late: tuple[Numbers, ...]
    """From the element's backward pass on."""


class GroupCosts:
    """The useful options of a device group with k of m microbatches in flight, and the bounds that they allow."""

    def __init__(self, group: DeviceGroup, in_flight: int, num_microbatches: int) -> None:
        self.group = group
        parts = phases(in_flight, num_microbatches)
        self.useful = tuple(_useful(options, parts) for options in group.options)
        self.options = tuple(o.take(rows) for o, rows in zip(group.options, self.useful, strict=True))
        self.phases = tuple(
            PhaseCosts(phase.in_flight, *zip(*(_in_phase(o, phase) for o in self.options), strict=True))
            for phase in parts
        )
        late = parts[0].late and any(o.late_bytes.any() for o in self.options)
        self.measures = tuple(self._measure(share) for share in ((1.0, 0.5, 0.0) if late else (1.0,)))
        self._duals: dict[Weights, tuple[Dual, ...]] = {}
        self._runs: dict[Weights, Numbers] = {}
        self._pivots: dict[tuple[Weights, int, int], Pivot] = {}
        self._short: dict[tuple[int, ...], tuple[Numbers, Numbers] | None] = {}
        self._rests: dict[tuple[Weights, tuple[int, ...]], tuple[Polyline, ...]] = {}

    def duals(self, weights: Weights) -> tuple[Dual, ...]:
        """One bound for each measure of memory."""
        if weights not in self._duals:
            costs = [weights[0] * o.time_ps + weights[1] * o.exposed_ps for o in self.options]
            self._duals[weights] = tuple(Dual(costs, measure.memory) for measure in self.measures)
        return self._duals[weights]

    def least(self, runs: Runs, weights: Weights) -> Numbers:
        """A lower bound on the cost of every run [runs], without redistribution and sends; infinity: none fits."""
        if weights not in self._runs:
            found = self._least_with_pivot(runs, weights)
            for measure, dual in zip(self.measures[1:], self.duals(weights)[1:], strict=True):
                left = self.group.budget_bytes - measure.first[runs.first] - measure.last[runs.last]
                found = np.maximum(found, dual.runs(runs.counts, left))
            for number, run in enumerate(runs.runs):
                if len(run.elements) <= _FEW_ELEMENTS:
                    exact = self._exactly(run.elements, weights)
                    found[number] = found[number] if exact is None else max(found[number], exact)
            self._runs[weights] = found
        return self._runs[weights]

    def least_rest(self, weights: Weights, rest: tuple[int, ...], resident: Numbers, peak: Numbers) -> Numbers:
        """What the elements still to come cost at least after labels that hold so much [labels]."""
        budget, counts = self.group.budget_bytes, [rest.count(kind) for kind in range(len(self.options))]
        key = weights, rest
        group, behind = pivot_of(rest, self._head)
        if key not in self._rests:
            without = list(counts)
            for kind in rest if group is None else rest[group:]:
                without[kind] -= group is not None
            self._rests[key] = (
                self.duals(weights)[0].polyline(without),
                *(dual.polyline(counts) for dual in self.duals(weights)[1:]),
            )
        lines = self._rests[key]
        if group is None:
            least = lines[0].at(budget - self.measures[0].last[rest[-1]] - resident)
        else:
            pivot = self._pivot(weights, rest[group], behind)
            least = np.min(
                [c + lines[0].at(budget - m - resident) for c, m in zip(pivot.cost, pivot.memory, strict=True)], axis=0
            )
        for measure, line in zip(self.measures[1:], lines[1:], strict=True):
            taken = measure.share * resident + (1 - measure.share) * peak
            least = np.maximum(least, line.at(budget - measure.last[rest[-1]] - taken))
        return least

    @property
    def _head(self) -> int:
        """The last type is the head's: types are numbered in the order of the elements."""
        return len(self.options) - 1

    def _least_with_pivot(self, runs: Runs, weights: Weights) -> Numbers:
        dual, budget = self.duals(weights)[0], self.group.budget_bytes
        found = np.full(len(runs.runs), np.inf)
        for kind, behind, rows, counts in runs.groups:
            if kind < 0:
                found[rows] = dual.runs(counts, budget - self.measures[0].last[runs.last[rows]])
                continue
            pivot = self._pivot(weights, kind, behind)
            for cost, memory in zip(pivot.cost, pivot.memory, strict=True):
                found[rows] = np.minimum(found[rows], cost + dual.runs(counts, np.full(len(rows), budget - memory)))
        return found

    def _pivot(self, weights: Weights, kind: int, behind: int) -> Pivot:
        """Of a layer type; `behind` is the type of the one element behind it, or -1."""
        key = weights, kind, behind
        if key not in self._pivots:
            o, measure = self.options[kind], self.measures[0].memory
            cost = weights[0] * o.time_ps + weights[1] * o.exposed_ps
            late = self.phases[0].late
            workspace = late[kind] + o.workspace_bytes
            memory = measure[kind] + workspace
            if behind >= 0:
                after = self.options[behind]
                cost = (cost[:, None] + weights[0] * after.time_ps + weights[1] * after.exposed_ps).ravel()
                here = workspace[:, None] + late[behind] - after.activation_bytes
                most = np.maximum(here, late[behind] + after.workspace_bytes)
                memory = (measure[kind][:, None] + measure[behind] + most).ravel()
            rows = non_dominated(np.stack([cost, memory], 1), np.zeros(len(cost), np.int64))
            self._pivots[key] = Pivot(cost[rows], memory[rows])
        return self._pivots[key]

    def _measure(self, share: float) -> Measure:
        """Of the first phase."""
        own = self.phases[0]
        memory = tuple(
            static + share * o.activation_bytes + (1 - share) * late
            for static, late, o in zip(own.static, own.late, self.options, strict=True)
        )
        first = [(1 - share) * (o.activation_bytes + o.workspace_bytes).min() for o in self.options]
        last = [share * (late + o.workspace_bytes).min() for late, o in zip(own.late, self.options, strict=True)]
        return Measure(share, memory, np.array(first), np.array(last))

    def _exactly(self, elements: tuple[int, ...], weights: Weights) -> float | None:
        """The least cost of a short run, layouts aside: the linear programme is loose there. None if it is long."""
        if elements not in self._short:
            self._short[elements] = self._enumerated(elements)
        known = self._short[elements]
        if known is None:
            return None
        cost = weights[0] * known[0] + weights[1] * known[1]
        return float(cost.min()) * (1 - 1e-9) - 1 if len(cost) else np.inf

    def _enumerated(self, elements: tuple[int, ...]) -> tuple[Numbers, Numbers] | None:
        """A and U of every choice that fits in the first phase; None if there are too many."""
        if prod(len(self.options[kind].input_layout) for kind in elements) > _FEW_PLANS:
            return None
        time = end = resident = peak = np.zeros(1)
        for kind in elements:
            o, static, late = self.options[kind], self.phases[0].static[kind], self.phases[0].late[kind]
            time, end = (time[:, None] + o.time_ps).ravel(), (end[:, None] + o.exposed_ps).ravel()
            before = resident[:, None] + (o.activation_bytes + o.workspace_bytes)
            peak = (static + late + np.maximum(peak[:, None], before)).ravel()
            resident = (resident[:, None] + (static + o.activation_bytes)).ravel()
        fits = peak <= self.group.budget_bytes
        return time[fits], end[fits]


def _in_phase(options: Options, phase: Phase) -> tuple[Numbers, Numbers]:
    """Static and late bytes."""
    static = options.state_bytes + (phase.in_flight - 1) * options.activation_bytes
    if phase.late:
        return static, options.late_bytes
    return static + options.late_bytes, np.zeros_like(static)


def _useful(options: Options, parts: tuple[Phase, ...]) -> Ints:
    """Options that no other of the same layouts replaces: memory, time and U are no less."""
    columns = [options.time_ps, options.time_ps + options.exposed_ps]
    for phase in parts:
        static, late = _in_phase(options, phase)
        ends = static + late
        columns += [ends, ends + options.activation_bytes + options.workspace_bytes, static + options.activation_bytes]
    key = options.input_layout * (int(options.output_layout.max()) + 1) + options.output_layout
    return np.sort(non_dominated(np.stack(columns, 1), key))
