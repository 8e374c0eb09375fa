"""Cutting the chain of layers into pipeline stages, given the labels of every run of layers.

Labels of all layers before a cut are extended by one pipeline stage after another.

A label is one way to choose options for the layers before a cut. It has S, the sum of the stages' A'; X, the largest
A'; V, the largest U; the layouts that it outputs and that the next stage receives; and its embedding's class of tied
parameters. Whatever follows adds the same to S and takes the same maxima. So a label is no worse than one (S', X', V')
with the same layouts and class if S' - S makes up for (X - X')+ and (V - V')+, each times its coefficient in T: that
is, if T of S with neither, either or both of X and V is no larger. Labels are also dropped when the bounds of the
stages to come show that no plan through them stays below the limit.
"""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate, groupby, product
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.configuration_bounds import ConfigurationBounds, CostsOf, StageKind, TargetRun
from shardwright_search.solver.problem import Cut, Position, Problem, Solution
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_labels import RunLabels, StageLabels
from shardwright_search.step.pareto import Ints, Numbers, non_dominated

_FEW_IN_ALL = 5_000
"""Number of labels kept before all cuts after a stage, in a guess."""
_TOGETHER = 500
"""Number of labels of runs that are paired at once with the labels before a cut, or one run if it has more."""


class LabelState(NamedTuple):
    """Where the layers of some labels end, the position, and the device groups of the last stage and the next one."""

    end: int
    position: Position
    group: int
    following: int


_StateWithoutEnd = tuple[Position, int, int]
"""A label's state without the end of its layers: position, last device group and next one."""


class Prefix(NamedTuple):
    """Labels of all layers before a cut, one entry per label in each column."""

    total_ps: Numbers
    slowest_ps: Numbers
    exposed_ps: Numbers
    output_layout: Ints
    received_layout: Ints
    """Layout in which the next stage receives the outputs."""
    tied_class: Ints
    source: Ints
    """Index of the source within the level from which the label was extended."""
    parent: Ints
    """Index of the label that was extended, among the labels of the source's state."""
    chosen: Ints
    """Index of the last stage's label among the labels of the source's runs."""

    def take(self, rows: Ints) -> "Prefix":
        """Return the labels of some rows."""
        return Prefix._make(column[rows] for column in self)


class _StageContents(NamedTuple):
    """Possible contents of a stage of one kind from a layer on: labels of several runs, one entry for each label."""

    time_ps: Numbers
    exposed_ps: Numbers
    received_layout: Ints
    output_layout: Ints
    end: Ints
    """The layer after the run's last."""
    last: Ints
    """Type of the run's last layer."""
    first: Ints
    """[runs]: the first entry of each run."""
    labels: tuple[RunLabels, ...]
    """Labels of each run."""

    def options_of(self, label: int) -> tuple[int, ...]:
        """Return, for each layer of a label's run, the number of its option in the problem; `label`: its row here."""
        run = int(np.searchsorted(self.first, label, side="right")) - 1
        return self.labels[run].options_of(label - int(self.first[run]))


class Level(NamedTuple):
    """The labels, which are partial solutions, of the first stages by state, and the `sources` that they extend.

    A source is the state of a label before the last stage, and the contents that this stage can have.
    """

    labels: dict[LabelState, Prefix]
    sources: list[tuple[LabelState, _StageContents]]


LabelsOf = dict[StageKind, dict[int, RunLabels]]
"""Labels by stage kind and run."""


def first_level(problem: Problem) -> Level:
    """Return the level before the first stage: one label, which holds no layer."""
    nothing, zero = np.zeros(1), np.zeros(1, np.int64)
    label = Prefix(nothing, nothing, nothing, zero, zero, zero, zero, zero, zero)
    first = _followed(problem, 0, problem.start_position)
    return Level({LabelState(0, problem.start_position, -1, following): label for following in first}, [])


def next_level(
    bounds: ConfigurationBounds, stage: int, before: Level, labels_of: LabelsOf, below_ps: float, few: bool
) -> Level:
    """Append one pipeline stage to every label in every way; `few`: keep only the most promising ones."""
    problem, phases = bounds.problem, bounds.problem.phases(stage)
    parts: dict[_StateWithoutEnd, list[_Appended]] = {}
    sources: list[tuple[LabelState, _StageContents]] = []
    known: dict[tuple[StageKind, int], list[_StageContents]] = {}
    for at, labels in before.labels.items():
        kind = StageKind(at.following, phases, problem.start(at.group, at.following))
        if (kind, at.end) not in known:
            known[kind, at.end] = list(_runs(bounds, stage, at.end, labels_of.get(kind, {})))
        position = dict(problem.placements[stage][at.position])[at.following]
        for runs, following in product(known[kind, at.end], _followed(problem, stage + 1, position)):
            where = position, at.following, following
            appended = _appended(bounds, stage, at, labels, where, runs, len(sources))
            rows = np.flatnonzero(appended.min_ps < below_ps)
            if len(rows):
                sources.append((at, runs))
                parts.setdefault(where, []).append(appended.take(rows))
    level = {}
    for where, joined in _joined(parts, few).items():
        for end in np.unique(joined.end):
            alike = joined.labels.take(np.flatnonzero(joined.end == end))
            level[LabelState(int(end), *where)] = alike.take(_undominated(problem, alike))
    return Level(level, sources)


