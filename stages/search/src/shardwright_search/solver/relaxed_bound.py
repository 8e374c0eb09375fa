"""A quick lower bound on T for a whole configuration, before its stages are looked at."""

from collections.abc import Callable

import numpy as np

from shardwright_search.solver.problem import DeviceGroup, Problem
from shardwright_search.solver.stage_bounds import Dual
from shardwright_search.solver.stage_options import Weights, weightings

DualOf = Callable[[tuple[DeviceGroup, ...], tuple[float, ...], int, tuple[Weights, ...]], Dual]


def dual_of(
    groups: tuple[DeviceGroup, ...], widths: tuple[float, ...], in_flight: int, weights: tuple[Weights, ...]
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


def relaxed_bound_ps(problem: Problem, of: DualOf) -> float:
    """T >= sum of (1 + (m - 1) w) A + w U over all stages, at least over all layers with all memory together.

    w: a stage's share of the ranks. Every layer counts the activations of as many microbatches as the stage with the
    fewest in flight.
    `of` is `dual_of`, or what remembers the bounds that it made.
    """
    p, groups = problem.pp_size, problem.device_groups
    weights = tuple(weightings(problem, group)[2] for group in range(len(groups)))
    budgets = [group.budget_bytes * width for group, width in zip(groups, problem.relative_widths, strict=True)]
    most = p * max(group.budget_bytes for group in groups)
    budget = min(most, sum(max(budgets[group] for group in on) for on in map(problem.groups_of, range(p))))
    counts = np.bincount(problem.layers, minlength=len(groups[0].options)).astype(float)
    dual = of(groups, problem.relative_widths, min(problem.in_flight), weights)
    least = float(dual.runs(counts[None, :], np.array([float(budget)]))[0])
    sends = 2 * sum(min(cuts.values()) for cuts in problem.least_sends_ps)
    return least + min(weights)[0] * sends + float(problem.tie_ps.min())
