"""The smallest budget that holds a plan."""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.problem import Problem
from shardwright_search.solver.stage_options import GroupCosts

__all__ = ["MinMemory", "min_memory"]


class MinMemory(NamedTuple):
    """What the plan that lacks the least needs in its scarcest stage."""

    memory_bytes: int
    stage: int
    missing_bytes: int
    """How much that is above the stage's budget; negative where it fits."""


def min_memory(problem: Problem) -> MinMemory:
    """The plan whose scarcest stage lacks the least.

    A run of elements needs the least peak over all options, for each layout that comes in and each that it gives out;
    cuts and device groups that have the smallest largest lack are then found by a dynamic programme.
    """
    best: dict[_At, MinMemory] = {_At(0, problem.usages[0][0], 0): MinMemory(0, 0, -(1 << 62))}
    needs: dict[tuple[object, ...], Numbers] = {}
    for stage in range(problem.pp_size):
        following: dict[_At, MinMemory] = {}
        for at, before in sorted(best.items()):
            for group, after in problem.placements(stage, at.used):
                budget = problem.device_groups[group].budget_bytes
                previous = problem.elements[at.end - 1] if at.end else -1
                for end in problem.ends(stage, at.end):
                    key = group, problem.in_flight[stage], previous, problem.elements[at.end : end]
                    if key not in needs:
                        needs |= _needs(problem, group, problem.in_flight[stage], at.end)
                    for output_layout, need in enumerate(needs[key][at.output_layout]):
                        if not np.isfinite(need):
                            continue
                        here = MinMemory(int(need), stage, int(need) - budget)
                        candidate = max(before, here, key=lambda need: need.missing_bytes)
                        known = following.get(where := _At(end, after, output_layout))
                        if known is None or candidate.missing_bytes < known.missing_bytes:
                            following[where] = candidate
        best = following
    return min(best.values(), key=lambda need: need.missing_bytes)


class _At(NamedTuple):
    """The end of the elements so far, how many stages are on each device group, and the layout that is given out."""

    end: int
    used: tuple[int, ...]
    output_layout: int


def _needs(problem: Problem, group: int, in_flight: int, start: int) -> dict[tuple[object, ...], Numbers]:
    """The least peak [comes, gives] of every run that begins at an element; infinity where there is none."""
    costs, elements = (
        GroupCosts(problem.device_groups[group], in_flight, problem.num_microbatches),
        problem.elements[start:],
    )
    previous = problem.elements[start - 1] if start else -1
    layouts = problem.num_layouts if start else 1
    received_layout, memory = np.arange(layouts), np.zeros((layouts, 2 * len(costs.phases)))
    if start:
        for i, of in enumerate(costs.phases):
            memory[:, 2 * i] = (of.in_flight + 1) * problem.boundary_bytes[previous]
    found: dict[tuple[object, ...], Numbers] = {}
    for length, kind in enumerate(elements, 1):
        o, columns = costs.options[kind], []
        for i, of in enumerate(costs.phases):
            resident, peak = memory[:, 2 * i : 2 * i + 1], memory[:, 2 * i + 1 : 2 * i + 2]
            workspace = resident + o.activation_bytes + o.workspace_bytes
            columns.append((resident + of.static[kind] + o.activation_bytes).ravel())
            columns.append((of.static[kind] + of.late[kind] + np.maximum(peak, workspace)).ravel())
        last = start + length == len(problem.elements)
        output_layout = (
            np.zeros(len(received_layout) * len(o.output_layout), np.int64)
            if last
            else np.tile(o.output_layout, len(received_layout))
        )
        following, received_layout = np.stack(columns, 1), np.repeat(received_layout, len(o.output_layout))
        kept = non_dominated(following, received_layout * problem.num_layouts + output_layout)
        memory, received_layout, output_layout = following[kept], received_layout[kept], output_layout[kept]
        least = np.full((layouts, problem.num_layouts), np.inf)
        given = 0 if last else problem.boundary_bytes[kind][output_layout]
        np.minimum.at(least, (received_layout, output_layout), memory[:, 1::2].max(1) + given)
        found[group, in_flight, previous, elements[:length]] = least
        memory, received_layout = _over_layouts(memory, received_layout)
    return found


def _over_layouts(memory: Numbers, received_layout: Ints) -> tuple[Numbers, Ints]:
    """The labels that matter while a run goes on: redistribution costs time, not memory."""
    kept = non_dominated(memory, received_layout)
    return memory[kept], received_layout[kept]
