"""Cutting the chain of layers into pipeline stages, given the labels of every run of layers.

A label is one way to treat the layers before a cut: S, the sum of the stages' A', the largest A' and the largest U (X
and V), the layouts that it gives out and that the next stage receives, the class of its embedding that ties tell apart.
Whatever follows adds the same to S and takes the same maxima, so a label with another's layouts and class never loses
to it if S' - S is at least (m - 1)(X - X')+ + (V - V')+: that is, if S plus each selection of (m - 1) X and V is no
larger. Labels are also dropped when the bounds of what is still to come show that no plan through them stays below the
cut-off.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.configuration_bounds import ConfigurationBounds, CostsOf, StageKind
from shardwright_search.solver.objective import step_time
from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.problem import Cut, Position, Problem, Solution
from shardwright_search.solver.relaxed_bound import DualOf, relaxed_bound_ps
from shardwright_search.solver.stage_labels import Labels, stage_labels

_FEW_LABELS = 24
"""Of each run, in a guess."""


class Found(NamedTuple):
    """A plan of a configuration and its T."""

    objective_ps: float
    solution: Solution


class Pipeline:
    """A configuration of GPipe or 1F1B."""

    def __init__(self, problem: Problem, costs_of: CostsOf, dual_of: DualOf) -> None:
        self._problem, self._costs_of, self._dual_of = problem, costs_of, dual_of

    @property
    def relaxed_bound_ps(self) -> float:
        """A quick lower bound on T."""
        return relaxed_bound_ps(self._problem, self._dual_of)

    @property
    def lower_ps(self) -> float:
        """A lower bound on T."""
        return ConfigurationBounds(self._problem, self._costs_of, rough=True).lower_ps

    def guess(self, below_ps: float) -> Found | None:
        """The best plan with T < below_ps among a few labels of each step; None: there is none among them."""
        return next(iter(solve_below(self._bounds, below_ps, 1, lambda made: None, _FEW_LABELS)), None)

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[Found, ...]:
        """See the function."""
        return solve_below(self._bounds, below_ps, most, tick)

    @cached_property
    def _bounds(self) -> ConfigurationBounds:
        return ConfigurationBounds(self._problem, self._costs_of)


class _At(NamedTuple):
    """Where a label is: where its layers end, the stages' position, the last one's device group and the next one's."""

    end: int
    position: Position
    group: int
    following: int


class _Prefix(NamedTuple):
    """Labels of all layers before a cut, one entry per label in each column."""

    total_ps: Numbers
    slowest_ps: Numbers
    exposed_ps: Numbers
    output_layout: Ints
    received_layout: Ints
    """What the next stage receives it in."""
    tie_class: Ints
    source: Ints
    """Number of the level's source: where the label came from."""
    parent: Ints
    """The label there."""
    chosen: Ints
    """The label of the last stage among those of its run."""

    def take(self, rows: Ints) -> "_Prefix":
        return _Prefix._make(column[rows] for column in self)


class _Level(NamedTuple):
    """The labels after some stages, and what their sources are: the position before, and the last stage's labels."""

    labels: dict[_At, _Prefix]
    sources: list[tuple[_At, Labels]]


LabelsOf = dict[StageKind, dict[int, Labels]]


def solve_below(
    bounds: ConfigurationBounds, below_ps: float, most: int, tick: Callable[[int], None], max_labels: int | None = None
) -> tuple[Found, ...]:
    """Plans with T < below_ps: the best one first and up to `most` in all, non-dominated ones; none: there is none.

    With `max_labels` only so many of a run are extended, the most promising ones: plans may be missed.
    """
    problem = bounds.problem
    if (targets := bounds.targets(below_ps)) is None:
        return ()
    labels_of: LabelsOf = {}
    for kind, found in targets.items():
        costs = bounds.costs_of(problem.device_groups[kind.group], kind.phases)
        labels_of[kind] = stage_labels(problem, kind, costs, found, tick, max_labels)
    nothing, zero = np.zeros(1), np.zeros(1, np.int64)
    start = _Prefix(nothing, nothing, nothing, zero, zero, zero, zero, zero, zero)
    levels = [_Level({at: start for at in _followed(problem, 0, 0, problem.start_position, -1)}, [])]
    for stage in range(problem.pp_size):
        tick(0)
        levels.append(_next_level(bounds, stage, levels[-1], labels_of, below_ps))
    return _best(problem, levels, below_ps, most)


