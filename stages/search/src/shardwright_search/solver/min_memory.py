"""The smallest budget that holds a plan."""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.problem import Problem
from shardwright_search.solver.stage_options import PlaceCosts

__all__ = ["LeastMemory", "least_memory"]


class LeastMemory(NamedTuple):
    """What the plan that lacks the least needs in its scarcest stage."""

    memory_bytes: int
    stage: int
    missing_bytes: int
    """How much that is above the stage's budget; negative where it fits."""


def least_memory(problem: Problem) -> LeastMemory:
    """The plan whose scarcest stage lacks the least.

    A run of elements needs the least peak over all options, for each layout that comes in and each that it gives out;
    cuts and places that have the smallest largest lack are then found by a dynamic programme.
    """
    best: dict[_At, LeastMemory] = {_At(0, problem.usages[0][0], 0): LeastMemory(0, 0, -(1 << 62))}
    needs: dict[tuple[object, ...], Numbers] = {}
    for stage in range(problem.pp_size):
        following: dict[_At, LeastMemory] = {}
        for at, before in sorted(best.items()):
            for place, after in problem.placements(stage, at.used):
                budget = problem.places[place].budget_bytes
                previous = problem.elements[at.end - 1] if at.end else -1
                for end in problem.ends(stage, at.end):
                    key = place, problem.in_flight[stage], previous, problem.elements[at.end : end]
                    if key not in needs:
                        needs |= _needs(problem, place, problem.in_flight[stage], at.end)
                    for gives, need in enumerate(needs[key][at.gives]):
                        if not np.isfinite(need):
                            continue
                        here = LeastMemory(int(need), stage, int(need) - budget)
                        candidate = max(before, here, key=lambda need: need.missing_bytes)
                        known = following.get(where := _At(end, after, gives))
                        if known is None or candidate.missing_bytes < known.missing_bytes:
                            following[where] = candidate
        best = following
    return min(best.values(), key=lambda need: need.missing_bytes)


class _At(NamedTuple):
    """The end of the elements so far, how many stages are on each place, and the layout that is given out."""

    end: int
    used: tuple[int, ...]
    gives: int


def _needs(problem: Problem, place: int, in_flight: int, start: int) -> dict[tuple[object, ...], Numbers]:
    """The least peak [comes, gives] of every run that begins at an element; infinity where there is none."""
    costs, elements = PlaceCosts(problem.places[place], in_flight, problem.num_microbatches), problem.elements[start:]
    previous = problem.elements[start - 1] if start else -1
    layouts = problem.num_layouts if start else 1
    comes, memory = np.arange(layouts), np.zeros((layouts, 2 * len(costs.phases)))
    if start:
        for i, of in enumerate(costs.phases):
            memory[:, 2 * i] = (of.in_flight + 1) * problem.boundary_bytes[previous]
    found: dict[tuple[object, ...], Numbers] = {}
    for length, kind in enumerate(elements, 1):
        o, columns = costs.options[kind], []
        for i, of in enumerate(costs.phases):
            held, peak = memory[:, 2 * i : 2 * i + 1], memory[:, 2 * i + 1 : 2 * i + 2]
            moment = held + o.activation_bytes + o.workspace_bytes
            columns.append((held + of.static[kind] + o.activation_bytes).ravel())
            columns.append((of.static[kind] + of.late[kind] + np.maximum(peak, moment)).ravel())
        last = start + length == len(problem.elements)
        gives = np.zeros(len(comes) * len(o.gives), np.int64) if last else np.tile(o.gives, len(comes))
        following, comes = np.stack(columns, 1), np.repeat(comes, len(o.gives))
        kept = non_dominated(following, comes * problem.num_layouts + gives)
        memory, comes, gives = following[kept], comes[kept], gives[kept]
        least = np.full((layouts, problem.num_layouts), np.inf)
        given = 0 if last else problem.boundary_bytes[kind][gives]
        np.minimum.at(least, (comes, gives), memory[:, 1::2].max(1) + given)
        found[place, in_flight, previous, elements[:length]] = least
        memory, comes = _over_layouts(memory, comes)
    return found


def _over_layouts(memory: Numbers, comes: Ints) -> tuple[Numbers, Ints]:
    """The labels that matter while a run goes on: redistribution costs time, not memory."""
    kept = non_dominated(memory, comes)
    return memory[kept], comes[kept]
