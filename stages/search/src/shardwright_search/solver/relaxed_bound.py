"""A quick lower bound on T for a whole case, before its stages are looked at."""

import numpy as np

from shardwright_search.solver.problem import Problem
from shardwright_search.solver.stage_bounds import Dual
from shardwright_search.solver.stage_options import Weights

__all__ = ["RelaxedBounds"]


class RelaxedBounds:
    """Bounds of problems that share device groups, each device group looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[object, Dual]] = {}

    def lower_ps(self, problem: Problem) -> float:
        """T >= sum of (1 + (m - 1)/p) A + U/p over all stages, at least over all elements with all memory together.

        Every element counts the activations of as many microbatches as the stage with the fewest in flight.
        """
        p, m = problem.pp_size, problem.num_microbatches
        weights = 1 + (m - 1) / p, 1 / p
        budget = sum(max(problem.device_groups[group].budget_bytes for group in allowed) for allowed in problem.allowed)
        counts = np.bincount(problem.elements, minlength=len(problem.device_groups[0].options)).astype(float)
        dual = self._dual(problem, min(problem.in_flight), weights)
        least = float(dual.runs(counts[None, :], np.array([float(budget)]))[0])
        sends = 2 * float(problem.sends_ps.min((1, 2, 3, 4)).sum()) if p > 1 else 0.0
        return least + weights[0] * sends + float(problem.tie_ps.min())

    def _dual(self, problem: Problem, in_flight: int, weights: Weights) -> Dual:
        key = tuple(id(group) for group in problem.device_groups), in_flight, weights
        if key not in self._known:
            kinds = range(len(problem.device_groups[0].options))
            options = [[group.options[kind] for group in problem.device_groups] for kind in kinds]
            costs = [
                np.concatenate([weights[0] * o.time_ps + weights[1] * o.exposed_ps for o in own]) for own in options
            ]
            memory = [np.concatenate([o.state_bytes + in_flight * o.activation_bytes for o in own]) for own in options]
            # The device groups are kept, so that no other gets the number of one.
            self._known[key] = problem.device_groups, Dual(costs, memory)
        return self._known[key][1]
