"""Knowledge of a configuration without solving it: some plain plan, and the smallest budget that holds a plan."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Options, Position, Problem, Solution, Start, price
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import StageMemory, no_layers
from shardwright_search.step.pareto import Ints, Numbers, non_dominated, pairs


def plain_plan(problem: Problem) -> PricedSolution | None:
    """Return the best plan of those that cut layers evenly and treat all of a type alike, in one layout of each width.

    For each layout every type takes its fastest option, or its leanest. None: none fits.
    """
    layers, p = len(problem.layers) - 2, problem.pp_size
    ends = (*(1 + max(stage, layers * (stage + 1) // p) for stage in range(p - 1)), len(problem.layers))
    groups = _even_groups(problem)
    budgets = [problem.device_groups[group].budget_bytes for group in groups]
    plans = []
    stages = [stage for stage, (low, high) in enumerate(pairwise((0, *ends))) for _ in range(low, high)]
    for options in _alike(problem, groups):
        chosen = tuple(options[groups[stage]][kind] for stage, kind in zip(stages, problem.layers, strict=True))
        solution = Solution(ends, chosen, groups)
        cost = price(problem, solution)
        if all(used <= budget for used, budget in zip(cost.memory_bytes, budgets, strict=True)):
            plans.append(PricedSolution(float(cost.objective_ps), solution))
    return min(plans, key=lambda plan: plan.objective_ps, default=None)


def _even_groups(problem: Problem) -> tuple[int, ...]:
    """Return device groups that the stages can be on, each the first of those that are nearest to the mean width."""
    position, groups = problem.start_position, []
    for placements in problem.placements:
        group, position = min(placements[position], key=lambda move: abs(problem.relative_widths[move[0]] - 1))
        groups.append(group)
    return tuple(groups)


def _alike(problem: Problem, groups: Sequence[int]) -> Iterator[dict[int, tuple[int, ...]]]:
    """Yield options by device group and type: those of each layout that are fastest, and those that hold least."""
    layouts = {group: problem.layouts_of_width[problem.device_groups[group].width] for group in groups}
    for number in range(max(map(len, layouts.values()))):
        for lean in (False, True):
            yield {
                group: tuple(
                    _simplest(o, kind == problem.layers[0], int(numbers[min(number, len(numbers) - 1)]), lean)
                    for kind, o in enumerate(problem.device_groups[group].options)
                )
                for group, numbers in layouts.items()
            }


def _simplest(options: Options, is_embedding: bool, layout: int, lean: bool) -> int:
    layouts = options.output_layout if is_embedding else options.input_layout
    held = options.state_bytes + options.late_bytes + options.sum_bytes + options.activation_bytes
    order = held if lean else options.time_ps
    rows = [row for row in range(len(layouts)) if layouts[row] == layout] or list(range(len(layouts)))
    return min(rows, key=lambda row: float(order[row]))


class MinMemory(NamedTuple):
    """Memory that the plan that lacks the least needs in its scarcest stage."""

    memory_bytes: int
    stage: int
    group: int
    """The stage's device group."""
    missing_bytes: int
    """Bytes above the stage's budget; negative where it fits."""


class _MemoryState(NamedTuple):
    """The end of the layers so far, the stages' position, the last one's width, and the output layout."""

    end: int
    position: Position
    width: int
    output_layout: int


