"""The exact partition of layers over the stages of many pipelines at once.

The least bottleneck: stages that take as many layers as a limit allows meet it wherever every stage can do with the
next layer. Limits that fail are raised to the next one at which any stage could take more, those that succeed lowered
to what was reached, by bisection. A stage that needs a layer may be too slow for the next one and not for an earlier
one: so the limit just below is tried over all cuts that can be reached, and where it can be met, the bisection goes on
that way. All are integers, so this is exact. The least sum within a limit: a dynamic programme over stages and layers,
of equal ones the most even.

A pipeline takes the closed form, the sum and s times the bottleneck. Where S is the least sum within a limit, no
partition within it whose bottleneck is above (T - S) / s is faster than a known T. Limits are tried from above, each at
or under that and the bottleneck found last.
"""

from collections.abc import Sequence
from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_PARTITIONS = 500_000
"""Partitions of a candidate that are all tried: all ways to cut 50 layers into up to 5 stages, and 26 into up to 8."""
_NONE = 1 << 62


class Pipelines(NamedTuple):
    """Pipelines of equally many stages; times in picoseconds."""

    table: NDArray[Any]
    """Time of the first layers [rows, layers + 1], one row for each speed that stages run at."""
    rows: NDArray[Any]
    """Row of the table for each stage [pipelines, stages]."""
    sends: NDArray[Any]
    """Time that sending adds to a stage, wherever it begins and ends [pipelines, stages]."""
    steady: NDArray[Any]
    """Times that the slowest stage counts besides the sum over all: the closed form's coefficient [pipelines]."""

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return int(self.table.shape[1]) - 1

    def some(self, chosen: NDArray[Any]) -> "Pipelines":
        """Return the chosen pipelines."""
        return self._replace(rows=self.rows[chosen], sends=self.sends[chosen], steady=self.steady[chosen])


