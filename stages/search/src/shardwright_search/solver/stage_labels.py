"""Non-dominated choices of options for the layers of one pipeline stage.

A label is one way to choose options for a run of layers: its time A, exposed time U, memory, the layout it receives and
the one it outputs. A label is dropped only if it exceeds the budget, if bounds show that no plan through it stays below
the target's caps, or if another label of the same run and the same two layouts is no worse in A, U and memory: whatever
follows adds the same to both, or takes the same maxima. Memory that is too small to matter any more is set to the
largest amount that does not matter. Within a stage, a label may also be replaced by one with another output layout that
is no worse after the redistribution. At the end of a stage it may not: the redistribution would then be part of another
stage's time, which may be the largest.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_search.solver.configuration_bounds import StageKind, TargetRun
from shardwright_search.solver.problem import Problem, Start
from shardwright_search.solver.stage_options import GroupCosts, Run, Weights, runs_of, weightings
from shardwright_search.step.memory import StageMemory, no_layers
from shardwright_search.step.pareto import Ints, Numbers, beaten_alike, non_dominated, pairs

_FEW = 8
_LENGTHS = 6
"""Lengths of runs for which a guess keeps promising labels."""


class RunLabels(NamedTuple):
    """Labels of one run, one entry for each label in each column, and labels of the run without its last layer."""

    time_ps: Numbers
    exposed_ps: Numbers
    resident: Numbers
    """[labels, phases], in bytes, as is the peak."""
    peak: Numbers
    host_bytes: Numbers
    received_layout: Ints
    output_layout: Ints
    parent: Ints
    option: Ints
    """The option of the last layer, by its number in the problem."""
    behind: "RunLabels | None"

    @property
    def memory(self) -> StageMemory:
        """Return the memory of the layers so far."""
        return StageMemory(self.resident, self.peak)

    def take(self, rows: Ints) -> "RunLabels":
        """Return the labels in these rows."""
        return RunLabels._make((*(column[rows] for column in self[:-1]), self.behind))

    def options_of(self, label: int) -> tuple[int, ...]:
        """Return the option of each layer under a label."""
        options: list[int] = []
        labels: RunLabels | None = self
        while labels is not None and labels.behind is not None:
            options.append(int(labels.option[label]))
            label, labels = int(labels.parent[label]), labels.behind
        return tuple(reversed(options))


Reachable = list[tuple[Run, TargetRun]]
Rest = tuple[tuple[int, ...], tuple[float, ...]]
"""Types of the layers that a target still needs, and its caps on weighted costs."""


class StageLabels:
    """The labels of a stage kind: facts that all share, and the labels of whole runs found so far.

    `tick` is called between steps and may raise to stop. `max_labels`: about how many labels of a run are extended.
    """

    def __init__(
        self,
        problem: Problem,
        kind: StageKind,
        costs: GroupCosts,
        tick: Callable[[int], None],
        max_labels: int | None = None,
    ) -> None:
        self.problem, self.costs, self._start, self._tick = problem, costs, kind.start, tick
        self._max_labels = max_labels
        # With one stage all caps are T's own.
        self.capped = slice(1, 2) if problem.pp_size == 1 else slice(None)
        self.weights: tuple[Weights, ...] = tuple(weightings(problem, kind.group))[self.capped]
        self._layouts = problem.layouts_of_width[costs.group.width]
        group = costs.group.redistribution_ps
        self._triangular = [_triangular(moves[np.ix_(self._layouts, self._layouts)]) for moves in group]
        self.num_layouts = max(int(max(o.output_layout.max(), o.input_layout.max())) for o in costs.options) + 1
        # The most that a layer of each type adds to resident or peak bytes of any phase, and any one's own pass.
        self._max_added = [float((o.static + np.maximum(o.activation, o.late)).max()) for o in costs.memory]
        self._offloads = costs.group.offloads
        self._max_hosted = [float(o.host_bytes.max()) for o in costs.options]
        self._max_working = max(float((o.activation + o.workspace).max()) for o in costs.memory)
        self._max_sent = float(problem.boundary_bytes.max()) if problem.pp_size > 1 else 0.0
        self.reached: dict[int, RunLabels] = {}

    def reaching(self, targets: Sequence[TargetRun]) -> dict[int, RunLabels]:
        """Return, by run, the labels of every target as a whole stage; they fit, and memory no longer matters."""
        runs = runs_of(self.problem.layers).runs
        reachable = sorted(((runs[target.run], target) for target in targets), key=lambda pair: pair[0])
        # In sorted order runs with a common beginning are neighbours, so each beginning is labelled once.
        for before, group in groupby(reachable, key=lambda pair: pair[0].before):
            self.extend(self.start(before), 0, list(group))
        return self.reached

    def start(self, before: int) -> RunLabels:
        """Return one label for each layout in which the outputs of a layer of type `before` can be received."""
        is_first = self._start is Start.FIRST
        # The embedding receives token numbers: one layout, and no bytes that count.
        layouts = np.zeros(1, np.int64) if is_first else self._layouts
        received = np.zeros(1) if is_first else self.problem.boundary_bytes[before][layouts]
        none = np.zeros(len(layouts))
        memory = no_layers(self.costs.phases, received)
        return RunLabels(none, none, *memory, none, layouts, layouts, layouts, layouts, None)

    def extend(self, labels: RunLabels, depth: int, reachable: Reachable) -> None:
        """Extend labels along the tree of all target runs from their common beginning, which may be thousands deep."""
        waiting = [(labels, depth, reachable)]
        while waiting:
            waiting += reversed(list(self._branches(*waiting.pop())))

    def _branches(
        self, labels: RunLabels, depth: int, reachable: Reachable
    ) -> Iterator[tuple[RunLabels, int, Reachable]]:
        """Store the labels of completed runs; return the others extended by one layer, by its type."""
        self._tick(len(labels.time_ps))
        onward = []
        for run, target in reachable:
            if len(run.layers) == depth:
                self.reached[target.run] = self.whole(labels, run, target)
            else:
                onward.append((run, target))
        if not onward:
            return
        first = onward[0][0]
        before = first.layers[depth - 1] if depth else first.before
        rows = self.worth_extending(labels, before) if depth else np.arange(len(labels.time_ps))
        for kind, same in groupby(onward, key=lambda pair: pair[0].layers[depth]):
            group = list(same)
            following = self.following(labels, rows, before, kind, group, depth)
            if len(following.time_ps):
                yield following, depth + 1, group

    def whole(self, labels: RunLabels, run: Run, target: TargetRun) -> RunLabels:
        """Return the non-dominated labels of a whole stage that are below the target's caps."""
        labels = self.below(labels, target)
        if run.layers[-1] != self.problem.layers[-1]:
            # A stage also holds the output that it sends on.
            sent = self.problem.boundary_bytes[run.layers[-1]][labels.output_layout]
            labels = labels.take(np.flatnonzero(labels.peak.max(1) + sent <= self.costs.group.budget_bytes))
        return self._undominated(labels, [])

    def below(self, labels: RunLabels, target: TargetRun) -> RunLabels:
        """Return the labels that stay below the target's caps."""
        below = np.ones(len(labels.time_ps), bool)
        for (time, exposed), cap in zip(self.weights, target.caps[self.capped], strict=True):
            below &= time * labels.time_ps + exposed * labels.exposed_ps < cap
        return labels.take(np.flatnonzero(below))

    def following(
        self, labels: RunLabels, rows: Ints, before: int, kind: int, reachable: Reachable, depth: int
    ) -> RunLabels:
        """Return every label with every option of the next layer, if some target can still be reached from it."""
        options = self.costs.options[kind]
        parent, option = pairs(rows, len(options.time_ps))
        # A stage of another width sends its pieces straight into the first layer's layout.
        if depth == 0 and self._start is Start.IN_PLACE:
            fits = labels.output_layout[parent] == options.input_layout[option]
            parent, option = parent[fits], option[fits]
        time = labels.time_ps[parent] + options.time_ps[option]
        if before >= 0:
            moves = self.costs.group.redistribution_ps[before]
            time = time + moves[labels.output_layout[parent], options.input_layout[option]]
        following = RunLabels(
            time,
            labels.exposed_ps[parent] + options.exposed_ps[option],
            *labels.memory.take(parent).then(self.costs.memory[kind].take(option)),
            labels.host_bytes[parent] + options.host_bytes[option],
            options.input_layout[option] if before < 0 else labels.received_layout[parent],
            options.output_layout[option],
            parent,
            self.costs.useful[kind][option],
            labels,
        )
        rest = [(run.layers[depth + 1 :], target.caps[self.capped]) for run, target in reachable]
        reaching = self._reaching if self._max_labels is None else self._promising
        following = following.take(reaching(following, rest))
        most = max(sum(self._max_added[k] for k in layers) for layers, _ in rest)
        never = self.costs.group.budget_bytes - most - self._max_sent
        memory = list(np.maximum(following.peak.T, never))
        # Resident bytes only matter to what is still to come.
        if most or self._max_sent:
            memory += list(np.maximum(following.resident.T, never - self._max_working))
        if self._offloads:
            most = max(sum(self._max_hosted[k] for k in layers) for layers, _ in rest)
            memory.append(np.maximum(following.host_bytes, self.costs.group.host_budget_bytes - most))
        return self._undominated(following, memory)

    def worth_extending(self, labels: RunLabels, before: int) -> Ints:
        """Return the labels that no label of another layout dominates after a redistribution to their layout."""
        moves = self.costs.group.redistribution_ps[before]
        rows = np.arange(len(labels.time_ps))
        # Without the triangle inequality, moving on directly may cost more than via the layout that is compared.
        if len(rows) <= _FEW or not self._triangular[before]:
            return rows
        alive = np.ones(len(rows), bool)
        memory, received = [*labels.resident.T, *labels.peak.T], labels.received_layout
        memory += [labels.host_bytes] * self._offloads
        columns = np.stack([*self.problem.objectives(labels.time_ps, labels.exposed_ps), *memory], 1)
        for layout in self._layouts:
            same = labels.output_layout == layout
            mine, others = np.flatnonzero(same & alive), np.flatnonzero(~same & alive)
            if len(mine) and len(others):
                time = labels.time_ps[others] + moves[labels.output_layout[others], layout]
                paid = columns[others]
                # Redistribution costs time, not memory.
                paid[:, : -len(memory)] = np.stack(self.problem.objectives(time, labels.exposed_ps[others]), 1)
                alive[mine] = ~beaten_alike(paid, columns[mine], (received[others], received[mine]))
        return np.flatnonzero(alive)

    def _undominated(self, labels: RunLabels, memory: list[Numbers]) -> RunLabels:
        """Return the labels that no other of their layouts dominates in the objectives and in these columns."""
        columns = [*self.problem.objectives(labels.time_ps, labels.exposed_ps), *memory]
        key = labels.received_layout * self.num_layouts + labels.output_layout
        return labels.take(np.sort(non_dominated(np.stack(columns, 1), key)))

    def _reaching(self, labels: RunLabels, rests: Sequence[Rest]) -> Ints:
        """Return the labels that fit, and whose bound with the rest of some target is within its caps."""
        fitting = self._fitting(labels)
        keep = np.zeros(len(fitting), bool)
        for rest, caps in rests:
            rows = np.flatnonzero(fitting & ~keep)
            if not len(rows):
                break
            for weights, cap in zip(self.weights, caps, strict=True):
                rows = rows[self._least(labels, rows, weights, rest) < cap]
            keep[rows] = True
        return np.flatnonzero(keep)

    def _promising(self, labels: RunLabels, rests: Sequence[Rest]) -> Ints:
        """Return the labels that fit and are the most promising ones for some targets, from short runs to long ones.

        What promises most for a short run leaves a long one too little memory.
        """
        assert self._max_labels is not None
        # Lengths in between need much the same labels as their neighbours.
        some = np.unique(np.linspace(0, len(rests) - 1, _LENGTHS).round().astype(int))
        fitting, few = np.flatnonzero(self._fitting(labels)), self._max_labels // len(some)
        keep = np.zeros(len(labels.time_ps), bool)
        for rest, caps in (rests[number] for number in some):
            costs = zip(self.weights, caps, strict=True)
            with np.errstate(invalid="ignore"):  # neither fits nor has a cap
                over = np.max([self._least(labels, fitting, weights, rest) - cap for weights, cap in costs], axis=0)
            below = np.flatnonzero(over < 0)
            best = below if len(below) <= few else below[np.argpartition(over[below], few)[:few]]
            keep[fitting[best]] = True
        return np.flatnonzero(keep)

    def _fitting(self, labels: RunLabels) -> NDArray[np.bool_]:
        """Return which labels fit so far, in both memories."""
        group = self.costs.group
        return np.asarray((labels.peak.max(1) <= group.budget_bytes) & (labels.host_bytes <= group.host_budget_bytes))

    def _least(self, labels: RunLabels, rows: Ints, weights: Weights, rest: tuple[int, ...]) -> Numbers:
        """Return a lower bound on the cost of a run that begins with each of these labels and ends with `rest`."""
        cost = weights[0] * labels.time_ps[rows] + weights[1] * labels.exposed_ps[rows]
        if not rest:
            return cost
        return cost + self.costs.min_rest(weights, rest, labels.resident[rows, 0], labels.peak[rows, 0])


def _triangular(moves: Numbers) -> bool:
    """Return whether no move between two layouts is cheaper via a third: `moves` [from, to] is the cost of each."""
    return bool((moves[:, None, :] <= moves[:, :, None] + moves[None, :, :]).all())
