"""The best plan of one case, or how much memory is missing."""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.partition import best_partition
from shardwright_search.solver.problem import Options, Problem, Solution

__all__ = ["LeastMemory", "least_memory", "solve"]

_FIRST_LABELS = 48


class LeastMemory(NamedTuple):
    """The smallest budget that holds a plan of the case, and the pipeline stage that needs it."""

    memory_bytes: int
    stage: int


def solve(problem: Problem) -> Solution | None:
    """A plan with the least T within the budget, or None when there is none.

    A quick inexact pass yields some plan first: its T is a cut that spares the exact pass most labels.
    """
    first = best_partition(problem, None, _FIRST_LABELS)
    if first.exact:
        return first.solution
    cut_ps = None if first.solution is None else first.solution.objective_ps
    return best_partition(problem, cut_ps, None).solution


def least_memory(problem: Problem) -> LeastMemory:
    """The smallest budget, without the process's own memory, with which the case has a plan.

    A run of elements as a stage needs the least over caps on the transient of the cap and the sum of each element's
    least memory among options with no larger transient; the cut that has the smallest fullest stage is then found by
    a dynamic programme. Layouts do not matter: they cost time, not memory.
    """
    total = len(problem.elements)
    best: dict[int, LeastMemory] = {0: LeastMemory(0, 0)}
    for stage in range(problem.pp_size):
        following: dict[int, LeastMemory] = {}
        needs: dict[tuple[int, ...], int] = {}
        for start, before in sorted(best.items()):
            for end in problem.ends(stage, start):
                run = tuple(sorted(problem.elements[start:end]))
                if run not in needs:
                    needs[run] = _least_of_run(problem, stage, run)
                here = LeastMemory(needs[run], stage)
                candidate = max(before, here, key=lambda need: need.memory_bytes)
                if end not in following or candidate.memory_bytes < following[end].memory_bytes:
                    following[end] = candidate
        best = following
    return best[total]


def _least_of_run(problem: Problem, stage: int, run: tuple[int, ...]) -> int:
    in_flight = problem.in_flight[stage]
    counted = [(problem.tables[stage].options[kind], run.count(kind)) for kind in set(run)]
    caps = {int(cap) for options, _ in counted for cap in options.transient_bytes}
    return min(
        cap + sum(count * _least_held(options, in_flight, cap) for options, count in counted)
        for cap in caps
        if all((options.transient_bytes <= cap).any() for options, _ in counted)
    )


def _least_held(options: Options, in_flight: int, cap: int) -> int:
    held = options.state_bytes + in_flight * options.activation_bytes
    return int(np.min(held[options.transient_bytes <= cap]))
