"""Cutting the chain of elements into pipeline stages, given the labels of every run of elements.

A label is one way to treat the elements before a cut: S, the sum of the stages' A', their largest A', U and O (X, V,
W), and the layout it gives out. Whatever follows adds the same to S and takes the same maxima, so that a label with
another's layout never loses to it if (S' - S) >= (m - 1)(X - X')+ + (V - V')+ + (W - W')+: that is, if S plus each
selection of (m - 1) X, V and W is no larger. Labels are also dropped when the bounds of what is still to come show
that no plan through them matches the known one.
"""

from itertools import product
from typing import NamedTuple

import numpy as np

from shardwright_search.closed_form import step_time
from shardwright_search.solver.bounds import floors
from shardwright_search.solver.chains import Chains, Labels
from shardwright_search.solver.pareto import Ints, non_dominated
from shardwright_search.solver.problem import Problem, Solution

__all__ = ["Answer", "best_partition"]

_NEVER = np.int64(1 << 60)


class Answer(NamedTuple):
    """A plan or none, and whether that is exact: the best there is, or a proof that there is none."""

    solution: Solution | None
    exact: bool


class _Front(NamedTuple):
    """The labels of one run as a pipeline stage, and their numbers among all labels of the run."""

    labels: Labels
    number: Ints


class _Prefix(NamedTuple):
    """Labels of all elements before a cut, one entry per label in each column."""

    total_ps: Ints
    slowest_ps: Ints
    gradient_sync_ps: Ints
    optimizer_ps: Ints
    layout: Ints
    start: Ints
    """Where the last stage started."""
    parent: Ints
    """The label before that stage."""
    chosen: Ints
    """The label of the last stage in its front."""

    def take(self, rows: Ints) -> "_Prefix":
        return _Prefix(*(column[rows] for column in self))


Fronts = list[dict[tuple[int, int], _Front]]


def best_partition(problem: Problem, cut_ps: int | None, most_labels: int | None) -> Answer:
    """A plan with the least T, or None if none fits the budget (and has a T no larger than `cut_ps`).

    With `most_labels` the plan found need not be the best; the answer says whether labels were left out for it.
    """
    known = floors(problem)
    chains = [Chains(problem, stage, known, cut_ps, most_labels) for stage in range(problem.pp_size)]
    fronts = [_fronts(problem, stage, chains[stage]) for stage in range(problem.pp_size)]
    exact = not any(chain.left_out for chain in chains)
    later = _bounds(problem, fronts)
    if later[0, 0, 0] >= _NEVER:
        return Answer(None, exact)
    none = np.zeros(1, np.int64)
    levels: list[dict[int, _Prefix]] = [{0: _Prefix(none, none, none, none, none, none, none, none)}]
    for stage in range(problem.pp_size):
        level = _next_level(problem, stage, levels[-1], fronts[stage], later[stage + 1], cut_ps)
        if most_labels is not None and any(len(prefix.layout) > most_labels for prefix in level.values()):
            exact = False
            level = {end: _some(problem, prefix, most_labels) for end, prefix in level.items()}
        levels.append(level)
    last = levels[-1].get(len(problem.elements))
    if last is None:
        return Answer(None, exact)
    return Answer(_decoded(problem, chains, fronts, levels, int(_objective(problem, last).argmin())), exact)


def _fronts(problem: Problem, stage: int, chains: Chains) -> dict[tuple[int, int], _Front]:
    """By (start, end), the labels worth being a whole stage; memory no longer matters there."""
    found: dict[tuple[int, int], _Front] = {}
    known: dict[tuple[int, ...], _Front] = {}
    for start in (0,) if stage == 0 else range(1 + stage, len(problem.elements) - 1):
        for end in problem.ends(stage, start):
            run = problem.elements[start:end]
            if run not in known:
                labels = chains.labels(start, end)
                number = non_dominated(labels.objectives_ps @ problem.weights.T, labels.key)
                known[run] = _Front(labels.take(number), number)
            if len(known[run].number):
                found[start, end] = known[run]
    return found


def _bounds(problem: Problem, fronts: Fronts) -> Ints:
    """[stages + 1, elements + 1, 4]: the least possible S, X, V and W of the stages from one on, from an element on."""
    bounds = np.full((problem.pp_size + 1, len(problem.elements) + 1, 4), _NEVER)
    bounds[problem.pp_size, len(problem.elements)] = 0
    for stage in range(problem.pp_size - 1, -1, -1):
        for (start, end), front in fronts[stage].items():
            rest = bounds[stage + 1, end]
            if rest[0] >= _NEVER:
                continue
            time, sync, optimizer = front.labels.objectives_ps.min(0)
            best = np.array([time + rest[0], max(time, rest[1]), max(sync, rest[2]), max(optimizer, rest[3])])
            bounds[stage, start] = np.minimum(bounds[stage, start], best)
    return bounds


