"""Lower bounds on the cost of a run of elements within a memory budget: the dual of a linear programme.

If every element chose a mixture of its options, the least cost within memory M would be the maximum over prices lambda
of a byte of sum over elements of min over options (cost + lambda memory) - lambda M. The maximum is taken at a slope of
the lower convex hull of some type's options (Sinha and Zoltners 1979, the multiple-choice knapsack). Whole options cost
no less.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from shardwright_search.solver.pareto import Numbers

__all__ = ["Dual"]

_ROUNDING = 1e-9


class Dual:
    """The bound for one cost and one measure of memory, both by type [options]."""

    def __init__(self, costs: Sequence[Numbers], memory: Sequence[Numbers]) -> None:
        slopes = {slope for cost, held in zip(costs, memory, strict=True) for slope in _hull_slopes(cost, held)}
        self._prices = np.array(sorted(slopes | {0.0}))
        priced = [
            (cost[:, None] + held[:, None] * self._prices).min(0) for cost, held in zip(costs, memory, strict=True)
        ]
        self._least_cost = np.stack(priced)
        self._least_memory = np.array([held.min() for held in memory])

    def runs(self, counts: Numbers, left: Numbers) -> Numbers:
        """Of runs with so many elements of each type [runs, types] and memory `left` [runs]; infinity: none fits."""
        value = (counts @ self._least_cost - left[:, None] * self._prices).max(1)
        return np.where(counts @ self._least_memory <= left, value * (1 - _ROUNDING) - 1, np.inf)

    def rest(self, counts: Numbers, left: Numbers) -> Numbers:
        """Of one run [types] with each of several amounts of memory `left` [labels]."""
        value = ((counts @ self._least_cost)[None, :] - left[:, None] * self._prices).max(1)
        return np.where(counts @ self._least_memory <= left, value * (1 - _ROUNDING) - 1, np.inf)


def _hull_slopes(cost: Numbers, memory: Numbers) -> list[float]:
    """What a byte is worth along the lower left hull of the points (memory, cost)."""
    hull: list[tuple[float, float]] = []
    for row in np.lexsort((cost, memory)):
        x, y = float(memory[row]), float(cost[row])
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return [(a[1] - b[1]) / (b[0] - a[0]) for a, b in pairwise(hull) if b[0] > a[0]]
