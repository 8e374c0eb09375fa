"""A quick lower bound on T for a whole configuration, before its stages are looked at."""

from collections.abc import Callable

import numpy as np

from shardwright_search.solver.problem import DeviceGroup, Problem
from shardwright_search.solver.stage_bounds import Dual
from shardwright_search.solver.stage_options import Weights

__all__ = ["DualOf", "dual_of", "relaxed_bound_ps"]

DualOf = Callable[[tuple[DeviceGroup, ...], int, Weights], Dual]


def dual_of(groups: tuple[DeviceGroup, ...], in_flight: int, weights: Weights) -> Dual:
    """The bound for one weighting where every layer may be on any group, with so many microbatches in flight."""
    kinds = [[group.options[kind] for group in groups] for kind in range(len(groups[0].options))]
    costs = [np.concatenate([own.cost(weights) for own in kind]) for kind in kinds]
    memory = [np.concatenate([own.state_bytes + in_flight * own.activation_bytes for own in kind]) for kind in kinds]
    return Dual(costs, memory)


def relaxed_bound_ps(problem: Problem, of: DualOf) -> float:
    """T >= sum of (1 + (m - 1)/p) A + U/p over all stages, at least over all layers with all memory together.

    Every layer counts the activations of as many microbatches as the stage with the fewest in flight.
    `of` is `dual_of`, or what remembers the bounds that it made.
    """
    p, groups = problem.pp_size, problem.device_groups
    weights = 1 + (problem.num_microbatches - 1) / p, 1 / p
    budget = sum(max(groups[number].budget_bytes for number in allowed) for allowed in problem.allowed)
    counts = np.bincount(problem.layers, minlength=len(groups[0].options)).astype(float)
    least = float(of(groups, min(problem.in_flight), weights).runs(counts[None, :], np.array([float(budget)]))[0])
    sends = 2 * float(problem.sends_ps.min((1, 2, 3, 4)).sum()) if p > 1 else 0.0
    return least + weights[0] * sends + float(problem.tie_ps.min())