class _Appended(NamedTuple):
    """Labels of all layers before a cut, the cut, and a lower bound of the step time T with the stages to come."""

    labels: Prefix
    end: Ints
    min_ps: Numbers

    def take(self, rows: Ints) -> "_Appended":
        return _Appended(self.labels.take(rows), self.end[rows], self.min_ps[rows])


def _joined(parts_of: dict[_StateWithoutEnd, list[_Appended]], few: bool) -> dict[_StateWithoutEnd, _Appended]:
    """Return the labels of each state in one table; `few`: only the most promising ones of all states."""
    joined = {
        where: _Appended(
            Prefix(*(np.concatenate(columns) for columns in zip(*(part.labels for part in parts), strict=True))),
            np.concatenate([part.end for part in parts]),
            np.concatenate([part.min_ps for part in parts]),
        )
        for where, parts in parts_of.items()
    }
    least = np.concatenate([part.min_ps for part in joined.values()]) if joined else np.zeros(0)
    if not few or len(least) <= _FEW_IN_ALL:
        return joined
    # One threshold for all states: a number of each would favour states without good plans.
    most = np.partition(least, _FEW_IN_ALL)[_FEW_IN_ALL]
    return {where: part.take(np.flatnonzero(part.min_ps <= most)) for where, part in joined.items()}


