"""All ways worth keeping to give options to the elements of one pipeline stage.

A label is one way to treat a run of elements: its time A, gradient sync U, optimizer O, memory and largest transient,
the layout its first element takes in and the one its last gives out. A label is dropped only if it exceeds the budget,
if no plan through it can be as good as one already known, or if another label of the same run and the same two layouts
has no more memory, no larger transient, and is no worse in the combinations `Problem.weights`. That is exact: whatever
follows or precedes adds the same numbers to both labels (or takes the same maximum of transients), so the other label
stays no worse to the end, fits wherever this one fits, and yields a T no larger.
"""

from typing import NamedTuple

import numpy as np

from shardwright_search.solver.bounds import Floors, Reals, lower_bound_ps
from shardwright_search.solver.pareto import Ints, non_dominated
from shardwright_search.solver.problem import Options, Problem

__all__ = ["Chains", "Labels"]


class Labels(NamedTuple):
    """Labels of one run of elements, one entry per label in each column."""

    time_ps: Ints
    gradient_sync_ps: Ints
    optimizer_ps: Ints
    memory_bytes: Ints
    """State, and activations of all microbatches in flight."""
    transient_bytes: Ints
    layout_in: Ints
    layout_out: Ints
    parent: Ints
    """The label of the run without its last element."""
    option: Ints
    """The option of the last element."""

    def take(self, rows: Ints) -> "Labels":
        """Some of the labels."""
        return Labels(*(column[rows] for column in self))

    @property
    def objectives_ps(self) -> Ints:
        """[labels, 3]: time, gradient sync, optimizer."""
        return np.stack([self.time_ps, self.gradient_sync_ps, self.optimizer_ps], 1)

    @property
    def key(self) -> Ints:
        """A number for the pair of layouts."""
        return self.layout_in * (1 << 20) + self.layout_out


class Chains:
    """Labels of the runs of elements of one pipeline stage, each computed once.

    Runs of the same types have the same labels wherever they start, so they are kept by their types. `most_labels`
    keeps only so many labels of each run: quick, no longer exact, good for a first plan. `cut_ps` is the T of a known
    plan; labels that cannot match it are dropped.
    """

    def __init__(
        self, problem: Problem, stage: int, known: Floors, cut_ps: int | None, most_labels: int | None
    ) -> None:
        self._problem, self._stage, self._floors = problem, stage, known
        self._cut_ps, self._most_labels = cut_ps, most_labels
        self._known: dict[tuple[int, ...], Labels] = {}
        self._useful = [self._useful_options(options) for options in problem.tables[stage].options]
        self.left_out = False
        """Whether labels were left out for `most_labels`."""

    def labels(self, start: int, end: int) -> Labels:
        """The labels of elements `start` to `end`, exclusive."""
        elements = self._problem.elements[start:end]
        for length in range(1, len(elements) + 1):
            run = elements[:length]
            if run not in self._known:
                self._known[run] = self._extended(run)
        return self._known[elements]

    def options_of(self, start: int, end: int, label: int) -> tuple[int, ...]:
        """The option of each element under a label of `labels(start, end)`."""
        found = []
        for stop in range(end, start, -1):
            labels = self.labels(start, stop)
            found.append(int(labels.option[label]))
            label = int(labels.parent[label])
        return tuple(reversed(found))

    def _extended(self, run: tuple[int, ...]) -> Labels:
        labels = self._first(run[0]) if len(run) == 1 else self._next(self._known[run[:-1]], run[-2], run[-1])
        labels = labels.take(np.flatnonzero(labels.memory_bytes + labels.transient_bytes <= self._problem.budget_bytes))
        if self._cut_ps is not None:
            labels = labels.take(np.flatnonzero(self._bound_ps(labels, run) <= self._cut_ps))
        columns = np.column_stack(
            [labels.objectives_ps @ self._problem.weights.T, labels.memory_bytes, labels.transient_bytes]
        )
        labels = labels.take(non_dominated(columns, labels.key))
        if self._most_labels is None or len(labels.time_ps) <= self._most_labels:
            return labels
        self.left_out = True
        return labels.take(np.sort(np.argsort(self._bound_ps(labels, run), kind="stable")[: self._most_labels]))

    def _bound_ps(self, labels: Labels, run: tuple[int, ...]) -> Reals:
        return lower_bound_ps(self._problem, self._floors, run, labels.objectives_ps, labels.memory_bytes)

    def _first(self, kind: int) -> Labels:
        """One label for each option."""
        option, options = self._useful[kind], self._problem.tables[self._stage].options[kind]
        layout = options.layout[option]
        return Labels(
            options.microbatch_ps[option],
            options.gradient_sync_ps[option],
            options.optimizer_ps[option],
            self._held(options)[option],
            options.transient_bytes[option],
            np.zeros_like(layout) if self._stage == 0 else layout,
            layout,
            np.zeros(len(option), np.int64),
            option,
        )

    def _next(self, before: Labels, kind_before: int, kind: int) -> Labels:
        """Every label with every option of the next element."""
        useful, options = self._useful[kind], self._problem.tables[self._stage].options[kind]
        parent = np.repeat(np.arange(len(before.time_ps)), len(useful))
        option = np.tile(useful, len(before.time_ps))
        layout = options.layout[option]
        moves_ps = self._problem.tables[self._stage].redistribution_ps[kind_before][before.layout_out[parent], layout]
        return Labels(
            before.time_ps[parent] + options.microbatch_ps[option] + moves_ps,
            before.gradient_sync_ps[parent] + options.gradient_sync_ps[option],
            before.optimizer_ps[parent] + options.optimizer_ps[option],
            before.memory_bytes[parent] + self._held(options)[option],
            np.maximum(before.transient_bytes[parent], options.transient_bytes[option]),
            before.layout_in[parent],
            layout,
            parent,
            option,
        )

    def _useful_options(self, options: Options) -> Ints:
        """Options that no other of the same layout replaces, by the same rule as labels."""
        objectives = np.stack([options.microbatch_ps, options.gradient_sync_ps, options.optimizer_ps], 1)
        columns = np.column_stack([objectives @ self._problem.weights.T, self._held(options), options.transient_bytes])
        return np.sort(non_dominated(columns, options.layout))

    def _held(self, options: Options) -> Ints:
        return options.state_bytes + self._problem.in_flight[self._stage] * options.activation_bytes
