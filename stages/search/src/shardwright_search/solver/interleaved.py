"""The best plan of an interleaved schedule in a stated space: equal chunks, the same strategies at each position.

All stages lie alike, every chunk holds the same types of layers, and layer j of every chunk has the same option;
embedding and head are free. A label is one way to treat the positions so far: time, U, state, activations, gradients
and the most that a microbatch holds on its way through the chunk, with the layouts of its first and its last position.
Everything that matters grows with each of these numbers, so non-dominated labels are enough.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright_formats.semantics.schedules.closed_form import step_time
from shardwright_search.solver.interleaved_problem import InFlight, InterleavedBounds, InterleavedProblem
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Options, Solution
from shardwright_search.step.memory import LayerMemory, StageMemory, layer_passes
from shardwright_search.step.pareto import Ints, Numbers, non_dominated, pairs

_MAX_AT_ONCE = 100_000
_GUESSED = 200
"""Labels of a guess that are extended to the next position."""


class _ChunkLabels(NamedTuple):
    """Ways to treat the first positions of a chunk, one entry each."""

    time_ps: Numbers
    exposed_ps: Numbers
    state_bytes: Numbers
    activation_bytes: Numbers
    gradient_bytes: Numbers
    """Once they are made, with the sums that are kept in addition to them."""
    peak_bytes: Numbers
    """The most that one microbatch holds on its way."""
    making_bytes: Numbers
    """The most that it holds in a backward pass that makes the gradients on its way."""
    input_layout: Ints
    output_layout: Ints
    parent: Ints
    option: Ints

    def take(self, rows: Ints) -> "_ChunkLabels":
        return _ChunkLabels._make(column[rows] for column in self)


class _Outer(NamedTuple):
    """The bytes that the embedding or the head adds to a stage and to the chunk that it is with."""

    state_bytes: Numbers
    activation_bytes: Numbers
    gradient_bytes: Numbers
    peaks: tuple[Numbers, Numbers]
    """The peaks of that chunk, as those of labels."""


class _Whole(NamedTuple):
    """Labels with an embedding and a head, one entry each."""

    objective_ps: Numbers
    label: Ints
    embedding: Ints
    head: Ints


class Interleaved:
    """A configuration of the interleaved schedule, bounded and ready to be solved."""

    def __init__(self, problem: InterleavedProblem) -> None:
        self._problem, options = problem, problem.group.options
        self._embedding, self._head = options[problem.embedding], options[problem.head]
        self._bounds = InterleavedBounds(problem)
        self._resident_sums = _sums_of_moments([moment for moments in problem.moments_in_flight for moment in moments])

    @property
    def relaxed_bound_ps(self) -> float:
        """Quick lower bound on T."""
        return self._bounds.relaxed_ps

    @property
    def lower_ps(self) -> float:
        """Lower bound on T, which takes layouts into account."""
        return self._bounds.lower_ps

    def guess(self, below_ps: float) -> PricedSolution | None:
        """Return a plan with T < below_ps that the most promising labels lead to; None: they lead to none."""
        return next(iter(self._best_plans(self._levels(below_ps, lambda made: None, _GUESSED), below_ps, 1)), None)

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[PricedSolution, ...]:
        """Return plans with T < below_ps: the best one first and up to `most`; none: there is none in the space."""
        return self._best_plans(self._levels(below_ps, tick), below_ps, most)

    def _levels(self, below_ps: float, tick: Callable[[int], None], extended: int | None = None) -> list[_ChunkLabels]:
        """Return labels of the first positions, from none on; of each only so many are extended, if not all."""
        none, zero = np.zeros(1), np.zeros(1, np.int64)
        levels = [_ChunkLabels(none, none, none, none, none, none, none, zero, zero, zero, zero)]
        for position in range(len(self._problem.positions)):
            tick(len(levels[-1].time_ps))
            levels.append(self._next(levels[-1], position, below_ps, extended))
        tick(len(levels[-1].time_ps))
        return levels

    def _best_plans(self, levels: Sequence[_ChunkLabels], below_ps: float, most: int) -> tuple[PricedSolution, ...]:
        """Return the best plans that labels lead to."""
        plans: list[PricedSolution] = []
        count, outer = len(levels[-1].time_ps), len(self._embedding.time_ps) * len(self._head.time_ps)
        block = max(1, _MAX_AT_ONCE // outer)
        for start in range(0, count, block):
            whole = self._whole(levels[-1], np.arange(start, min(start + block, count)))
            rows = np.flatnonzero(whole.objective_ps < below_ps)
            best = rows[np.argsort(whole.objective_ps[rows], kind="stable")][:most]
            plans += [
                PricedSolution(float(whole.objective_ps[row]), self._decoded(levels, whole, int(row))) for row in best
            ]
        return tuple(sorted(plans, key=lambda plan: plan.objective_ps)[:most])

    def _next(self, before: _ChunkLabels, position: int, below_ps: float, extended: int | None) -> _ChunkLabels:
        """Return labels with the next position that may be part of the best plan."""
        problem, labels = self._problem, self._extended(before, position)
        fits = self._memory(labels, problem.moments_in_flight[1]) <= problem.group.budget_bytes
        least = self._bounds.after(position + 1, np.stack(labels[:5]), labels.input_layout, labels.output_layout)
        rows = np.flatnonzero(fits & (least < below_ps))
        if extended is not None and len(rows) > extended:
            rows = np.sort(rows[np.argpartition(least[rows], extended)[:extended]])
        labels = labels.take(rows)
        key = labels.input_layout * problem.group.redistribution_ps.shape[1] + labels.output_layout
        return labels.take(np.sort(non_dominated(self._compared(labels), key)))

    def _extended(self, before: _ChunkLabels, position: int) -> _ChunkLabels:
        """Return every label with every option of the next position."""
        problem = self._problem
        options = problem.group.options[problem.positions[position]]
        if position == len(problem.positions) - 1 and problem.frees_outputs:
            # The gradient of what the chunk gives out, which `_peak_bytes` counts, has taken the output's place.
            sent = problem.boundary_bytes[problem.positions[-1]][options.output_layout]
            options = options._replace(workspace_bytes=np.maximum(0.0, options.workspace_bytes - sent))
        parent, option = pairs(np.arange(len(before.time_ps)), len(options.time_ps))
        time = before.time_ps[parent] + options.time_ps[option]
        if position:
            moves = problem.group.redistribution_ps[problem.positions[position - 1]]
            time = time + moves[before.output_layout[parent], options.input_layout[option]]
        memory = _memory_of(before).take(parent).then(_passes(options).take(option))
        return _ChunkLabels(
            time,
            before.exposed_ps[parent] + options.exposed_ps[option],
            before.state_bytes[parent] + options.state_bytes[option],
            memory.resident[:, 0],
            before.gradient_bytes[parent] + (options.late_bytes + options.sum_bytes)[option],
            memory.peak[:, 0],
            memory.peak[:, 1],
            before.input_layout[parent] if position else options.input_layout[option],
            options.output_layout[option],
            parent,
            option,
        )

    def _compared(self, labels: _ChunkLabels) -> Numbers:
        """Return the numbers [labels, columns] of which none may be larger for a label to replace another.

        A plan's T is a number times a chunk's time and U, and a rest, or another such sum if that is larger.
        What a stage holds at a moment is v times a chunk's states, some times its activations and its gradients, and a
        peak or what follows.
        """
        p, v, m = self._problem.pp_size, self._problem.num_chunks, self._problem.num_microbatches
        # Of long steps with as many microbatches as stages or more, the first sum is the larger one.
        few = m < p or bool((labels.time_ps < 2 * m).any())
        forms = self._problem.closed_forms[: 1 + few]
        costs = [(form.fill * p + form.steady) * labels.time_ps + form.once * labels.exposed_ps for form in forms]
        added = (0.0, labels.peak_bytes, labels.making_bytes)
        held = [
            v * labels.state_bytes + count * labels.activation_bytes + made * labels.gradient_bytes + added[peak]
            for peak, count, made in self._resident_sums
        ]
        return np.stack([*costs, *held], 1)

    def _memory(
        self,
        labels: _ChunkLabels,
        moments: Sequence[InFlight],
        outer: "_Outer | None" = None,
        sent: Numbers | float = 0.0,
    ) -> Numbers:
        """Return the most bytes that a stage holds, by label, with outputs of `sent` bytes of one microbatch.

        `outer` is what the embedding or the head adds to the chunk that it is with.
        """
        most = np.zeros(1)
        for moment in moments:
            held = moment.chunks * labels.activation_bytes + moment.made * labels.gradient_bytes - moment.freed * sent
            peaks = labels.peak_bytes, labels.making_bytes
            if outer is not None:
                held = held + moment.outer * outer.activation_bytes + moment.outer_made * outer.gradient_bytes
                peaks = outer.peaks if moment.at_outer else peaks
            most = np.maximum(most, held + peaks[moment.makes])
        states = self._problem.num_chunks * labels.state_bytes
        return np.asarray(states + most + (0.0 if outer is None else outer.state_bytes))

    def _whole(self, chains: _ChunkLabels, rows: Ints) -> _Whole:
        """Return some labels with every embedding and head that fit."""
        problem, embedding, head = self._problem, self._embedding, self._head
        index, first, last = np.indices((len(rows), len(embedding.time_ps), len(head.time_ps))).reshape(3, -1)
        label = rows[index]
        labels = chains.take(label)
        times = self._stage_times(labels, first, last)
        exposed = problem.num_chunks * labels.exposed_ps
        exposed = exposed + np.maximum(embedding.exposed_ps[first], head.exposed_ps[last])
        objective = step_time(problem.closed_forms, times.sum(0), times.max(0), exposed)
        objective = objective + problem.tied_ps[embedding.input_layout[first], head.output_layout[last]]
        fits = self._peak_bytes(labels, embedding.take(first), head.take(last)) <= problem.group.budget_bytes
        return _Whole(np.where(fits, objective, np.inf), label, first, last)

    def _stage_times(self, labels: _ChunkLabels, first: Ints, last: Ints) -> Numbers:
        """Return A' of every stage [stages, labels]."""
        problem, embedding, head = self._problem, self._embedding, self._head
        v, moves, kind = problem.num_chunks, problem.group.redistribution_ps, problem.positions[-1]
        wrap = moves[kind][labels.output_layout, labels.input_layout]
        sends = problem.sends_ps[:, kind][:, labels.output_layout]
        times = v * (labels.time_ps + wrap)[None, :] + np.zeros((problem.pp_size, 1))
        times[:-1] += v * sends[:-1]
        times[1:] += v * sends[:-1]
        times[0] += (v - 1) * sends[-1] + embedding.time_ps[first] - wrap
        times[0] += moves[problem.embedding][embedding.output_layout[first], labels.input_layout]
        times[-1] += (v - 1) * sends[-1] + head.time_ps[last]
        times[-1] += moves[kind][labels.output_layout, head.input_layout[last]]
        return np.asarray(times)

    def _peak_bytes(self, labels: _ChunkLabels, embedding: Options, head: Options) -> Numbers:
        """Return the most bytes that any stage holds, by label.

        Every chunk but the very first holds what it received of each microbatch in flight, and every stage what it is
        receiving for the next pass and, of one microbatch, the gradients of what it received and of what it gave out.
        """
        problem = self._problem
        received = problem.boundary_bytes[problem.positions[-1]][labels.output_layout]
        ahead = self._ahead(embedding, labels)
        labels = labels._replace(
            activation_bytes=labels.activation_bytes + received,
            peak_bytes=labels.peak_bytes + received,
            making_bytes=labels.making_bytes + received,
        )
        behind = _memory_of(labels).then(_passes(head))
        first, middle, last = problem.moments_in_flight
        peaks = (
            self._memory(labels, first, _outer(embedding, ahead, received), received),
            # Of two stages none is between the others.
            self._memory(labels, middle if problem.pp_size > 2 else (), sent=received),
            self._memory(labels, last, _outer(head, behind), received),
        )
        return np.asarray(np.maximum.reduce(peaks) + 3 * received)

    def _ahead(self, embedding: Options, labels: _ChunkLabels) -> StageMemory:
        """Return the embedding with a chunk behind it."""
        nothing = np.zeros((len(labels.time_ps), 2))
        before, chunk = StageMemory(nothing, nothing).then(_passes(embedding)), _memory_of(labels)
        made = np.stack([np.zeros_like(labels.gradient_bytes), labels.gradient_bytes], -1)
        peak = np.maximum(before.peak + made, before.resident + chunk.peak)
        return StageMemory(before.resident + chunk.resident, peak)

    def _decoded(self, levels: Sequence[_ChunkLabels], whole: _Whole, row: int) -> Solution:
        problem = self._problem
        label, chain = int(whole.label[row]), list[int]()
        for level in reversed(levels[1:]):
            chain.insert(0, int(level.option[label]))
            label = int(level.parent[label])
        layers = chain * (problem.pp_size * problem.num_chunks)
        share = len(layers) // problem.pp_size
        ends = tuple(1 + share * (stage + 1) for stage in range(problem.pp_size - 1))
        options = (int(whole.embedding[row]), *layers, int(whole.head[row]))
        return Solution((*ends, len(options)), options, (0,) * problem.pp_size)


