"""A plain plan, and the smallest memory budget of a configuration, without solving it."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Options, PlanCost, Position, Problem, Solution, Start, price
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import StageMemory, no_layers
from shardwright_search.step.pareto import Ints, Numbers, non_dominated, pairs

_NEVER_FITS = 2**52
"""Bytes: more than any plan needs."""
_ROUNDING = 1e-12
"""A share that exceeds the relative error of floating-point sums of bytes."""


def plain_plan(problem: Problem) -> PricedSolution | None:
    """Return the best plan with evenly cut layers and one strategy for each type, in one layout for each width.

    For each layout every type takes its fastest option, or the one with the least memory. None: no such plan fits.
    """
    plans = [
        PricedSolution(float(cost.objective_ps), s)
        for s, cost in _even(problem)
        if _missing_bytes(problem, s, cost) <= 0
    ]
    return min(plans, key=lambda plan: plan.objective_ps, default=None)


def _even(problem: Problem) -> Iterator[tuple[Solution, PlanCost]]:
    """Yield plans with evenly cut layers and one strategy for each type."""
    layers, p = len(problem.layers) - 2, problem.pp_size
    ends = (*(1 + max(stage, layers * (stage + 1) // p) for stage in range(p - 1)), len(problem.layers))
    groups = _even_groups(problem)
    stages = [stage for stage, (low, high) in enumerate(pairwise((0, *ends))) for _ in range(low, high)]
    for options in _alike(problem, groups):
        chosen = tuple(options[groups[stage]][kind] for stage, kind in zip(stages, problem.layers, strict=True))
        solution = Solution(ends, chosen, groups)
        yield solution, price(problem, solution)


def _missing_bytes(problem: Problem, solution: Solution, cost: PlanCost) -> int:
    """Return the largest excess over a stage's budget, or `_NEVER_FITS` for host memory; 0 or less if the plan fits."""
    groups = [problem.device_groups[group] for group in solution.device_groups]
    if any(used > group.host_budget_bytes for used, group in zip(cost.host_bytes, groups, strict=True)):
        return int(_NEVER_FITS)
    return max(int(used - group.budget_bytes) for used, group in zip(cost.memory_bytes, groups, strict=True))


def _even_groups(problem: Problem) -> tuple[int, ...]:
    """Return a device group for each stage in turn: the first possible one whose width is nearest to the mean."""
    position, groups = problem.start_position, []
    for placements in problem.placements:
        group, position = min(placements[position], key=lambda move: abs(problem.relative_widths[move[0]] - 1))
        groups.append(group)
    return tuple(groups)


def _alike(problem: Problem, groups: Sequence[int]) -> Iterator[dict[int, tuple[int, ...]]]:
    """Yield options by device group and type: for each layout the fastest ones, and those with the least memory."""
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
    # One layout throughout needs no redistribution; a type that has no option with it takes any.
    rows = [row for row in range(len(layouts)) if layouts[row] == layout] or list(range(len(layouts)))
    return min(rows, key=lambda row: float(order[row]))


class MinMemory(NamedTuple):
    """The memory of the plan with the smallest excess, in its tightest stage."""

    memory_bytes: int
    stage: int
    group: int
    """The stage's device group."""
    missing_bytes: int
    """Bytes by which the stage exceeds its budget; negative if it fits."""


def least_missing_bytes(problem: Problem) -> float:
    """Return a lower bound on the tightest stage's excess, found without dynamic programming."""
    most = max(group.budget_bytes for group in problem.device_groups)
    return float(_least_behind(problem)[0, 0]) - most


def _least_behind(problem: Problem) -> Numbers:
    """Return a lower bound of the fullest rank's memory [first stage, first layer] for the remaining layers.

    Let c be the least of a layer's memory on a rank of a stage, and w > 0 a number for each stage. If no stage holds
    more than B, the sum of w B over the stages is no less than the sum of the least w c over the layers. Activations of
    the microbatch on its way and gradients need not be held at once: the bound is computed with either, and the larger
    one counts.
    """
    layers, least = np.array(problem.layers), np.zeros((problem.pp_size, len(problem.layers)))
    for made in (False, True):
        costs = _least_costs(problem, made)
        usual = costs[:, int(np.bincount(layers).argmax())]
        # Any weights are valid. The inverse of the usual layer's bytes is near the best: most layers have one type.
        weights = 1 / usual if usual.min() > 0 else np.ones(len(usual))
        weighted = np.minimum.accumulate((weights[:, None] * costs)[::-1])[::-1, layers]
        behind = np.cumsum(weighted[:, ::-1], 1)[:, ::-1] / np.cumsum(weights[::-1])[::-1, None]
        least = np.maximum(least, behind)
    return least * (1 - _ROUNDING)