def _runs(bounds: ConfigurationBounds, stage: int, start: int, known: dict[int, RunLabels]) -> Iterator[_StageContents]:
    """Yield the runs that a stage can hold from a layer on, with their labels, in batches small enough to pair."""
    known_runs = ((end, known.get(int(bounds.runs.number[start, end]))) for end in bounds.problem.ends(stage, start))
    runs = [(end, labels) for end, labels in known_runs if labels is not None and len(labels.time_ps)]
    before = list(accumulate((len(labels.time_ps) for _, labels in runs), initial=0))
    for _, block in groupby(range(len(runs)), key=lambda run: before[run] // _TOGETHER):
        ends, labels = zip(*(runs[run] for run in block), strict=True)
        counts = [len(part.time_ps) for part in labels]
        end = np.repeat(ends, counts)
        columns = ((part.time_ps, part.exposed_ps, part.received_layout, part.output_layout) for part in labels)
        time, exposed, received, output = map(np.concatenate, zip(*columns, strict=True))
        last, first = np.array(bounds.problem.layers)[end - 1], np.cumsum([0, *counts[:-1]])
        yield _StageContents(time, exposed, received, output, end, last, first, labels)


def _undominated(problem: Problem, labels: Prefix) -> Ints:
    """Return the labels that no other label of their layouts and class dominates."""
    none = np.zeros_like(labels.total_ps)
    # What follows may have a larger maximum or not: four cases, and T of each must be no larger.
    ways = [(slowest, exposed) for slowest in (none, labels.slowest_ps) for exposed in (none, labels.exposed_ps)]
    columns = [problem.closed_form.time(labels.total_ps, slowest, exposed) for slowest, exposed in ways]
    layouts = labels.output_layout * problem.num_layouts + labels.received_layout
    return non_dominated(np.stack(columns, 1), layouts * len(problem.tied_ps) + labels.tied_class)


def _followed(problem: Problem, stage: int, position: Position) -> list[int]:
    """Return the possible device groups of the next stage, number `stage`; -1 after the last."""
    if stage == problem.pp_size:
        return [-1]
    return [following for following, _ in problem.placements[stage].get(position, ())]


def _appended(
    bounds: ConfigurationBounds,
    stage: int,
    at: LabelState,
    labels: Prefix,
    where: _StateWithoutEnd,
    runs: _StageContents,
    source: int,
) -> _Appended:
    """Return every label before a cut with every label of `runs` that receives its layout.

    `where`: the state after the stage, which includes the device group of the next one.
    """
    problem, (position, group, following) = bounds.problem, where
    if stage == 0:
        parent, chosen = np.zeros(len(runs.time_ps), np.int64), np.arange(len(runs.time_ps))
    else:
        # The layout in which the outputs are received was chosen at the cut, and only runs that receive it follow.
        parent, chosen = np.nonzero(labels.received_layout[:, None] == runs.received_layout)
    time = runs.time_ps[chosen]
    if stage > 0:
        into = problem.sends_ps[Cut(at.position, at.group, group)][problem.layers[at.end - 1]]
        time = time + into[labels.output_layout[parent], labels.received_layout[parent]]
    received = np.zeros(len(parent), np.int64)
    if stage < problem.pp_size - 1:
        out = problem.sends_ps[Cut(position, group, following)][runs.last[chosen], runs.output_layout[chosen]]
        # The sender's time contains the send, which depends on the receiver: so labels branch by the next stage's group
        # and by the layout that it receives.
        rows, received = np.nonzero(np.isfinite(out))
        parent, chosen, time = parent[rows], chosen[rows], time[rows] + out[rows, received]
    appended = Prefix(
        labels.total_ps[parent] + time,
        np.maximum(labels.slowest_ps[parent], time),
        np.maximum(labels.exposed_ps[parent], runs.exposed_ps[chosen]),
        runs.output_layout[chosen],
        received,
        runs.received_layout[chosen] if stage == 0 else labels.tied_class[parent],
        np.full(len(parent), source),
        parent,
        chosen,
    )
    end = runs.end[chosen]
    return _Appended(appended, end, _least(bounds, stage, position, appended, end))


def _least(bounds: ConfigurationBounds, stage: int, position: Position, labels: Prefix, end: Ints) -> Numbers:
    """Return a lower bound on the step time T of each label, including all remaining stages."""
    form, rest = bounds.problem.closed_form, bounds.after[stage + 1][position]
    known = form.time(labels.total_ps, labels.slowest_ps, labels.exposed_ps)
    total = form.fill * labels.total_ps
    least = rest.total[end] + np.maximum(known, total + rest.slowest[end])
    if bounds.bands is not None:
        to_come = bounds.bands.after(stage + 1, position).least(end, form.steady * labels.slowest_ps)
        least = np.maximum(least, total + to_come)
    return np.asarray(least + bounds.problem.tied_ps.min())


_FEW_LABELS = 24
"""Labels kept of each run, in a guess."""


class PricedSolution(NamedTuple):
    """A plan of a configuration, with its step time T by the closed form, in picoseconds."""

    objective_ps: float
    solution: Solution


class Pipeline:
    """A configuration of GPipe or 1F1B, ready to be solved."""

    def __init__(self, problem: Problem, costs_of: CostsOf, relaxed: Relaxed) -> None:
        self._problem, self._costs_of, self._relaxed = problem, costs_of, relaxed

    @property
    def relaxed_bound_ps(self) -> float:
        """Return a lower bound on the step time T that is quick to compute."""
        return self._relaxed.bound_ps(self._problem)

    @property
    def lower_ps(self) -> float:
        """Return a lower bound on the step time T."""
        return ConfigurationBounds(self._problem, self._costs_of, rough=True).lower_ps

    def guess(self, below_ps: float) -> PricedSolution | None:
        """Return the best plan with T < below_ps among a few labels of each step; None: they have none."""
        return next(iter(self.solve_below(below_ps, 1, lambda made: None, _FEW_LABELS)), None)

    def solve_below(
        self, below_ps: float, most: int, tick: Callable[[int], None], max_labels: int | None = None
    ) -> tuple[PricedSolution, ...]:
        """Return non-dominated plans with T < below_ps, the best first, up to `most`; empty if there are none.

        With `max_labels` only that many labels of a run are extended, the most promising ones, and only some thousands
        in all after a stage: plans may be missed.
        """
        problem, bounds = self._problem, self._bounds
        if (target_runs := bounds.target_runs(below_ps)) is None:
            return ()
        labels_of = {kind: self._labels(kind, runs, tick, max_labels) for kind, runs in target_runs.items()}
        levels = [first_level(problem)]
        for stage in range(problem.pp_size):
            tick(0)
            levels.append(next_level(bounds, stage, levels[-1], labels_of, below_ps, max_labels is not None))
        return _best(problem, levels, below_ps, most)

    def _labels(
        self, kind: StageKind, runs: list[TargetRun], tick: Callable[[int], None], max_labels: int | None
    ) -> dict[int, RunLabels]:
        """Return the labels of runs that stages of a kind can hold."""
        costs = self._bounds.costs_of(self._problem.device_groups[kind.group], kind.phases)
        return StageLabels(self._problem, kind, costs, tick, max_labels).reaching(runs)

    @cached_property
    def _bounds(self) -> ConfigurationBounds:
        return ConfigurationBounds(self._problem, self._costs_of)


def _best(problem: Problem, levels: list[Level], below_ps: float, most: int) -> tuple[PricedSolution, ...]:
    plans: list[tuple[float, LabelState, int]] = []
    for at, labels in levels[-1].labels.items():
        objective = problem.closed_form.time(labels.total_ps, labels.slowest_ps, labels.exposed_ps)
        objective = objective + problem.tied_ps[labels.tied_class, labels.output_layout]
        rows = np.flatnonzero(objective < below_ps)
        # Stable, so that among equal plans the same one is the answer on every machine.
        best = rows[np.argsort(objective[rows], kind="stable")][:most]
        plans += [(float(objective[row]), at, int(row)) for row in best]
    plans.sort(key=lambda plan: plan[0])
    return tuple(PricedSolution(objective, _decoded(levels, at, row)) for objective, at, row in plans[:most])


def _decoded(levels: list[Level], at: LabelState, label: int) -> Solution:
    ends: list[int] = []
    options: list[int] = []
    groups: list[int] = []
    for level in reversed(levels[1:]):
        labels = level.labels[at]
        before, runs = level.sources[int(labels.source[label])]
        ends.insert(0, at.end)
        groups.insert(0, at.group)
        options[:0] = runs.options_of(int(labels.chosen[label]))
        at, label = before, int(labels.parent[label])
    return Solution(tuple(ends), tuple(options), tuple(groups))