def _passes(options: Options) -> LayerMemory:
    """Return what one microbatch holds of a layer [options, kinds of passes]."""
    return layer_passes(options.late_bytes + options.sum_bytes, options.activation_bytes, options.workspace_bytes)


def _memory_of(labels: _ChunkLabels) -> StageMemory:
    """Return the memory of labels [labels, kinds of passes]: of passes that make no gradients, and of those that do."""
    peaks = np.stack([labels.peak_bytes, labels.making_bytes], -1)
    return StageMemory(np.broadcast_to(labels.activation_bytes[:, None], peaks.shape), peaks)


def _outer(options: Options, memory: StageMemory, received: Numbers | float = 0.0) -> _Outer:
    """Return what options of the embedding, whose chunk receives nothing, or of the head add."""
    return _Outer(
        state_bytes=options.state_bytes,
        activation_bytes=options.activation_bytes - received,
        gradient_bytes=options.late_bytes + options.sum_bytes,
        peaks=(memory.peak[:, 0], memory.peak[:, 1]),
    )


def _sums_of_moments(moments: Sequence[InFlight]) -> list[tuple[int, int, int]]:
    """Return what is held at moments in addition to v times the states: a peak, chunks' activations, and gradients.

    Of peaks 0 is none: activations count once more, where a workspace comes behind a chunk, and gradients, where one
    comes ahead of it. Sums between others are left out: what is no larger in those is no larger in these.
    """
    behind = {(one.chunks + 1, one.made) for one in moments}
    ahead = {(one.chunks, one.made + one.makes) for one in moments if one.at_outer}
    peaks = [{(one.chunks, one.made) for one in moments if one.makes is makes} for makes in (False, True)]
    return [(peak, *corner) for peak, points in enumerate((behind | ahead, *peaks)) for corner in _corners(points)]


def _corners(points: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the corners of the convex hull, in order."""
    halves = []
    for ordered in (sorted(points), sorted(points, reverse=True)):
        half: list[tuple[int, int]] = []
        for point in ordered:
            while len(half) > 1 and _turn(half[-2], half[-1], point) <= 0:
                half.pop()
            half.append(point)
        halves += half
    return sorted(set(halves))


def _turn(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    """Return how the way from a to b to c turns; more than 0: left."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
