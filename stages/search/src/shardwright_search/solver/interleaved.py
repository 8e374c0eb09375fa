"""The best plan of an interleaved schedule in a stated space: equal chunks, the same strategies at each position.

All stages lie alike, every chunk holds the same types of layers, and layer j of every chunk has the same option;
embedding and head are free. A label is one way to treat the positions so far: time, U, state, activations and the most
that a microbatch holds on its way through the chunk, with the layouts of its first and its last position. Everything
that matters grows with each of these numbers, so non-dominated labels are enough.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright_search.solver.objective import step_time
from shardwright_search.solver.pareto import Ints, Numbers, non_dominated
from shardwright_search.solver.partition import Found
from shardwright_search.solver.problem import DeviceGroup, Options, Solution
from shardwright_search.solver.stage_bounds import Dual

__all__ = ["InFlight", "Interleaved", "InterleavedProblem"]

_MAX_AT_ONCE = 100_000


class InFlight(NamedTuple):
    """A moment of a stage's action list: what is in flight beside the microbatch and chunk that is worked on."""

    chunks: int
    """Activations held, each of one microbatch in one chunk."""
    outer: int
    """How many of them are of the chunk that the embedding or the head is with."""
    at_outer: bool
    """Whether that chunk is the one worked on."""


class InterleavedProblem(msgspec.Struct, frozen=True, eq=False):
    """Positions of a chunk, and how often and where a chunk is."""

    embedding: int
    """Type numbers."""
    positions: tuple[int, ...]
    head: int
    group: DeviceGroup
    pp_size: int
    num_chunks: int
    num_microbatches: int
    sends_ps: Numbers
    """[cuts, types, layouts]: over the cut after each stage, one way; the last from the last stage to the first."""
    moments_in_flight: tuple[tuple[InFlight, ...], ...]
    """Of the first stage, one in the middle (the first again if there is none), and the last."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tie_ps: Numbers


class _Labels(NamedTuple):
    time_ps: Numbers
    exposed_ps: Numbers
    state_bytes: Numbers
    activation_bytes: Numbers
    peak_bytes: Numbers
    input_layout: Ints
    output_layout: Ints
    parent: Ints
    option: Ints

    def take(self, rows: Ints) -> "_Labels":
        return _Labels._make(column[rows] for column in self)


class _Whole(NamedTuple):
    """Labels with an embedding and a head, one entry each."""

    objective_ps: Numbers
    label: Ints
    embedding: Ints
    head: Ints


class Interleaved:
    """A case of the interleaved schedule, bounded and ready to be solved."""

    def __init__(self, problem: InterleavedProblem) -> None:
        self._problem = problem
        costs = [o.time_ps for o in problem.group.options]
        busiest = problem.num_chunks, max(f.chunks + 1 for f in problem.moments_in_flight[1])
        memory = [busiest[0] * o.state_bytes + busiest[1] * o.activation_bytes for o in problem.group.options]
        counts = np.bincount(problem.positions, minlength=len(costs)).astype(float)[None, :]
        least = Dual(costs, memory).runs(counts, np.array([float(problem.group.budget_bytes)]))
        self.relaxed_bound_ps = self.lower_ps = float(
            self._lower(max(0.0, least[0])) if np.isfinite(least[0]) else np.inf
        )

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[Found, ...]:
        """Plans with T < below_ps: the best one first and up to `most`; none: there is none in the space."""
        levels = [self._first()]
        for position in range(1, len(self._problem.positions)):
            tick(len(levels[-1].output_layout))
            levels.append(self._next(levels[-1], position, below_ps))
        tick(len(levels[-1].output_layout))
        found: list[Found] = []
        block = max(1, _MAX_AT_ONCE // (len(self._outer[0].output_layout) * len(self._outer[1].input_layout)))
        for start in range(0, len(levels[-1].output_layout), block):
            whole = self._whole(levels[-1], np.arange(start, min(start + block, len(levels[-1].output_layout))))
            rows = np.flatnonzero(whole.objective_ps < below_ps)
            best = rows[np.argsort(whole.objective_ps[rows], kind="stable")][:most]
            found += [Found(float(whole.objective_ps[row]), self._decoded(levels, whole, int(row))) for row in best]
        return tuple(sorted(found, key=lambda one: one.objective_ps)[:most])

    @cached_property
    def _outer(self) -> tuple[Options, Options]:
        options = self._problem.group.options
        return options[self._problem.embedding], options[self._problem.head]

    @cached_property
    def _rest(self) -> Numbers:
        """[positions + 1]: the least time of the positions from one on."""
        least = [float(self._problem.group.options[kind].time_ps.min()) for kind in self._problem.positions]
        return np.array([sum(least[position:]) for position in range(len(least) + 1)])

    def _lower(self, chunk_ps: Numbers | float) -> Numbers:
        """No plan with a chunk of at least that time has a lower T."""
        problem, (embedding, head) = self._problem, self._outer
        outer = float(embedding.time_ps.min()), float(head.time_ps.min())
        total = problem.pp_size * problem.num_chunks * np.asarray(chunk_ps) + sum(outer)
        slowest = problem.num_chunks * np.asarray(chunk_ps) + max(outer)
        zero = np.zeros_like(total)
        return np.asarray(step_time(total, slowest, zero, problem.num_microbatches, problem.num_chunks))

    def _first(self) -> _Labels:
        options = self._problem.group.options[self._problem.positions[0]]
        rows = np.arange(len(options.input_layout))
        return self._filtered(
            _Labels(
                options.time_ps,
                options.exposed_ps,
                options.state_bytes + options.late_bytes,
                options.activation_bytes,
                options.activation_bytes + options.workspace_bytes,
                options.input_layout,
                options.output_layout,
                rows,
                rows,
            )
        )

    def _next(self, before: _Labels, position: int, below_ps: float) -> _Labels:
        problem = self._problem
        options = problem.group.options[problem.positions[position]]
        moves = problem.group.redistribution_ps[problem.positions[position - 1]]
        parent = np.repeat(np.arange(len(before.output_layout)), len(options.input_layout))
        option = np.tile(np.arange(len(options.input_layout)), len(before.output_layout))
        resident = before.activation_bytes[parent] + options.activation_bytes[option]
        labels = _Labels(
            before.time_ps[parent]
            + moves[before.output_layout[parent], options.input_layout[option]]
            + options.time_ps[option],
            before.exposed_ps[parent] + options.exposed_ps[option],
            before.state_bytes[parent] + (options.state_bytes + options.late_bytes)[option],
            resident,
            np.maximum(before.peak_bytes[parent], resident + options.workspace_bytes[option]),
            before.input_layout[parent],
            options.output_layout[option],
            parent,
            option,
        )
        fits = self._memory(labels, problem.moments_in_flight[1]) <= problem.group.budget_bytes
        within = (
            self._lower(labels.time_ps + self._rest[position + 1]) + problem.num_chunks * labels.exposed_ps < below_ps
        )
        return self._filtered(labels.take(np.flatnonzero(fits & within)))

    def _filtered(self, labels: _Labels) -> _Labels:
        key = labels.input_layout * self._problem.group.redistribution_ps.shape[1] + labels.output_layout
        return labels.take(np.sort(non_dominated(np.stack(labels[:5], 1), key)))

    def _memory(
        self,
        labels: _Labels,
        moments_in_flight: Sequence[InFlight],
        outer: Numbers | float = 0.0,
        outer_activation: Numbers | float = 0.0,
        outer_peak: Numbers | None = None,
    ) -> Numbers:
        """The most that a stage holds; `outer_peak` is the peak of the chunk that the embedding or the head is with."""
        most = np.zeros(1)
        for flight in moments_in_flight:
            peak = labels.peak_bytes if outer_peak is None or not flight.at_outer else outer_peak
            most = np.maximum(most, flight.chunks * labels.activation_bytes + flight.outer * outer_activation + peak)
        return np.asarray(self._problem.num_chunks * labels.state_bytes + outer + most)

    def _whole(self, chains: _Labels, rows: Ints) -> _Whole:
        """Some labels with every embedding and head that fit."""
        problem, (embedding, head) = self._problem, self._outer
        index, first, last = np.indices((len(rows), len(embedding.output_layout), len(head.input_layout))).reshape(
            3, -1
        )
        label = rows[index]
        labels = chains.take(label)
        times = self._stage_times(labels, first, last)
        ends = problem.num_chunks * labels.exposed_ps
        end = ends + np.maximum(embedding.exposed_ps[first], head.exposed_ps[last])
        objective = step_time(times.sum(0), times.max(0), end, problem.num_microbatches, problem.num_chunks)
        objective = objective + problem.tie_ps[embedding.input_layout[first], head.output_layout[last]]
        fits = self._fits(labels, first, last)
        return _Whole(np.where(fits, objective, np.inf), label, first, last)

    def _stage_times(self, labels: _Labels, first: Ints, last: Ints) -> Numbers:
        """[stages, labels]: A' of every stage."""
        problem, (embedding, head) = self._problem, self._outer
        p, v, moves = problem.pp_size, problem.num_chunks, problem.group.redistribution_ps
        kind = problem.positions[-1]
        wrap = moves[kind][labels.output_layout, labels.input_layout]
        sends = problem.sends_ps[:, kind][:, labels.output_layout]
        times = v * (labels.time_ps + wrap)[None, :] + np.zeros((p, 1))
        times[:-1] += v * sends[:-1]
        times[1:] += v * sends[:-1]
        times[0] += (v - 1) * sends[-1] + embedding.time_ps[first] - wrap
        times[0] += moves[problem.embedding][embedding.output_layout[first], labels.input_layout]
        times[-1] += (
            (v - 1) * sends[-1] + head.time_ps[last] + moves[kind][labels.output_layout, head.input_layout[last]]
        )
        return np.asarray(times)

    def _fits(self, labels: _Labels, first: Ints, last: Ints) -> NDArray[np.bool_]:
        """Whether the first, the last and all other stages stay within the budget.

        Every chunk but the very first holds what it received of each microbatch in flight, and every stage, of one
        microbatch, the gradients of what it received and of what it gave out.
        """
        problem, (embedding, head) = self._problem, self._outer
        received = problem.boundary_bytes[problem.positions[-1]][labels.output_layout]
        ahead = embedding.activation_bytes[first] + np.maximum(embedding.workspace_bytes[first], labels.peak_bytes)
        labels = labels._replace(
            activation_bytes=labels.activation_bytes + received, peak_bytes=labels.peak_bytes + received
        )
        behind = labels.activation_bytes + (head.activation_bytes + head.workspace_bytes)[last]
        needs = (
            self._memory(
                labels,
                problem.moments_in_flight[0],
                (embedding.state_bytes + embedding.late_bytes)[first],
                embedding.activation_bytes[first] - received,
                ahead,
            ),
            # Of two stages none is between the others.
            self._memory(labels, problem.moments_in_flight[1] if problem.pp_size > 2 else ()),
            self._memory(
                labels,
                problem.moments_in_flight[2],
                (head.state_bytes + head.late_bytes)[last],
                head.activation_bytes[last],
                np.maximum(labels.peak_bytes, behind),
            ),
        )
        return np.asarray(np.maximum.reduce(needs) + 2 * received <= problem.group.budget_bytes)

    def _decoded(self, levels: Sequence[_Labels], whole: _Whole, row: int) -> Solution:
        problem = self._problem
        label, chain = int(whole.label[row]), list[int]()
        for level in reversed(levels):
            chain.insert(0, int(level.option[label]))
            label = int(level.parent[label])
        layers = chain * (problem.pp_size * problem.num_chunks)
        share = len(layers) // problem.pp_size
        ends = tuple(1 + share * (stage + 1) for stage in range(problem.pp_size - 1))
        options = (int(whole.embedding[row]), *layers, int(whole.head[row]))
        return Solution((*ends, len(options)), options, (0,) * problem.pp_size)
