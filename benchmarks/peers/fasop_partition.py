"""FASOP's own partition, written anew from its source: layers go from the slowest stage to the fastest, one by one."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from fasop_problem import Candidate, FasopProblem
from fasop_published import PricedCase, simulated_s


class Chosen(NamedTuple):
    """Layers of each stage as its table has them, and as its times are of: one of its stops changes them in between."""

    printed: tuple[int, ...]
    priced: tuple[int, ...]


def chosen(problem: FasopProblem, own: Candidate, own_times: bool = False) -> Chosen:
    """What FASOP takes for a candidate; `own_times`: with T5's decoder partitioned by its own layers' times."""
    case = PricedCase.of(problem, own)
    count = len(problem.kinds)
    if own.pp_size == 1:
        return Chosen((count,), (count,))
    gpus = [case.gpu(stage) for stage in range(own.pp_size)]
    if problem.kinds.count(problem.kinds[0]) == 1:
        return moved(case, count, gpus)
    # T5: the decoder is partitioned with the times of the encoder's layers, and as if it began with stage 0.
    late = count // 2 if own_times else 0
    halves = [
        (moved(case, count // 2, gpus[:first]).printed + moved(case, count // 2, gpus[first:], late).printed)
        for first in range(1, min(own.pp_size, count // 2))
        if own.pp_size - first <= problem.max_pp_size / 2
    ]
    best = min(halves, key=lambda layers: simulated_s(problem, own, layers))
    return Chosen(best, best)


def moved(case: PricedCase, count: int, gpus: Sequence[int], begin: int = 0) -> Chosen:
    """From equal shares on, until the slowest stage is slower than before, or a partition comes back."""
    stages = len(gpus)
    share, rest = divmod(count, stages)
    layers = [share] * stages
    for i in range(rest):
        layers[i - 1] += 1
    history, before, any_moved = [layers[:]], float("inf"), False
    slow = fast = 0
    while True:
        times = stage_times(case, layers, gpus, begin)
        slowest = max(times)
        again = slowest == before and layers in history[:-1]
        if any_moved and (slowest > before or again):
            layers[slow] += 1
            layers[fast] -= 1
            return Chosen(tuple(layers), tuple(layers))
        before, slow, fast = slowest, times.index(slowest), times.index(min(times))
        if slow in (0, stages - 1) and layers[slow] == 2:
            priced = tuple(layers)
            if any_moved:
                layers[slow] += 1
                layers[fast] -= 1
            return Chosen(tuple(layers), priced)
        if layers[slow] == 1:
            return Chosen(tuple(layers), tuple(layers))
        layers[slow] -= 1
        layers[fast] += 1
        any_moved = True
        history.append(layers[:])


def stage_times(case: PricedCase, layers: Sequence[int], gpus: Sequence[int], begin: int) -> list[float]:
    """Seconds; what middle stages receive is counted once, what the outermost do not at all."""
    cuts, totals = np.cumsum([begin, *layers]).tolist(), {gpu: case.totals_ps(gpu) for gpu in set(gpus)}
    times = [int(totals[gpu][b] - totals[gpu][a]) * 1e-12 for gpu, (a, b) in zip(gpus, pairwise(cuts), strict=True)]
    for stage in range(1, len(times) - 1):
        times[stage] += case.send_s(stage - 1)
    return times
