"""Lower bounds on T for a whole case, and for every pipeline stage that a plan below some T can have.

With a, z and g the least of A, of (m - 1) A + U, and of (1 + (m - 1)/p) A + U/p of a stage:
T >= sum a + max z, and T >= sum g, for no maximum is less than the mean. Both are minimised over the cuts by dynamic
programmes forward and backward, which then bound T for every stage and every run of elements it may hold.
"""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.layer_ranges import runs_of
from shardwright_search.solver.pareto import Numbers
from shardwright_search.solver.problem import Problem
from shardwright_search.solver.stage_options import GroupCosts, weightings

__all__ = ["ConfigurationBounds", "CostsOf", "Rest", "StageKind", "Target"]

Usage = tuple[int, ...]


class CostsOf:
    """The costs of the device groups of a problem by microbatches in flight, each made once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], GroupCosts] = {}

    def of(self, problem: Problem, group: int, in_flight: int) -> GroupCosts:
        """Of one device group of a problem; problems that share a device group share its costs."""
        most = problem.num_microbatches if in_flight == problem.num_microbatches else in_flight + 1
        key = id(problem.device_groups[group]), in_flight, most
        if key not in self._known:
            self._known[key] = GroupCosts(problem.device_groups[group], in_flight, most)
        return self._known[key]


class StageKind(NamedTuple):
    """What the labels of a pipeline stage depend on beside its run of elements."""

    group: int
    in_flight: int
    first: bool


class Rest(NamedTuple):
    """Bounds on all other stages of a plan: sum of a, largest z, sum of g."""

    total: Numbers
    slowest: Numbers
    mean: Numbers


class Target(NamedTuple):
    """A run of elements that a stage can hold, and what A, m A + U and the mixture of g must stay below there."""

    run: int
    caps: tuple[float, float, float]


class ConfigurationBounds:
    """The bounds of one case; `rough` ones do with fewer counts of microbatches in flight, and are a little lower."""

    def __init__(self, problem: Problem, costs_of: CostsOf, rough: bool = False) -> None:
        self.problem, self.costs_of = problem, costs_of
        self._in_flight = [_fewer(count) if rough else count for count in problem.in_flight]
        self.runs = runs_of(problem.elements)
        self._stages = [self._bounds_of_stage(stage) for stage in range(problem.pp_size)]
        self._before = self._pass_forward()
        self.after = self._pass_backward()
        everything = self.after[0][problem.usages[0][0]] if problem.usages[0] else None
        self.lower_ps = np.inf
        if everything is not None:
            least = float(max(everything.total[0] + everything.slowest[0], everything.mean[0]))
            self.lower_ps = least + float(problem.tie_ps.min())

    def targets(self, below_ps: float) -> dict[StageKind, list[Target]] | None:
        """What stages a plan with T < below_ps can have; None if some stage cannot be: there is no such plan."""
        problem = self.problem
        limit = below_ps - float(problem.tie_ps.min())
        found: dict[StageKind, dict[int, tuple[float, float, float]]] = {}
        for stage in range(problem.pp_size):
            some = False
            for used in problem.usages[stage]:
                for group, after in problem.placements(stage, used):
                    kind = StageKind(group, problem.in_flight[stage], stage == 0)
                    caps = self._caps(stage, group, used, after, limit)
                    some |= bool(caps)
                    known = found.setdefault(kind, {})
                    for run, cap in caps:
                        known[run] = (
                            (max(known[run][0], cap[0]), max(known[run][1], cap[1]), max(known[run][2], cap[2]))
                            if run in known
                            else cap
                        )
            if not some:
                return None
        return {kind: [Target(run, caps) for run, caps in by_run.items()] for kind, by_run in found.items()}

    def _caps(
        self, stage: int, group: int, used: Usage, after: Usage, limit: float
    ) -> list[tuple[int, tuple[float, float, float]]]:
        a, z, g = self._stages[stage][group]
        before, behind = self._before[stage][used], self.after[stage + 1][after]
        with np.errstate(invalid="ignore"):
            total = before.total[:, None] + behind.total
            slowest = np.maximum(before.slowest[:, None], behind.slowest)
            mean = before.mean[:, None] + behind.mean
            alive = (total + a + np.maximum(z, slowest) < limit) & (mean + g < limit)
        send = self._least_sends(stage, group)
        weights = weightings(self.problem)
        found = []
        for start, end in zip(*np.nonzero(alive), strict=True):
            sums = (
                limit - total[start, end] - slowest[start, end],
                limit - total[start, end],
                limit - mean[start, end],
            )
            caps = tuple(float(s) - w[0] * send for s, w in zip(sums, weights, strict=True))
            found.append((int(self.runs.number[start, end]), (caps[0], caps[1], caps[2])))
        return found

    def _bounds_of_stage(self, stage: int) -> dict[int, tuple[Numbers, Numbers, Numbers]]:
        """By device group: a, z and g [start, end]; infinity where the stage cannot hold that run."""
        problem = self.problem
        starts = np.arange(len(problem.elements) + 1)
        able = np.zeros((len(starts), len(starts)), bool)
        for start in (0,) if stage == 0 else range(1 + stage, len(problem.elements) - 1):
            ends = problem.ends(stage, start)
            able[start, ends.start : ends.stop] = True
        found = {}
        for group in {group for used in problem.usages[stage] for group, _ in problem.placements(stage, used)}:
            costs = self.costs_of.of(problem, group, self._in_flight[stage])
            send = self._least_sends(stage, group)
            least = [costs.least(self.runs, w) + w[0] * send for w in weightings(problem)]
            slowest = least[1] - np.where(np.isfinite(least[0]), least[0], 0)
            arrays = [np.where(able, values[self.runs.number], np.inf) for values in (least[0], slowest, least[2])]
            found[group] = (arrays[0], arrays[1], arrays[2])
        return found

    def _least_sends(self, stage: int, group: int) -> float:
        """The least that a stage's sends take, whatever its neighbours."""
        sends = self.problem.sends_ps
        into = float(sends[stage - 1, :, group].min()) if stage else 0.0
        return into + (float(sends[stage, group].min()) if stage < self.problem.pp_size - 1 else 0.0)

    def _pass_forward(self) -> list[dict[Usage, Rest]]:
        problem = self.problem
        levels = [{used: self._nothing(0) for used in problem.usages[0]}]
        for stage in range(problem.pp_size):
            level: dict[Usage, Rest] = {}
            for used, rest in levels[-1].items():
                for group, after in problem.placements(stage, used):
                    a, z, g = self._stages[stage][group]
                    here = Rest(
                        (rest.total[:, None] + a).min(0),
                        np.maximum(rest.slowest[:, None], z).min(0),
                        (rest.mean[:, None] + g).min(0),
                    )
                    level[after] = _either(level.get(after), here)
            levels.append(level)
        return levels

    def _pass_backward(self) -> list[dict[Usage, Rest]]:
        problem = self.problem
        levels = [{used: self._nothing(len(problem.elements)) for used in problem.usages[-1]}]
        for stage in range(problem.pp_size - 1, -1, -1):
            level: dict[Usage, Rest] = {}
            for used in problem.usages[stage]:
                for group, after in problem.placements(stage, used):
                    a, z, g = self._stages[stage][group]
                    rest = levels[0][after]
                    here = Rest((a + rest.total).min(1), np.maximum(z, rest.slowest).min(1), (g + rest.mean).min(1))
                    level[used] = _either(level.get(used), here)
            levels.insert(0, level)
        return levels

    def _nothing(self, where: int) -> Rest:
        at = np.full(len(self.problem.elements) + 1, np.inf)
        at[where] = 0
        return Rest(at, at, at)


def _fewer(in_flight: int) -> int:
    """The next number below that is 2^n or 3 x 2^n: with fewer in flight a stage needs no more memory, nor time."""
    power = 1 << (in_flight.bit_length() - 1)
    return power + power // 2 if power > 1 and in_flight >= power + power // 2 else power


def _either(known: Rest | None, other: Rest) -> Rest:
    return other if known is None else Rest(*(np.minimum(a, b) for a, b in zip(known, other, strict=True)))
