"""Lower bounds on T for all plans through a label: what lets the solver drop labels before they are complete.

A stage's held memory is at most the budget M, so in any plan that fits, the held memory of all p stages is at most
p M. Hence for any price lambda >= 0 of a byte and any weights of (A, U, O), the weighted sum over a whole plan is at
least the label's own, plus lambda times what it holds, plus for each other element the least of weighted cost and
lambda times memory, minus lambda p M (Lagrangian relaxation; Fisher 1981). The largest over some prices is taken.

Two weightings bound T = sum A' + (m - 1) max A' + max U + max O: a maximum is no less than the mean, and no less than
the label's own share.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_search.solver.pareto import Ints
from shardwright_search.solver.problem import Options, Problem

__all__ = ["Floors", "Reals", "floors", "lower_bound_ps"]

Reals = NDArray[np.float64]

_MOST_PRICES = 12


class _Floor(NamedTuple):
    """For one weighting: prices of a byte [prices], and the least priced cost of each type [types, prices]."""

    weights: Reals
    prices: Reals
    least: Reals


class Floors(NamedTuple):
    """What the bounds of one problem are made of: the weightings of the means and of the sum of A alone."""

    of_means: _Floor
    of_time: _Floor


def floors(problem: Problem) -> Floors:
    """The least priced costs over all pipeline stages and options."""
    p, m = problem.pp_size, problem.num_microbatches
    return Floors(_floor(problem, (1 + (m - 1) / p, 1 / p, 1 / p)), _floor(problem, (1.0, 0.0, 0.0)))


def lower_bound_ps(
    problem: Problem, known: Floors, run: tuple[int, ...], objectives_ps: Ints, memory_bytes: Ints
) -> Reals:
    """No plan that fits and treats `run` as a label [labels, 3 objectives] does has a T below its entry [labels].

    Rounding is allowed for, so that a bound is never too high by it.
    """
    means = _weighted_sum(problem, known.of_means, run, objectives_ps, memory_bytes)
    time = _weighted_sum(problem, known.of_time, run, objectives_ps, memory_bytes)
    own = objectives_ps @ np.array([problem.num_microbatches - 1, 1, 1])
    bound: Reals = np.maximum(means, time + own) * (1 - 1e-9) - 1
    return bound


def _weighted_sum(
    problem: Problem, floor: _Floor, run: tuple[int, ...], objectives_ps: Ints, memory_bytes: Ints
) -> Reals:
    others = np.zeros(len(floor.prices))
    for kind in set(problem.elements):
        others += (problem.elements.count(kind) - run.count(kind)) * floor.least[kind]
    best = np.full(len(memory_bytes), -np.inf)
    allowed = problem.pp_size * problem.budget_bytes
    for price, rest in zip(floor.prices, others, strict=True):
        np.maximum(best, price * (memory_bytes - allowed) + rest, out=best)
    bound: Reals = objectives_ps @ floor.weights + best
    return bound


def _floor(problem: Problem, weighting: tuple[float, float, float]) -> _Floor:
    weights = np.array(weighting)
    kinds = range(len(problem.tables[0].options))
    stages = {(id(table), k): table for table, k in zip(problem.tables, problem.in_flight, strict=True)}
    points = [[_cost_and_memory(table.options[kind], k, weights) for (_, k), table in stages.items()] for kind in kinds]
    prices = _prices([np.concatenate([np.stack(p, 1) for p in found]) for found in points])
    least = [
        np.min([(cost[:, None] + memory[:, None] * prices).min(0) for cost, memory in found], axis=0)
        for found in points
    ]
    return _Floor(weights, prices, np.array(least))


def _cost_and_memory(options: Options, in_flight: int, weights: Reals) -> tuple[Reals, Reals]:
    objectives = np.stack([options.microbatch_ps, options.gradient_sync_ps, options.optimizer_ps], 1)
    return objectives @ weights, (options.state_bytes + in_flight * options.activation_bytes).astype(float)


def _prices(points: list[Reals]) -> Reals:
    """Zero, and prices at which one option becomes better than another, evenly chosen among all."""
    found = {0.0}
    for rows in points:
        cost, memory = rows[:, 0], rows[:, 1]
        saved, paid = memory[:, None] - memory[None, :], cost[None, :] - cost[:, None]
        found |= set((paid[(saved > 0) & (paid > 0)] / saved[(saved > 0) & (paid > 0)]).tolist())
    ordered = np.array(sorted(found))
    return ordered[np.unique(np.linspace(0, len(ordered) - 1, _MOST_PRICES).astype(np.int64))]