def fastest_partitions(pipelines: Pipelines) -> NDArray[Any]:
    """Return the fastest cuts: the first layer of each stage, and the number of layers [pipelines, stages + 1].

    Each stage has a layer, and there are at least as many layers as stages.
    """
    least, steady = min_bottlenecks(pipelines), pipelines.steady
    best = min_sums(pipelines, least)
    shortest, floor = pipeline_times(pipelines, best), _sums_at_least(pipelines)
    limit = np.full(len(least), _NONE // 2)
    while True:
        below = np.where(steady > 0, (shortest - floor) // np.maximum(steady, 1), _NONE // 2)
        limit = np.minimum(limit, below)
        open_ = np.flatnonzero((limit > least) & (shortest > floor + steady * least))
        if not len(open_):
            return best
        some = pipelines.some(open_)
        cuts = min_sums(some, limit[open_])
        times = stage_times(some, cuts)
        cuts_ps = times.sum(axis=1) + some.steady * times.max(axis=1)
        best[open_] = np.where((cuts_ps < shortest[open_])[:, None], cuts, best[open_])
        shortest[open_] = np.minimum(shortest[open_], cuts_ps)
        limit[open_], floor[open_] = times.max(axis=1) - 1, times.sum(axis=1)


def _sums_at_least(pipelines: Pipelines) -> NDArray[Any]:
    """Return the least sum over stages without a limit: the best cut before a stage is the same for all ends."""
    table, rows, sends, _ = pipelines
    best = np.full((len(rows), pipelines.layers + 1), _NONE)
    best[:, 0] = 0
    for stage in range(rows.shape[1]):
        sums = table[rows[:, stage]]
        before = np.minimum.accumulate(best - sums, axis=1)[:, :-1]
        best = np.pad(before, ((0, 0), (1, 0)), constant_values=_NONE)
        best[:, 1:] += sums[:, 1:]
    return np.asarray(best[:, -1] + sends.sum(axis=1))


def pipeline_times(pipelines: Pipelines, cuts: NDArray[Any]) -> NDArray[Any]:
    """Return the time of one partition of each pipeline [pipelines]."""
    times = stage_times(pipelines, cuts)
    return np.asarray(times.sum(axis=1) + pipelines.steady * times.max(axis=1))


def stage_times(pipelines: Pipelines, cuts: NDArray[Any]) -> NDArray[Any]:
    """Return the time of each stage with its sends [pipelines, stages]."""
    ends = pipelines.table[pipelines.rows, cuts[:, 1:]]
    return np.asarray(ends - pipelines.table[pipelines.rows, cuts[:, :-1]] + pipelines.sends)


def min_bottlenecks(pipelines: Pipelines) -> NDArray[Any]:
    """Return the least time of the longest stage over all partitions [pipelines]."""
    high = _reachable_bottleneck(pipelines)
    low = pipelines.sends.max(axis=1)  # no layer takes no time
    open_ = np.flatnonzero(_can_be_met(pipelines, high - 1))
    high[open_] -= 1
    while len(open_):
        middle = (low[open_] + high[open_]) // 2
        met = _can_be_met(pipelines.some(open_), middle)
        high[open_], low[open_] = np.where(met, middle, high[open_]), np.where(met, low[open_], middle + 1)
        open_ = open_[low[open_] < high[open_]]
    return high


def _can_be_met(pipelines: Pipelines, limit: NDArray[Any]) -> NDArray[Any]:
    """Return whether some partition's stages all stay within the limit, by the cuts that can be reached."""
    table, rows, sends, _ = pipelines
    reached = np.zeros((len(rows), pipelines.layers + 1), bool)
    reached[:, 0] = True
    cuts = np.arange(pipelines.layers + 1)
    for stage in range(rows.shape[1]):
        sums = table[rows[:, stage]]
        last = np.maximum.accumulate(np.where(reached, cuts, -1), axis=1)[:, :-1]
        begun = np.take_along_axis(sums, np.maximum(last, 0), axis=1)
        reached = np.pad((last >= 0) & (sums[:, 1:] - begun <= (limit - sends[:, stage])[:, None]), ((0, 0), (1, 0)))
    return np.asarray(reached[:, -1])


def _reachable_bottleneck(pipelines: Pipelines) -> NDArray[Any]:
    """Return a bottleneck that can be reached, mostly the least."""
    low = pipelines.sends.max(axis=1)
    high = pipelines.table[:, -1].max() + low
    open_ = np.flatnonzero(low < high)
    while len(open_):
        middle = (low[open_] + high[open_]) // 2
        met, reached, raised = _filled_up_to(pipelines.some(open_), middle)
        high[open_] = np.where(met, reached, high[open_])
        low[open_] = np.where(met, low[open_], np.minimum(raised, high[open_]))
        open_ = open_[low[open_] < high[open_]]
    return np.asarray(high)


def _filled_up_to(pipelines: Pipelines, limit: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return whether a limit is met, the longest stage's time then, and else the next limit that changes anything."""
    table, rows, sends, _ = pipelines
    layers, stages = pipelines.layers, rows.shape[1]
    apart = 2 * int(table[:, -1].max() + limit.max()) + 2
    flat = (table + apart * np.arange(len(table))[:, None]).ravel()
    start, met = np.zeros(len(rows), int), np.ones(len(rows), bool)
    reached, raised = np.zeros(len(rows), np.int64), np.full(len(rows), _NONE)
    for stage in range(stages):
        row, last = rows[:, stage], layers - (stages - 1 - stage)
        begun = table[row, start] - sends[:, stage]
        bound = np.maximum(begun + limit, 0) + apart * row
        end = np.searchsorted(flat, bound, side="right") - 1 - row * (layers + 1)
        more = table[row, np.minimum(np.maximum(end, start) + 1, layers)] - begun
        raised = np.where(end < last, np.minimum(raised, more), raised)
        met &= end > start
        end = np.minimum(np.maximum(end, start + 1), last)
        reached = np.maximum(reached, table[row, end] - begun)
        start = end
    return met & (start == layers), reached, raised


def min_sums(pipelines: Pipelines, limit: NDArray[Any]) -> NDArray[Any]:
    """Return the cuts of the least sum of stages within a limit that can be met; of equal ones the most even."""
    table, rows, sends, _ = pipelines
    (number, stages), layers = rows.shape, pipelines.layers
    weight = layers**2 + 1  # of a picosecond: more than the sums of squares can differ by
    best = np.full((number, layers + 1), _NONE)
    best[:, 0] = 0
    taken = np.zeros((stages, number, layers + 1), np.int16)
    first, last = _reaches(pipelines, limit)
    for stage in range(stages):
        sums, room = table[rows[:, stage]], (limit - sends[:, stage])[:, None]
        after = np.full((number, layers + 1), _NONE)
        low, high = first[stage + 1], last[stage + 1]
        for count in range(1, high - first[stage] + 1):
            begin, end = max(low, first[stage] + count), min(high, last[stage] + count) + 1
            time = sums[:, begin:end] - sums[:, begin - count : end - count]
            if begin < end and (time > room).all():
                break
            total = best[:, begin - count : end - count] + time * weight + count * count
            better = (time <= room) & (total < after[:, begin:end])
            np.copyto(after[:, begin:end], total, where=better)
            np.copyto(taken[stage, :, begin:end], count, where=better)
        best = after
    return _traced(taken, number, layers)


def _reaches(pipelines: Pipelines, limit: NDArray[Any]) -> tuple[list[int], list[int]]:
    """Return the least and the most layers before each stage, and at the end, over all pipelines."""
    table, rows, sends, _ = pipelines
    (number, stages), layers = rows.shape, pipelines.layers
    first, last = [layers], [0]
    low, high, numbers = np.full(number, layers), np.zeros(number, int), np.arange(number)
    for stage in range(stages):
        sums, room = table[rows[:, stage]], limit - sends[:, stage]
        high = np.minimum((sums <= (sums[numbers, high] + room)[:, None]).sum(axis=1) - 1, layers - stages + stage + 1)
        last.append(int(high.max()))
    for stage in reversed(range(stages)):
        sums, room = table[rows[:, stage]], limit - sends[:, stage]
        low = np.maximum((sums < (sums[numbers, low] - room)[:, None]).sum(axis=1), stage)
        first.append(int(low.min()))
    return first[::-1], last


def _traced(taken: NDArray[Any], number: int, layers: int) -> NDArray[Any]:
    cuts = np.full((number, len(taken) + 1), layers)
    for stage in reversed(range(len(taken))):
        cuts[:, stage] = cuts[:, stage + 1] - taken[stage, np.arange(number), cuts[:, stage + 1]]
    return cuts


class PartitionCheck(NamedTuple):
    """Counts of pipelines whose partitions were all tried or left out, and lines on better ones that were missed."""

    tried: int
    left: int
    wrong: tuple[str, ...]


def check(pipelines: Pipelines, names: Sequence[object]) -> PartitionCheck:
    """Compare the chosen partitions, and the least bottlenecks, with those of all partitions, where these are few."""
    layers, (number, stages) = pipelines.layers, pipelines.rows.shape
    if comb(layers - 1, stages - 1) > MAX_PARTITIONS:
        return PartitionCheck(0, number, ())
    cuts, chosen = _all_cuts(layers, stages), pipeline_times(pipelines, fastest_partitions(pipelines))
    bottlenecks, wrong = min_bottlenecks(pipelines), []
    for i, name in enumerate(names):
        repeated = pipelines.some(np.full(len(cuts), i))
        least = stage_times(repeated, cuts).max(axis=1).min()
        best = pipeline_times(repeated, cuts).min()
        if (least, best) != (bottlenecks[i], chosen[i]):
            wrong.append(f"{name}: {chosen[i]} ps, {best} ps is possible; bottleneck {bottlenecks[i]}, {least}")
    return PartitionCheck(number, 0, tuple(wrong))


def _all_cuts(layers: int, stages: int) -> NDArray[Any]:
    chosen = list(combinations(range(1, layers), stages - 1))
    inner = np.array(chosen, int).reshape(len(chosen), stages - 1)
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))