def _least_costs(problem: Problem, made: bool) -> Numbers:
    """Return the least memory [stages, types] of a layer; with unequal widths, times the stage's relative width.

    `made`: with gradients, instead of the activations of the microbatch on its way.
    """
    others = np.array(problem.in_flight)[:, None] - 1
    if len(set(problem.relative_widths)) > 1:
        others = np.full_like(others, others.min())
    least = np.full((problem.pp_size, len(problem.device_groups[0].options)), np.inf)
    for group, width in zip(problem.device_groups, problem.relative_widths, strict=True):
        for kind, o in enumerate(group.options):
            once = o.state_bytes + (o.late_bytes if made else o.activation_bytes)
            least[:, kind] = np.minimum(least[:, kind], (width * (once + others * o.activation_bytes)).min(1))
    return least


class _MemoryState(NamedTuple):
    """The end of the layers so far, the position after their stages, the last stage's width, and the output layout."""

    end: int
    position: Position
    width: int
    output_layout: int


def min_memory(problem: Problem, most_missing_bytes: float = inf) -> MinMemory | None:
    """Return the plan that exceeds its budget by the least, at its tightest stage.

    None if every plan exceeds it by more than `most_missing_bytes`. Plans with a larger excess than the best evenly cut
    plan are skipped.
    """
    # A known plan narrows the search to plans with a smaller excess.
    even = min((_missing_bytes(problem, *plan) for plan in _even(problem)), default=inf)
    plan = _lacking(problem, min(even, most_missing_bytes))
    # If widths differ, the even plan may be one whose stages cannot send to each other in its layouts.
    return _lacking(problem, most_missing_bytes) if plan is None and even < most_missing_bytes else plan


def _lacking(problem: Problem, most_missing_bytes: float) -> MinMemory | None:
    """Return the plan with the smallest excess among those within a limit.

    For each run of layers, the least peak over all options is found for each input layout and each output layout; a
    dynamic programme then finds the cuts and groups with the smallest excess.
    """
    costs_of = cache(lambda group, parts: GroupCosts(problem.device_groups[group], parts))
    runs_on = cache(lambda group, parts, start: _RunPeaks(problem, costs_of(group, parts), start))
    best = {_MemoryState(0, problem.start_position, 0, 0): MinMemory(0, 0, 0, -(1 << 62))}
    first_ends = _first_ends(problem, most_missing_bytes)
    for stage in range(problem.pp_size):
        following: dict[_MemoryState, MinMemory] = {}
        for at, before in sorted(best.items()):
            for group, after in problem.placements[stage][at.position]:
                on = problem.device_groups[group]
                start = Start.FIRST if stage == 0 else Start.of_widths(at.width, on.width)
                runs = runs_on(group, problem.phases(stage), start)
                most = most_missing_bytes + on.budget_bytes
                ends = [end for end in problem.ends(stage, at.end) if end >= first_ends[stage]]
                for end, least in runs.behind(at, ends, most):
                    for layout in np.flatnonzero(np.isfinite(least) & (least <= most)).tolist():
                        peak = int(least[layout])
                        here = max(before, MinMemory(peak, stage, group, peak - on.budget_bytes), key=_missing)
                        where = _MemoryState(end, after, on.width, layout)
                        following[where] = min(following.get(where, here), here, key=_missing)
        best = following
    # Of plans with equal excess the first state's plan is the answer, whatever was skipped.
    return min((best[state] for state in sorted(best)), key=_missing, default=None)


def _first_ends(problem: Problem, most_missing_bytes: float) -> list[int]:
    """Return the earliest end of each stage for which the stages after it may exceed their budgets within a limit."""
    if len(set(problem.relative_widths)) > 1:
        return [0] * problem.pp_size
    most = most_missing_bytes + max(group.budget_bytes for group in problem.device_groups)
    too_much = (_least_behind(problem)[1:] > most).sum(1)
    return [*too_much.tolist(), len(problem.layers)]


