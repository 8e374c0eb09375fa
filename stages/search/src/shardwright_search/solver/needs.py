"""The smallest budget that holds a plan."""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.costs import PlaceCosts
from shardwright_search.solver.pareto import non_dominated
from shardwright_search.solver.problem import Problem

__all__ = ["LeastMemory", "least_memory"]


class LeastMemory(NamedTuple):
    """What the plan that lacks the least needs in its scarcest stage."""

    memory_bytes: int
    stage: int
    missing_bytes: int
    """How much that is above the stage's budget; negative where it fits."""


def least_memory(problem: Problem) -> LeastMemory:
    """The plan whose scarcest stage lacks the least; layouts do not matter: they cost time, not memory.

    A run of elements needs the least peak over all options; cuts and places that have the smallest largest lack are
    then found by a dynamic programme.
    """
    nothing = LeastMemory(0, 0, -(1 << 62))
    best: dict[tuple[int, tuple[int, ...]], LeastMemory] = {(0, problem.usages[0][0]): nothing}
    needs: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for stage in range(problem.pp_size):
        following: dict[tuple[int, tuple[int, ...]], LeastMemory] = {}
        for (start, used), before in sorted(best.items()):
            for place, after in problem.placements(stage, used):
                budget = problem.places[place].budget_bytes
                for end in problem.ends(stage, start):
                    key = place, problem.in_flight[stage], problem.elements[start:end]
                    if key not in needs:
                        needs |= _needs(problem, place, problem.in_flight[stage], problem.elements[start:])
                    here = LeastMemory(needs[key], stage, needs[key] - budget)
                    candidate = max(before, here, key=lambda need: need.missing_bytes)
                    known = following.get((end, after))
                    if known is None or candidate.missing_bytes < known.missing_bytes:
                        following[end, after] = candidate
        best = following
    return min(best.values(), key=lambda need: need.missing_bytes)


def _needs(
    problem: Problem, place: int, in_flight: int, elements: tuple[int, ...]
) -> dict[tuple[int, int, tuple[int, ...]], int]:
    """The least peak of every run that begins as `elements` does."""
    costs = PlaceCosts(problem.places[place], in_flight, problem.num_microbatches)
    memory = np.zeros((1, 2 * len(costs.phases)))
    found = {}
    for length, kind in enumerate(elements, 1):
        o, columns = costs.options[kind], []
        for i, of in enumerate(costs.phases):
            held, peak = memory[:, 2 * i : 2 * i + 1], memory[:, 2 * i + 1 : 2 * i + 2]
            moment = held + o.activation_bytes + o.transient_bytes
            columns.append((held + of.static[kind] + o.activation_bytes).ravel())
            columns.append((of.static[kind] + of.late[kind] + np.maximum(peak, moment)).ravel())
        following = np.stack(columns, 1)
        memory = following[non_dominated(following, np.zeros(len(following), np.int64))]
        found[place, in_flight, elements[:length]] = int(memory[:, 1::2].max(1).min())
    return found
