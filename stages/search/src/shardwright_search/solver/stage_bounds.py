"""Lower bounds on the cost of a run of layers within a memory budget: a linear programme.

If every layer chose a mixture of its options, each type would move along the lower left hull of its points (memory,
cost), steepest edges first: the least cost is a convex polyline in the memory. Its value is also the maximum over
prices lambda of a byte of sum over layers of min over options (cost + lambda memory) - lambda M, at a slope of some
hull (Sinha and Zoltners 1979, the multiple-choice knapsack). Whole options cost no less.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright_search.step.pareto import Numbers

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
    """The bound for one cost and one measure of memory, both by type [options]."""

    def __init__(self, costs: Sequence[Numbers], memory: Sequence[Numbers]) -> None:
        self._hulls = [hull(cost, resident) for cost, resident in zip(costs, memory, strict=True)]
        slopes = {slope for points in self._hulls for slope in slopes_of(points)}
        # The dual is piecewise linear in the price, with corners at slopes of the hulls: one of them is the best price.
        self._prices = np.array(sorted(slopes | {0.0}))
        priced = [(points[:, 1:] + points[:, :1] * self._prices).min(0) for points in self._hulls]
        self._min_cost = np.stack(priced)
        self._min_memory = np.array([points[0, 0] for points in self._hulls])

    def runs(self, counts: Numbers, left: Numbers) -> Numbers:
        """Return bounds of runs with layers of each type [runs, types] and memory `left` [runs]; infinity: no fit."""
        value = (counts @ self._min_cost - left[:, None] * self._prices).max(1)
        return np.where(counts @ self._min_memory <= left, rounded_down(value), np.inf)

    def prices(self, counts: Numbers, left: float, most: int) -> Numbers:
        """Return the price of a byte that gives the strongest bound for these numbers of layers, and nearby prices."""
        best = int((counts @ self._min_cost - left * self._prices).argmax())
        return self._prices[max(0, best - most // 2) : best + most // 2 + 1]

    def cheapest(self, counts: Numbers, ways: Iterable[tuple[float, float]]) -> Numbers:
        """Return the bounds of `runs`, each in the cheapest of several ways, which have a cost and leave memory."""
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
