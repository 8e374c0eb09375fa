"""What one place with so many microbatches in flight does to a problem's options: memory measures, useful options.

The memory of a label is two numbers. `held`: what the elements so far hold at the end, activations of the last
microbatch included. `peak`: the most so far, and late bytes. An element with x = state + (k - 1) activation raises
them to held + x + activation and x + late + max(peak, held + activation + transient).
"""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.dual import Dual
from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.problem import Options, Place, Problem
from shardwright_search.solver.runs import Runs

__all__ = ["Measure", "PlaceCosts", "Weights", "weightings"]

_FEW_ELEMENTS = 3
_FEW_PLANS = 20_000

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


class PlaceCosts:
    """The useful options of a place with k microbatches in flight, and the bounds that they allow."""

    def __init__(self, place: Place, in_flight: int) -> None:
        self.place = place
        self.useful = tuple(_useful(options, in_flight) for options in place.options)
        self.options = tuple(o.take(rows) for o, rows in zip(place.options, self.useful, strict=True))
        self.static = tuple(o.state_bytes + (in_flight - 1) * o.activation_bytes for o in self.options)
        late = any(o.late_bytes.any() for o in self.options)
        self.measures = tuple(self._measure(share) for share in ((1.0, 0.5, 0.0) if late else (1.0,)))
        self._duals: dict[Weights, tuple[Dual, ...]] = {}
        self._runs: dict[Weights, Numbers] = {}

    def duals(self, weights: Weights) -> tuple[Dual, ...]:
        """One bound for each measure of memory."""
        if weights not in self._duals:
            costs = [weights[0] * o.time_ps + weights[1] * o.end_ps for o in self.options]
            self._duals[weights] = tuple(Dual(costs, measure.memory) for measure in self.measures)
        return self._duals[weights]

    def least(self, runs: Runs, weights: Weights) -> Numbers:
        """A lower bound on the cost of every run [runs], without redistribution and sends; infinity: none fits."""
        if weights not in self._runs:
            first = np.array([run.elements[0] for run in runs.runs])
            last = np.array([run.elements[-1] for run in runs.runs])
            found = np.zeros(len(runs.runs))
            for measure, dual in zip(self.measures, self.duals(weights), strict=True):
                left = self.place.budget_bytes - measure.first[first] - measure.last[last]
                found = np.maximum(found, dual.runs(runs.counts, left))
            for number, run in enumerate(runs.runs):
                if len(run.elements) <= _FEW_ELEMENTS:
                    exact = self._exactly(run.elements, weights)
                    found[number] = found[number] if exact is None else max(found[number], exact)
            self._runs[weights] = found
        return self._runs[weights]

    def _measure(self, share: float) -> Measure:
        memory = tuple(
            static + share * o.activation_bytes + (1 - share) * o.late_bytes
            for static, o in zip(self.static, self.options, strict=True)
        )
        first = [(1 - share) * (o.activation_bytes + o.transient_bytes).min() for o in self.options]
        last = [share * (o.late_bytes + o.transient_bytes).min() for o in self.options]
        return Measure(share, memory, np.array(first), np.array(last))

    def _exactly(self, elements: tuple[int, ...], weights: Weights) -> float | None:
        """The least cost of a short run, layouts aside: the linear programme is loose there. None if it is long."""
        if np.prod([len(self.static[kind]) for kind in elements], dtype=float) > _FEW_PLANS:
            return None
        cost = held = peak = np.zeros(1)
        for kind in elements:
            o, static = self.options[kind], self.static[kind]
            cost = (cost[:, None] + weights[0] * o.time_ps + weights[1] * o.end_ps).ravel()
            before = held[:, None] + o.activation_bytes + o.transient_bytes
            peak = (static + o.late_bytes + np.maximum(peak[:, None], before)).ravel()
            held = (held[:, None] + static + o.activation_bytes).ravel()
        fitting = cost[peak <= self.place.budget_bytes]
        return float(fitting.min()) * (1 - 1e-9) - 1 if len(fitting) else np.inf


def _useful(options: Options, in_flight: int) -> Ints:
    """Options that no other of the same layouts replaces: memory, time and U are no less."""
    static = options.state_bytes + (in_flight - 1) * options.activation_bytes
    ends = static + options.late_bytes
    columns = [
        options.time_ps,
        options.end_ps,
        ends,
        ends + options.activation_bytes + options.transient_bytes,
        static + options.activation_bytes,
    ]
    key = options.takes * (int(options.gives.max()) + 1) + options.gives
    return np.sort(non_dominated(np.stack(columns, 1), key))