class _MemoryLabels(NamedTuple):
    """Ways to choose options for a run, one entry for each: no way with the same layouts holds less."""

    memory: StageMemory
    host_bytes: Numbers
    received_layout: Ints
    output_layout: Ints


class _RunPeaks:
    """The runs of a problem's layers on one device group in the phases of a stage."""

    def __init__(self, problem: Problem, costs: GroupCosts, start: Start) -> None:
        self._problem, self._costs, self._start = problem, costs, start

    def behind(self, at: _MemoryState, ends: Sequence[int], most: float) -> Iterator[tuple[int, Numbers]]:
        """Yield each end of a run after a state with its least peaks [output layout], until they exceed `most`."""
        layers = self._problem.layers
        previous = layers[at.end - 1] if at.end else -1
        for end in ends:
            run = layers[at.end : end]
            if self._least(previous, run) > most:  # a longer run exceeds it, too
                return
            peaks = self.peaks(previous, run)
            yield end, peaks.min(0) if self._start is Start.IN_PLACE else peaks[at.output_layout]

    @cached_method
    def _least(self, before: int, layers: tuple[int, ...]) -> float:
        """Return the least peak of a run, without its output."""
        for end in range(len(layers)):  # the shorter ones first, lest the recursion go deep
            self._labels(before, layers[:end])
        return float(self._labels(before, layers).memory.peak.max(1).min(initial=np.inf))

    @cached_method
    def peaks(self, before: int, layers: tuple[int, ...]) -> Numbers:
        """Return the least peak [received layout, output layout] of a run after a layer; infinity: there is none."""
        labels = self._labels(before, layers)
        least = np.full((self._problem.num_layouts, self._problem.num_layouts), np.inf)
        given = 0 if self._is_last(layers) else self._problem.boundary_bytes[layers[-1]][labels.output_layout]
        np.minimum.at(least, (labels.received_layout, labels.output_layout), labels.memory.peak.max(1) + given)
        return least

    @cached_method
    def _labels(self, before: int, layers: tuple[int, ...]) -> _MemoryLabels:
        """Return the labels of a run, by memory only.

        Redistribution costs time, not memory: whatever the output layout of a run, any layer may follow.
        """
        costs = self._costs
        if not layers:
            width = costs.group.width
            layouts = np.zeros(1, np.int64) if before < 0 else self._problem.layouts_of_width[width]
            received = np.zeros(1) if before < 0 else self._problem.boundary_bytes[before][layouts]
            return _MemoryLabels(no_layers(costs.phases, received), np.zeros(len(layouts)), layouts, layouts)
        # Runs share their beginnings, which are cached.
        shorter, kind = self._labels(before, layers[:-1]), layers[-1]
        kept = _leanest(shorter.memory, shorter.host_bytes, shorter.received_layout)
        parent, option = pairs(kept, len(costs.options[kind].time_ps))
        if len(layers) == 1 and self._start is Start.IN_PLACE:
            fits = shorter.received_layout[parent] == costs.options[kind].input_layout[option]
            parent, option = parent[fits], option[fits]
        host = shorter.host_bytes[parent] + costs.options[kind].host_bytes[option]
        enough = host <= costs.group.host_budget_bytes
        parent, option, host = parent[enough], option[enough], host[enough]
        memory = shorter.memory.take(parent).then(costs.memory[kind].take(option))
        received = shorter.received_layout[parent]
        output = np.zeros_like(option) if self._is_last(layers) else costs.options[kind].output_layout[option]
        rows = _leanest(memory, host, received * self._problem.num_layouts + output)
        return _MemoryLabels(memory.take(rows), host[rows], received[rows], output[rows])

    def _is_last(self, layers: tuple[int, ...]) -> bool:
        """Return whether a run ends with the head, which has no output."""
        return layers[-1] == self._problem.layers[-1]


def _leanest(memory: StageMemory, host: Numbers, key: Ints) -> Ints:
    return non_dominated(np.column_stack([*memory, *[host] * bool(host.any())]), key)


def _missing(plan: MinMemory) -> int:
    return plan.missing_bytes
