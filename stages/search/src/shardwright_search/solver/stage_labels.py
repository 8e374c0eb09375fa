"""All ways worth keeping to give options to the elements of one pipeline stage.

A label is one way to treat a run of elements: its time A, end U, memory, the layout it comes in (that of what the stage
before gives out) and the one it gives out. A label is dropped only if it exceeds the budget, if bounds show that no
plan through it stays below the window, or if another label of the same run and the same two layouts is no worse in A, U
and both numbers of memory: whatever follows adds the same to both, or takes the same maxima. Memory that can no longer
bind is set to the largest amount that cannot. While a stage goes on, a label may also be replaced by one with another
layout that is no worse after paying for the redistribution; at the end of a stage it may not, for that would move the
payment into another stage, past the maximum.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.configuration_bounds import StageKind, Target
from shardwright_search.solver.layer_ranges import Run, runs_of
from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.problem import Problem
from shardwright_search.solver.stage_options import GroupCosts, Weights, weightings

__all__ = ["Labels", "stage_labels"]

_FEW = 8


class Labels(NamedTuple):
    """Labels of one run, one entry per label in each column; those of the run without its last element behind them."""

    time_ps: Numbers
    exposed_ps: Numbers
    memory: Numbers
    """[labels, 2 x phases]: held and peak of each phase, in bytes."""
    received_layout: Ints
    output_layout: Ints
    parent: Ints
    option: Ints
    """The option of the last element, as the problem counts them."""
    behind: "Labels | None"

    def take(self, rows: Ints) -> "Labels":
        """Some of the labels."""
        return Labels._make((*(column[rows] for column in self[:-1]), self.behind))

    def options_of(self, label: int) -> tuple[int, ...]:
        """The option of each element under a label."""
        found: list[int] = []
        labels: Labels | None = self
        while labels is not None and labels.behind is not None:
            found.append(int(labels.option[label]))
            label, labels = int(labels.parent[label]), labels.behind
        return tuple(reversed(found))


class _Step(NamedTuple):
    """What is the same for all labels of a stage kind."""

    problem: Problem
    costs: GroupCosts
    weights: tuple[Weights, ...]
    first: bool
    num_layouts: int
    max_static: Numbers
    """By type: the most that an element adds to held or peak of any phase."""
    max_workspace: float
    max_sent: float
    """The most that a stage holds of what it gives out."""


def stage_labels(
    problem: Problem, kind: StageKind, costs: GroupCosts, targets: Sequence[Target], tick: Callable[[int], None]
) -> dict[int, Labels]:
    """By run, the labels of every target worth being a whole stage, where memory no longer matters.

    `tick` is called between steps and may raise to stop.
    """
    workspaces = [o.activation_bytes + o.workspace_bytes for o in costs.options]
    static = [
        max((of.static[kind] + np.maximum(o.activation_bytes, of.late[kind])).max() for of in costs.phases)
        for kind, o in enumerate(costs.options)
    ]
    step = _Step(
        problem,
        costs,
        weightings(problem),
        kind.first,
        max(int(max(o.output_layout.max(), o.input_layout.max())) for o in costs.options) + 1,
        np.array(static),
        float(max(m.max() for m in workspaces)),
        float(problem.boundary_bytes.max()) if problem.pp_size > 1 else 0.0,
    )
    found: dict[int, Labels] = {}
    runs = runs_of(problem.elements).runs
    ordered = sorted(targets, key=lambda target: runs[target.run])
    for _, group in groupby(ordered, key=lambda target: runs[target.run].before):
        members = list(group)
        before = runs[members[0].run].before
        _extend(step, _start(step, before), 0, members, found, tick)
    return found


def _start(step: _Step, before: int) -> Labels:
    """One label for each layout that the stage before, which ends in an element of type `before`, can give out."""
    count = 1 if step.first else step.problem.num_layouts
    none, layouts = np.zeros(count), np.arange(count)
    memory = np.zeros((count, 2 * len(step.costs.phases)))
    if not step.first:
        for i, of in enumerate(step.costs.phases):
            memory[:, 2 * i] = (of.in_flight + 1) * step.problem.boundary_bytes[before]
    return Labels(none, none, memory, layouts, layouts, layouts, layouts, None)


def _extend(
    step: _Step,
    labels: Labels,
    depth: int,
    targets: list[Target],
    found: dict[int, Labels],
    tick: Callable[[int], None],
) -> None:
    """Follow the tree of all target runs from the labels of their common beginning."""
    tick(len(labels.output_layout))
    runs = runs_of(step.problem.elements).runs
    for target in targets:
        if len(runs[target.run].elements) == depth:
            found[target.run] = _front(step, labels, target)
    onward = [target for target in targets if len(runs[target.run].elements) > depth]
    if not onward:
        return
    before = runs[onward[0].run].elements[depth - 1] if depth else runs[onward[0].run].before
    rows = _worth_extending(step, labels, before) if depth else np.arange(len(labels.output_layout))
    for kind, same in groupby(onward, key=lambda target: runs[target.run].elements[depth]):
        group = list(same)
        following = _following(step, labels, rows, before, kind, [(t, runs[t.run]) for t in group], depth)
        if len(following.output_layout):
            _extend(step, following, depth + 1, group, found, tick)


def _front(step: _Step, labels: Labels, target: Target) -> Labels:
    below = np.ones(len(labels.output_layout), bool)
    for (time, end), cap in zip(step.weights, target.caps, strict=True):
        below &= time * labels.time_ps + end * labels.exposed_ps < cap
    end = runs_of(step.problem.elements).runs[target.run].elements[-1]
    if end != step.problem.elements[-1]:
        given = step.problem.boundary_bytes[end][labels.output_layout]
        below &= labels.memory[:, 1::2].max(1) + given <= step.costs.group.budget_bytes
    kept = labels.take(np.flatnonzero(below))
    key = kept.received_layout * step.num_layouts + kept.output_layout
    columns = step.problem.objectives(kept.time_ps, kept.exposed_ps)
    return kept.take(np.sort(non_dominated(np.stack(columns, 1), key)))


def _following(
    step: _Step, labels: Labels, rows: Ints, before: int, kind: int, targets: list[tuple[Target, Run]], depth: int
) -> Labels:
    """Every label with every option of the next element, as far as some target can still be reached."""
    options = step.costs.options[kind]
    parent = np.repeat(rows, len(options.input_layout))
    option = np.tile(np.arange(len(options.input_layout)), len(rows))
    time = labels.time_ps[parent] + options.time_ps[option]
    if before >= 0:
        time = (
            time
            + step.costs.group.redistribution_ps[before][labels.output_layout[parent], options.input_layout[option]]
        )
    following = Labels(
        time,
        labels.exposed_ps[parent] + options.exposed_ps[option],
        _memory(step, labels.memory[parent], kind, option),
        options.input_layout[option] if before < 0 else labels.received_layout[parent],
        options.output_layout[option],
        parent,
        step.costs.useful[kind][option],
        labels,
    )
    following = following.take(_reaching(step, following, targets, depth + 1))
    most = max(sum(step.max_static[k] for k in run.elements[depth + 1 :]) for _, run in targets)
    never = step.costs.group.budget_bytes - most - step.max_sent
    columns = step.problem.objectives(following.time_ps, following.exposed_ps)
    for resident, peak in zip(following.memory.T[::2], following.memory.T[1::2], strict=True):
        columns.append(np.maximum(peak, never))
        if most or step.max_sent:
            columns.append(np.maximum(resident, never - step.max_workspace))
    key = following.received_layout * step.num_layouts + following.output_layout
    return following.take(np.sort(non_dominated(np.stack(columns, 1), key)))


def _memory(step: _Step, before: Numbers, kind: int, option: Ints) -> Numbers:
    """Held and peak of each phase after one more element."""
    o = step.costs.options[kind]
    activation, transient = o.activation_bytes[option], o.workspace_bytes[option]
    after = np.empty_like(before)
    for i, of in enumerate(step.costs.phases):
        resident, peak = before[:, 2 * i], before[:, 2 * i + 1]
        static = of.static[kind][option]
        after[:, 2 * i] = resident + static + activation
        after[:, 2 * i + 1] = static + of.late[kind][option] + np.maximum(peak, resident + activation + transient)
    return after


def _reaching(step: _Step, labels: Labels, targets: list[tuple[Target, Run]], depth: int) -> Ints:
    """The labels that fit, and that by the bounds can stay within some target's caps."""
    budget = step.costs.group.budget_bytes
    fitting = labels.memory[:, 1::2].max(1) <= budget
    keep = np.zeros(len(fitting), bool)
    for target, run in targets:
        rows = np.flatnonzero(fitting & ~keep)
        if not len(rows):
            break
        rest = run.elements[depth:]
        for (time, end), cap in zip(step.weights, target.caps, strict=True):
            cost = time * labels.time_ps[rows] + end * labels.exposed_ps[rows]
            if rest:
                cost = cost + step.costs.least_rest((time, end), rest, labels.memory[rows, 0], labels.memory[rows, 1])
            rows = rows[cost < cap]
        keep[rows] = True
    return np.flatnonzero(keep)


def _worth_extending(step: _Step, labels: Labels, before: int) -> Ints:
    """The labels that none of another layout replaces after paying for the redistribution to theirs."""
    moves = step.costs.group.redistribution_ps[before] if before >= 0 else None
    rows = np.arange(len(labels.output_layout))
    if moves is None or len(rows) <= _FEW or not _triangular(moves):
        return rows
    for layout in np.unique(labels.output_layout):
        mine, others = rows[labels.output_layout[rows] == layout], rows[labels.output_layout[rows] != layout]
        both = np.r_[others, mine]
        if not len(others) or not len(mine):
            continue
        paid = np.r_[moves[labels.output_layout[others], layout], np.zeros(len(mine))]
        objectives = step.problem.objectives(labels.time_ps[both] + paid, labels.exposed_ps[both])
        columns = np.column_stack([*objectives, labels.memory[both]])
        kept = non_dominated(columns, labels.received_layout[both])
        rows = np.r_[others, both[np.sort(kept[kept >= len(others)])]]
    return np.sort(rows)


def _triangular(moves: Numbers) -> bool:
    """Whether no detour over a third layout is cheaper."""
    return bool((moves[:, None, :] <= moves[:, :, None] + moves[None, :, :]).all())