def min_memory(problem: Problem) -> MinMemory:
    """Return the plan whose scarcest stage lacks the least.

    A run of layers needs the least peak over all options, for each input layout and each output layout;
    cuts and groups that have the smallest largest lack are then found by a dynamic programme.
    """
    costs_of = cache(lambda group, parts: GroupCosts(problem.device_groups[group], parts))
    runs_on = cache(lambda group, parts, start: _RunPeaks(problem, costs_of(group, parts), start))
    best = {_MemoryState(0, problem.start_position, 0, 0): MinMemory(0, 0, 0, -(1 << 62))}
    for stage in range(problem.pp_size):
        following: dict[_MemoryState, MinMemory] = {}
        for at, before in sorted(best.items()):
            previous = problem.layers[at.end - 1] if at.end else -1
            for group, after in problem.placements[stage][at.position]:
                on = problem.device_groups[group]
                start = Start.FIRST if stage == 0 else Start.of_widths(at.width, on.width)
                runs = runs_on(group, problem.phases(stage), start)
                for end in problem.ends(stage, at.end):
                    peaks = runs.peaks(previous, problem.layers[at.end : end])
                    least = peaks.min(0) if start is Start.IN_PLACE else peaks[at.output_layout]
                    for layout in np.flatnonzero(np.isfinite(least)).tolist():
                        peak = int(least[layout])
                        here = max(before, MinMemory(peak, stage, group, peak - on.budget_bytes), key=_missing)
                        where = _MemoryState(end, after, on.width, layout)
                        following[where] = min(following.get(where, here), here, key=_missing)
        best = following
    return min(best.values(), key=_missing)


class _MemoryLabels(NamedTuple):
    """Ways to treat a run: none of the same layouts holds less."""

    memory: StageMemory
    received_layout: Ints
    output_layout: Ints


class _RunPeaks:
    """The runs of a problem's layers on one device group in the phases of a stage."""

    def __init__(self, problem: Problem, costs: GroupCosts, start: Start) -> None:
        self._problem, self._costs, self._start = problem, costs, start

    @cached_method
    def peaks(self, before: int, layers: tuple[int, ...]) -> Numbers:
        """Return the least peak [received layout, output layout] of a run behind a layer; infinity: there is none."""
        for end in range(len(layers)):  # the shorter ones first, lest the recursion go deep
            self._labels(before, layers[:end])
        labels = self._labels(before, layers)
        least = np.full((self._problem.num_layouts, self._problem.num_layouts), np.inf)
        given = 0 if self._is_last(layers) else self._problem.boundary_bytes[layers[-1]][labels.output_layout]
        np.minimum.at(least, (labels.received_layout, labels.output_layout), labels.memory.peak.max(1) + given)
        return least

    @cached_method
    def _labels(self, before: int, layers: tuple[int, ...]) -> _MemoryLabels:
        """Return the labels of a run.

        Redistribution costs time, not memory: whatever the output layout of a run, any layer may follow.
        """
        costs = self._costs
        if not layers:
            width = costs.group.width
            layouts = np.zeros(1, np.int64) if before < 0 else self._problem.layouts_of_width[width]
            received = np.zeros(1) if before < 0 else self._problem.boundary_bytes[before][layouts]
            return _MemoryLabels(no_layers(costs.phases, received), layouts, layouts)
        shorter, kind = self._labels(before, layers[:-1]), layers[-1]
        kept = _leanest(shorter.memory, shorter.received_layout)
        parent, option = pairs(kept, len(costs.options[kind].time_ps))
        if len(layers) == 1 and self._start is Start.IN_PLACE:
            fits = shorter.received_layout[parent] == costs.options[kind].input_layout[option]
            parent, option = parent[fits], option[fits]
        memory = shorter.memory.take(parent).then(costs.memory[kind].take(option))
        received = shorter.received_layout[parent]
        output = np.zeros_like(option) if self._is_last(layers) else costs.options[kind].output_layout[option]
        rows = _leanest(memory, received * self._problem.num_layouts + output)
        return _MemoryLabels(memory.take(rows), received[rows], output[rows])

    def _is_last(self, layers: tuple[int, ...]) -> bool:
        """Return whether a run ends with the head, which gives nothing out."""
        return layers[-1] == self._problem.layers[-1]


def _leanest(memory: StageMemory, key: Ints) -> Ints:
    return non_dominated(np.concatenate(memory, 1), key)


def _missing(plan: MinMemory) -> int:
    return plan.missing_bytes
