"""A second opinion on partitions: every one of them, where there are not too many."""

from itertools import combinations
from math import comb
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_search.fasop.estimate import Batch
from shardwright_search.fasop.partition import fastest_partitions, least_bottlenecks, pipeline_times, stage_times
from shardwright_search.fasop.problem import Problem

MAX_PARTITIONS = 500_000
"""Of one candidate: all ways to cut 50 layers into up to 5 stages, and 26 into up to 8."""


class Check(NamedTuple):
    """How many candidates had all their partitions tried, and those of which a better one was found."""

    tried: int
    left: int
    wrong: tuple[str, ...]


def check(problem: Problem, batch: Batch) -> Check:
    """Compare the chosen partitions, and the least bottlenecks, with every partition's."""
    layers, stages = batch.pipelines.layers, batch.pipelines.rows.shape[1]
    if comb(layers - 1, stages - 1) > MAX_PARTITIONS:
        return Check(0, len(batch.candidates), ())
    every, found = _all_cuts(layers, stages), pipeline_times(batch.pipelines, fastest_partitions(batch.pipelines))
    bottlenecks, wrong = least_bottlenecks(batch.pipelines), []
    for number, own in enumerate(batch.candidates):
        one = batch.pipelines.some(np.full(len(every), number))
        least = stage_times(one, every).max(axis=1).min()
        best = pipeline_times(one, every).min()
        if (least, best) != (bottlenecks[number], found[number]):
            wrong.append(f"{own}: {found[number]} ps, {best} ps is possible; bottleneck {bottlenecks[number]}, {least}")
    return Check(len(batch.candidates), 0, tuple(wrong))


def _all_cuts(layers: int, stages: int) -> NDArray[Any]:
    chosen = list(combinations(range(1, layers), stages - 1))
    inner = np.array(chosen, int).reshape(len(chosen), stages - 1)
    return np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, layers)))