def _objective(problem: Problem, prefix: _Prefix) -> Ints:
    """T of each label if no stage followed."""
    return step_time(
        prefix.total_ps, prefix.slowest_ps, prefix.gradient_sync_ps, prefix.optimizer_ps, problem.num_microbatches
    )


def _next_level(
    problem: Problem,
    stage: int,
    before: dict[int, _Prefix],
    fronts: dict[tuple[int, int], _Front],
    later: Ints,
    cut_ps: int | None,
) -> dict[int, _Prefix]:
    """Append one pipeline stage to every label in every way."""
    found: dict[int, list[_Prefix]] = {}
    for (start, end), front in fronts.items():
        if start not in before or later[end, 0] >= _NEVER:
            continue
        appended = _appended(problem, stage, before[start], start, end, front)
        if cut_ps is not None:
            bound = step_time(
                appended.total_ps + later[end, 0],
                np.maximum(appended.slowest_ps, later[end, 1]),
                np.maximum(appended.gradient_sync_ps, later[end, 2]),
                np.maximum(appended.optimizer_ps, later[end, 3]),
                problem.num_microbatches,
            )
            appended = appended.take(np.flatnonzero(bound <= cut_ps))
        found.setdefault(end, []).append(_filtered(problem, appended))
    level = {}
    for end, parts in found.items():
        joined = _Prefix(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        level[end] = _filtered(problem, joined)
    return {end: prefix for end, prefix in level.items() if len(prefix.total_ps)}


def _appended(problem: Problem, stage: int, before: _Prefix, start: int, end: int, front: _Front) -> _Prefix:
    """Every label before the cut with every label of the stage after it, as one stage more."""
    parent = np.repeat(np.arange(len(before.layout)), len(front.number))
    chosen = np.tile(np.arange(len(front.number)), len(before.layout))
    labels = front.labels.take(chosen)
    time = labels.time_ps
    if stage > 0:
        previous_type, layout = problem.elements[start - 1], before.layout[parent]
        time = time + problem.tables[stage].redistribution_ps[previous_type][layout, labels.layout_in]
        time = time + problem.sends_ps[stage - 1, previous_type][layout]
    if stage < problem.pp_size - 1:
        time = time + problem.sends_ps[stage, problem.elements[end - 1]][labels.layout_out]
    return _Prefix(
        before.total_ps[parent] + time,
        np.maximum(before.slowest_ps[parent], time),
        np.maximum(before.gradient_sync_ps[parent], labels.gradient_sync_ps),
        np.maximum(before.optimizer_ps[parent], labels.optimizer_ps),
        labels.layout_out,
        np.full(len(parent), start),
        parent,
        chosen,
    )


def _filtered(problem: Problem, prefix: _Prefix) -> _Prefix:
    maxima = ((problem.num_microbatches - 1) * prefix.slowest_ps, prefix.gradient_sync_ps, prefix.optimizer_ps)
    columns = [
        prefix.total_ps + sum((column for column, taken in zip(maxima, chosen, strict=True) if taken), start=0)
        for chosen in product((False, True), repeat=3)
    ]
    return prefix.take(non_dominated(np.stack(columns, 1), prefix.layout))


def _some(problem: Problem, prefix: _Prefix, most: int) -> _Prefix:
    order = np.argsort(_objective(problem, prefix), kind="stable")
    return prefix.take(order[:most])


def _decoded(
    problem: Problem, chains: list[Chains], fronts: Fronts, levels: list[dict[int, _Prefix]], label: int
) -> Solution:
    """The plan behind a label of the last level, each stage with the least memory that keeps T."""
    final = levels[-1][len(problem.elements)]
    objective = int(_objective(problem, final)[label])
    caps = int(final.gradient_sync_ps[label]), int(final.optimizer_ps[label])
    ends: list[int] = []
    options: list[int] = []
    end, most_memory = len(problem.elements), 0
    for stage in range(problem.pp_size - 1, -1, -1):
        prefix = levels[stage + 1][end]
        start, front_label = int(prefix.start[label]), int(prefix.chosen[label])
        all_labels = chains[stage].labels(start, end)
        number = _leanest(all_labels, int(fronts[stage][start, end].number[front_label]), caps)
        ends.insert(0, end)
        options[:0] = chains[stage].options_of(start, end, number)
        most_memory = max(most_memory, int(all_labels.memory_bytes[number] + all_labels.transient_bytes[number]))
        end, label = start, int(prefix.parent[label])
    return Solution(objective, tuple(ends), tuple(options), most_memory)


def _leanest(labels: Labels, number: int, caps: tuple[int, int]) -> int:
    """Among labels with the same layouts and time as one, and U and O within the plan's largest: the least memory."""
    alike = np.flatnonzero(
        (labels.key == labels.key[number])
        & (labels.time_ps <= labels.time_ps[number])
        & (labels.gradient_sync_ps <= caps[0])
        & (labels.optimizer_ps <= caps[1])
    )
    memory = labels.memory_bytes[alike] + labels.transient_bytes[alike]
    return int(alike[memory.argmin()])
