"""A quick lower bound on T for a whole configuration, before its stages are looked at."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.pareto import non_dominated
from shardwright_search.solver.problem import DeviceGroup, Options, Problem
from shardwright_search.solver.stage_bounds import Dual
from shardwright_search.solver.stage_options import Weights, weightings

_MAX_RECENT = 64


class Stages(NamedTuple):
    """What the bound takes of a configuration."""

    layers: tuple[int, ...]
    """Type numbers."""
    groups: tuple[DeviceGroup, ...]
    """That stages may be on."""
    widths: tuple[float, ...]
    """By device group: ranks over the mean of all stages."""
    weights: tuple[Weights, ...]
    """By device group: of A and U, the third of `weightings`."""
    in_flight: int
    """In the stage with the fewest."""
    budget_bytes: float
    """Of all stages together, a rank of each times its relative width."""


class Relaxed:
    """The bounds, with what they share."""

    def __init__(self) -> None:
        self._dual = lru_cache(_MAX_RECENT)(_dual)

    def bound_ps(self, problem: Problem) -> float:
        """With what sends and ties take at least."""
        p, groups = problem.pp_size, problem.device_groups
        weights = tuple(weightings(problem, group)[2] for group in range(len(groups)))
        budgets = [group.budget_bytes * width for group, width in zip(groups, problem.relative_widths, strict=True)]
        most = p * max(group.budget_bytes for group in groups)
        budget = min(most, sum(max(budgets[group] for group in on) for on in map(problem.groups_of, range(p))))
        fewest = min(problem.in_flight)
        least = self.least_ps(Stages(problem.layers, groups, problem.relative_widths, weights, fewest, budget))
        sends = 2 * sum(min(cuts.values()) for cuts in problem.least_sends_ps)
        return least + min(weights)[0] * sends + float(problem.tie_ps.min())

    def least_ps(self, stages: Stages) -> float:
        """T >= sum of (1 + (m - 1) w) A + w U over all stages, at least over all layers with all memory together.

        w: a stage's share of the ranks, by their weights. Every layer counts the activations of as many microbatches as
        the stage with the fewest in flight.
        """
        dual = self._dual(*stages[1:5])
        counts = np.bincount(stages.layers, minlength=len(stages.groups[0].options)).astype(float)
        return float(dual.runs(counts[None, :], np.array([float(stages.budget_bytes)]))[0])


def lean(options: Options) -> Options:
    """Those that no other replaces in the bound, whatever the weights and the microbatches in flight."""
    columns = options.time_ps, options.exposed_ps, options.state_bytes, options.activation_bytes
    return options.take(np.sort(non_dominated(np.stack(columns, 1), np.zeros(len(options.time_ps), np.int64))))


def _dual(
    groups: tuple[DeviceGroup, ...], widths: tuple[float, ...], weights: tuple[Weights, ...], in_flight: int
) -> Dual:
    """The bound where every layer may be on any group, with the group's weights and so many microbatches in flight.

    Its memory is that of a rank times the relative width of its stage.
    """
    costs, memory = [], []
    for kind in range(len(groups[0].options)):
        own = [group.options[kind] for group in groups]
        costs.append(np.concatenate([o.cost(w) for o, w in zip(own, weights, strict=True)]))
        held = [(o.state_bytes + in_flight * o.activation_bytes) * width for o, width in zip(own, widths, strict=True)]
        memory.append(np.concatenate(held))
    return Dual(costs, memory)