def _next_level(
    bounds: ConfigurationBounds, stage: int, before: _Level, labels_of: LabelsOf, below_ps: float
) -> _Level:
    """Append one pipeline stage to every label in every way."""
    problem, m = bounds.problem, bounds.problem.num_microbatches
    found: dict[_At, list[_Prefix]] = {}
    sources: list[tuple[_At, Labels]] = []
    for at, labels in before.labels.items():
        position = dict(problem.placements[stage][at.position])[at.following]
        start = problem.start(at.group, at.following)
        known = labels_of.get(StageKind(at.following, problem.phases(stage), start), {})
        rest = bounds.after[stage + 1][position]
        rests = None if bounds.bands is None else bounds.bands.after(stage + 1, position)
        for end in problem.ends(stage, at.end):
            own = known.get(int(bounds.runs.number[at.end, end]))
            if own is None or not len(own.time_ps) or not np.isfinite(rest.total[end]):
                continue
            for after in _followed(problem, stage + 1, end, position, at.following):
                appended = _appended(problem, stage, at, labels, after, own, len(sources))
                total = appended.total_ps + rest.total[end]
                least = step_time(total, appended.slowest_ps, appended.exposed_ps, m)
                least = np.maximum(least, total + rest.slowest[end])
                if rests is not None:
                    largest = (m - 1) * appended.slowest_ps
                    least = np.maximum(least, appended.total_ps + rests.least(end, largest))
                rows = np.flatnonzero(least + problem.tie_ps.min() < below_ps)
                if len(rows):
                    sources.append((at, own))
                    found.setdefault(after, []).append(appended.take(rows))
    level = {}
    for where, parts in found.items():
        joined = _Prefix(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        level[where] = joined.take(_undominated(problem, joined))
    return _Level(level, sources)


def _undominated(problem: Problem, labels: _Prefix) -> Ints:
    """Labels that no other of their layouts and class replaces: S with any choice of what else it raises is larger."""
    none, m = np.zeros_like(labels.total_ps), problem.num_microbatches
    ways = [(slowest, exposed) for slowest in (none, labels.slowest_ps) for exposed in (none, labels.exposed_ps)]
    columns = [step_time(labels.total_ps, slowest, exposed, m) for slowest, exposed in ways]
    layouts = labels.output_layout * problem.num_layouts + labels.received_layout
    return non_dominated(np.stack(columns, 1), layouts * len(problem.tie_ps) + labels.tie_class)


def _followed(problem: Problem, stage: int, end: int, position: Position, group: int) -> list[_At]:
    """A position with each device group that the next stage, number `stage`, can be on; -1 behind the last."""
    if stage == problem.pp_size:
        return [_At(end, position, group, -1)]
    return [_At(end, position, group, following) for following, _ in problem.placements[stage].get(position, ())]


def _appended(problem: Problem, stage: int, at: _At, labels: _Prefix, after: _At, own: Labels, source: int) -> _Prefix:
    """Every label before a cut with every label of the stage that receives its layout, for each that comes next."""
    if stage == 0:
        parent, chosen = np.zeros(len(own.time_ps), np.int64), np.arange(len(own.time_ps))
    else:
        parent, chosen = np.nonzero(labels.received_layout[:, None] == own.received_layout)
    time = own.time_ps[chosen]
    if stage > 0:
        into = problem.sends_ps[Cut(at.position, at.group, after.group)][problem.layers[at.end - 1]]
        time = time + into[labels.output_layout[parent], labels.received_layout[parent]]
    received = np.zeros(len(parent), np.int64)
    if stage < problem.pp_size - 1:
        out = problem.sends_ps[Cut(after.position, after.group, after.following)][problem.layers[after.end - 1]]
        out = out[own.output_layout[chosen]]
        rows, received = np.nonzero(np.isfinite(out))
        parent, chosen, time = parent[rows], chosen[rows], time[rows] + out[rows, received]
    return _Prefix(
        labels.total_ps[parent] + time,
        np.maximum(labels.slowest_ps[parent], time),
        np.maximum(labels.exposed_ps[parent], own.exposed_ps[chosen]),
        own.output_layout[chosen],
        received,
        own.received_layout[chosen] if stage == 0 else labels.tie_class[parent],
        np.full(len(parent), source),
        parent,
        chosen,
    )


def _best(problem: Problem, levels: list[_Level], below_ps: float, most: int) -> tuple[Found, ...]:
    found: list[tuple[float, _At, int]] = []
    for at, labels in levels[-1].labels.items():
        objective = step_time(labels.total_ps, labels.slowest_ps, labels.exposed_ps, problem.num_microbatches)
        objective = objective + problem.tie_ps[labels.tie_class, labels.output_layout]
        rows = np.flatnonzero(objective < below_ps)
        best = rows[np.argsort(objective[rows], kind="stable")][:most]
        found += [(float(objective[row]), at, int(row)) for row in best]
    found.sort(key=lambda plan: plan[0])
    return tuple(Found(objective, _decoded(levels, at, row)) for objective, at, row in found[:most])


def _decoded(levels: list[_Level], at: _At, label: int) -> Solution:
    ends: list[int] = []
    options: list[int] = []
    groups: list[int] = []
    for level in reversed(levels[1:]):
        labels = level.labels[at]
        before, own = level.sources[int(labels.source[label])]
        ends.insert(0, at.end)
        groups.insert(0, at.group)
        options[:0] = own.options_of(int(labels.chosen[label]))
        at, label = before, int(labels.parent[label])
    return Solution(tuple(ends), tuple(options), tuple(groups))
