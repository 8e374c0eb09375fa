"""The best plan of an interleaved schedule in a restricted space: equal chunks, equal strategies at each position.

Positions may be missing at the start of the first chunk and at the end of the last one. All stages are placed alike,
every chunk holds the same types of layers at the same positions, and a position has the same option in every chunk; the
options of embedding and head are free.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.schedules.schedule import step_time
from shardwright_search.solver.interleaved_problem import InFlight, InterleavedBounds, InterleavedProblem, Place
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Options, Solution
from shardwright_search.step.memory import LayerMemory, StageMemory, layer_passes
from shardwright_search.step.pareto import Ints, Numbers, non_dominated, pairs

# Labels of the interleaved schedule: choices of options for the first positions of a chunk, and their comparison.
#
# A chunk with missing positions has costs of its own, so that a label consists of one chain for each such range of
# positions, and one for all positions. Everything that matters grows with each number of a chain, so non-dominated
# labels are enough; weighted sums of several numbers are compared in place of the numbers.


class Chain(NamedTuple):
    """Ways to choose options for the positions so far of one range, one entry for each way."""

    time_ps: Numbers
    exposed_ps: Numbers
    state_bytes: Numbers
    activation_bytes: Numbers
    gradient_bytes: Numbers
    """Bytes of the gradients once they are made, with the sums that are kept in addition to them."""
    peak_bytes: Numbers
    """The most that one microbatch holds in a pass that makes no gradients."""
    making_bytes: Numbers
    """The most that one microbatch holds in a backward pass that makes the gradients, these included."""
    host_bytes: Numbers
    input_layout: Ints
    output_layout: Ints

    def take(self, rows: Ints) -> "Chain":
        """Return the ways in these rows."""
        return Chain._make(column[rows] for column in self)

    @property
    def memory(self) -> StageMemory:
        """Return the bytes of one micro-batch [labels, 2]: in passes that make no gradients, and that make them."""
        peaks = np.stack([self.peak_bytes, self.making_bytes], -1)
        return StageMemory(np.broadcast_to(self.activation_bytes[:, None], peaks.shape), peaks)

    def then(self, options: Options, redistribution_ps: Numbers | None) -> "Chain":
        """Return each way with an option of the next position; `redistribution_ps` None: it is the range's first."""
        memory = self.memory.then(passes_of(options))
        first = redistribution_ps is None
        return Chain(
            self.time_ps + options.time_ps + (0.0 if redistribution_ps is None else redistribution_ps),
            self.exposed_ps + options.exposed_ps,
            self.state_bytes + options.state_bytes,
            memory.resident[:, 0],
            self.gradient_bytes + options.late_bytes + options.sum_bytes,
            memory.peak[:, 0],
            memory.peak[:, 1],
            self.host_bytes + options.host_bytes,
            options.input_layout if first else self.input_layout,
            options.output_layout,
        )


class ChunkLabels(NamedTuple):
    """Ways to choose options for the first positions of a chunk, one entry for each way."""

    chains: tuple[Chain, ...]
    """Numbers of the ways, by range of positions."""
    parent: Ints
    option: Ints

    def take(self, rows: Ints) -> "ChunkLabels":
        """Return the labels in these rows."""
        return ChunkLabels(tuple(chain.take(rows) for chain in self.chains), self.parent[rows], self.option[rows])


def passes_of(options: Options) -> LayerMemory:
    """Return a layer's bytes for one micro-batch [options, 2]: in passes that make no gradients, and that make them."""
    return layer_passes(options.late_bytes + options.sum_bytes, options.activation_bytes, options.workspace_bytes)


class _Held(NamedTuple):
    """The memory of a stage at a moment as a sum: a weight for each range's numbers, and a peak of the active chunk."""

    peak: int
    """Index of the peak: 0 for none, 1 for passes that make no gradients, 2 for the others."""
    worked_on: int
    """Index of the active chunk's range; 0 without a peak."""
    states: tuple[float, ...]
    """How often the states of each range count; `activations` and `gradients` likewise."""
    activations: tuple[float, ...]
    gradients: tuple[float, ...]

    def bytes(self, chains: Sequence[Chain]) -> Numbers:
        """Return the bytes of this sum for each label."""
        held = np.zeros(len(chains[0].time_ps))
        for chain, states, activations, gradients in zip(
            chains, self.states, self.activations, self.gradients, strict=True
        ):
            held += states * chain.state_bytes + activations * chain.activation_bytes + gradients * chain.gradient_bytes
        worked_on = chains[self.worked_on]
        return held + (0.0, worked_on.peak_bytes, worked_on.making_bytes)[self.peak]


class Comparison:
    """The columns in which one label must be no worse to dominate another.

    T is a weighted sum of the sum of A', the largest A' and the largest U: there is one column for each place of the
    slowest stage and each place of the stage with the largest U. The memory of a stage at a moment is a weighted sum of
    the states, activations and gradients of its chunks, plus the peak of the active chunk if it is there.
    """

    def __init__(self, problem: InterleavedProblem) -> None:
        self._problem = problem
        self.held = tuple(_sums_of_moments(problem))

    def columns(self, labels: ChunkLabels) -> Numbers:
        """Return the numbers to compare [labels, columns]."""
        problem, m = self._problem, self._problem.num_microbatches
        # If a step is long and has at least as many microbatches as stages, the first closed form is the larger one.
        few = m < problem.pp_size or bool((labels.chains[0].time_ps < 2 * m).any())
        times, exposed = (np.stack([chain[number] for chain in labels.chains]) for number in range(2))
        costs = [by_time @ times + by_exposed @ exposed for by_time, by_exposed in self._costs(1 + few)]
        hosts = hosted(problem, labels.chains) if problem.group.offloads else []
        return np.stack([*costs, *(sum_of.bytes(labels.chains) for sum_of in self.held), *hosts], 1)

    def _costs(self, forms: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield how often T counts the time and the U of each range, for each slowest stage and stage with most U."""
        problem, v = self._problem, self._problem.num_chunks
        by_place = {place: problem.by_span(place, v, place is not Place.MIDDLE) for place in problem.places}
        total = (
            problem.by_span(Place.MIDDLE, (problem.pp_size - 2) * v, 0) + by_place[Place.FIRST] + by_place[Place.LAST]
        )
        distinct = {tuple(counts.tolist()): counts for counts in by_place.values()}.values()
        for form in problem.closed_forms[:forms]:
            for slowest in distinct:
                for last in distinct:
                    yield form.fill * total + form.steady * slowest, form.once * last


def hosted(problem: InterleavedProblem, chains: Sequence[Chain]) -> list[Numbers]:
    """Return the host bytes of a stage at each place, by label; embedding and head take none."""
    v = problem.num_chunks
    counts = (problem.by_span(place, v, place is not Place.MIDDLE) for place in problem.places)
    return [np.asarray(sum(n * chain.host_bytes for n, chain in zip(each, chains, strict=True))) for each in counts]


def _sums_of_moments(problem: InterleavedProblem) -> Iterator[_Held]:
    """Yield the memory sums of all moments: states, activations and gradients of chunks, and a peak.

    Peak 0 is none: the active chunk's activations count once more, for a workspace after the chunk, or its gradients,
    for a workspace before it. Sums that lie between others are left out: a label that is no larger in the others is no
    larger in these.
    """
    points: dict[_Held, set[tuple[float, float]]] = {}
    for place, moments in zip(Place, problem.moments_in_flight, strict=True):
        if place in problem.places:
            for held in (each for moment in moments for each in _sums_of(problem, place, moment)):
                rest = held._replace(activations=held.activations[1:], gradients=held.gradients[1:])
                points.setdefault(rest, set()).add((held.activations[0], held.gradients[0]))
    for rest in sorted(points):
        for activations, gradients in _corners(points[rest]):
            counts = (activations, *rest.activations), (gradients, *rest.gradients)
            yield rest._replace(activations=counts[0], gradients=counts[1])


def _sums_of(problem: InterleavedProblem, place: Place, moment: InFlight) -> Iterator[_Held]:
    """Yield the possible memory sums of a stage at a moment: at the active chunk's peak, and outside of the chunk."""
    worked_on = problem.span_at(place) if moment.at_outer else 0
    here = np.arange(len(problem.spans.ranges)) == worked_on
    states = problem.by_span(place, problem.num_chunks, place is not Place.MIDDLE)
    activations = problem.by_span(place, moment.chunks, moment.outer)
    gradients = problem.by_span(place, moment.made, moment.outer_made)
    sums = [(1 + moment.makes, worked_on, activations, gradients), (0, 0, activations + here, gradients)]
    if moment.at_outer:
        sums.append((0, 0, activations, gradients + moment.makes * here))
    for peak, span, *counts in sums:
        yield _Held(peak, span, *(tuple(each.tolist()) for each in (states, *counts)))


def _corners(points: set[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of the convex hull of the points, sorted."""
    halves = []
    for ordered in (sorted(points), sorted(points, reverse=True)):
        half: list[tuple[float, float]] = []
        for point in ordered:
            # A weighted sum is largest at a corner: points inside of the hull decide nothing.
            while len(half) > 1 and _turn(half[-2], half[-1], point) <= 0:
                half.pop()
            half.append(point)
        halves += half
    return sorted(set(halves))


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    """Return the orientation of the points a, b, c; above 0: a left turn."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


_MAX_AT_ONCE = 100_000
_GUESSED = 200
"""Most labels of a guess that are extended to the next position."""


class _Outer(NamedTuple):
    """The bytes of a chunk together with the embedding or the head."""

    state_bytes: Numbers
    activation_bytes: Numbers
    gradient_bytes: Numbers
    peaks: tuple[Numbers, Numbers]
    """The peaks of a pass that makes no gradients, and of one that does."""


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
        self._bounds, self._comparison = InterleavedBounds(problem), Comparison(problem)

    @property
    def relaxed_bound_ps(self) -> float:
        """Return a lower bound on the step time T that is quick to compute."""
        return self._bounds.relaxed_ps

    @property
    def lower_ps(self) -> float:
        """Lower bound on the step time T, which takes layouts into account."""
        return self._bounds.lower_ps

    def guess(self, below_ps: float) -> PricedSolution | None:
        """Return a plan with T < below_ps from the most promising labels; None if they have none."""
        return next(iter(self._best_plans(self._levels(below_ps, lambda made: None, _GUESSED), below_ps, 1)), None)

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[PricedSolution, ...]:
        """Return plans with T < below_ps, the best one first and up to `most`; empty if the space has none."""
        return self._best_plans(self._levels(below_ps, tick), below_ps, most)

    def _levels(self, below_ps: float, tick: Callable[[int], None], extended: int | None = None) -> list[ChunkLabels]:
        """Return the labels of the first 0, 1, ... positions; `extended`: most labels of each level that are kept."""
        none, zero = np.zeros(1), np.zeros(1, np.int64)
        chain = Chain(none, none, none, none, none, none, none, none, zero, zero)
        levels = [ChunkLabels((chain,) * len(self._problem.spans.ranges), zero, zero)]
        for position in range(len(self._problem.positions)):
            tick(len(levels[-1].parent))
            levels.append(self._next(levels[-1], position, below_ps, extended))
        tick(len(levels[-1].parent))
        return levels

    def _best_plans(self, levels: Sequence[ChunkLabels], below_ps: float, most: int) -> tuple[PricedSolution, ...]:
        """Return up to `most` of the best plans with T < below_ps that the labels represent."""
        plans: list[PricedSolution] = []
        count, outer = len(levels[-1].parent), len(self._embedding.time_ps) * len(self._head.time_ps)
        # Every label is combined with every embedding and head: in blocks, to limit this process's memory.
        block = max(1, _MAX_AT_ONCE // outer)
        for start in range(0, count, block):
            whole = self._whole(levels[-1], np.arange(start, min(start + block, count)))
            rows = np.flatnonzero(whole.objective_ps < below_ps)
            best = rows[np.argsort(whole.objective_ps[rows], kind="stable")][:most]
            plans += [
                PricedSolution(float(whole.objective_ps[row]), self._decoded(levels, whole, int(row))) for row in best
            ]
        return tuple(sorted(plans, key=lambda plan: plan.objective_ps)[:most])

    def _next(self, before: ChunkLabels, position: int, below_ps: float, extended: int | None) -> ChunkLabels:
        """Return labels with the next position that may be part of the best plan."""
        labels = self._extended(before, position)
        most = labels.chains[0]
        numbers = np.stack([np.stack(chain[:5]) for chain in labels.chains])
        least = self._bounds.after(position + 1, numbers, most.input_layout, most.output_layout)
        rows = np.flatnonzero(self._may_fit(most) & (least < below_ps))
        if extended is not None and len(rows) > extended:
            rows = np.sort(rows[np.argpartition(least[rows], extended)[:extended]])
        labels = labels.take(rows)
        key = np.zeros(len(rows), np.int64)
        for chain in labels.chains:
            for layout in (chain.input_layout, chain.output_layout):
                key = key * self._problem.group.redistribution_ps.shape[1] + layout
        return labels.take(np.sort(non_dominated(self._comparison.columns(labels), key)))

    def _may_fit(self, chain: Chain) -> NDArray[np.bool_]:
        """Return which ways to fill whole chunks fit in a middle stage, or in the last of two.

        With two stages all do if positions of the last chunk are missing, because the last stage may hold less.
        """
        problem = self._problem
        if problem.pp_size == 2 and problem.lacking[1]:
            return np.ones(len(chain.time_ps), bool)
        return np.asarray(self._held_bytes(chain, problem.moments_in_flight[1]) <= problem.group.budget_bytes)

    def _extended(self, before: ChunkLabels, position: int) -> ChunkLabels:
        """Return every label with every option of the next position."""
        problem = self._problem
        treated = problem.group.options[problem.positions[position]]
        parent, option = pairs(np.arange(len(before.parent)), len(treated.time_ps))
        options = treated.take(option)
        chains = []
        for chain, held in zip(before.take(parent).chains, problem.spans.ranges, strict=True):
            if position not in held:
                chains.append(chain)
                continue
            moves = None
            if position > held[0]:
                before_ps = problem.group.redistribution_ps[problem.positions[position - 1]]
                moves = before_ps[chain.output_layout, options.input_layout]
            chains.append(chain.then(self._freed(options, position) if position == held[-1] else options, moves))
        return ChunkLabels(tuple(chains), parent, option)

    def _freed(self, options: Options, position: int | None = None) -> Options:
        """Return options of a chunk's last position with the output's bytes taken off the workspace if it is freed.

        The gradient of the chunk's output, which `_peak_bytes` counts, has taken the output's place. Without a position
        they are options of an embedding that is alone in its chunk.
        """
        problem = self._problem
        kind = problem.embedding if position is None else problem.positions[position]
        sent = problem.boundary_bytes[kind][options.output_layout] * problem.frees_outputs
        return options._replace(workspace_bytes=np.maximum(0.0, options.workspace_bytes - sent))

    def _held_bytes(
        self,
        chain: Chain,
        moments: Sequence[InFlight],
        outer: "_Outer | None" = None,
        received: Numbers | float = 0.0,
    ) -> Numbers:
        """Return the most bytes that a stage holds at these moments, by label.

        `outer`: the chunk with the embedding or the head. `received`: bytes of a microbatch that each other chunk
        received.
        """
        most = np.zeros(1)
        for moment in moments:
            chunks, made = moment.chunks - moment.outer, moment.made - moment.outer_made
            held = chunks * (chain.activation_bytes + received) + made * chain.gradient_bytes - moment.freed * received
            peaks = chain.peak_bytes + received, chain.making_bytes + received
            if outer is not None:
                held = held + moment.outer * outer.activation_bytes + moment.outer_made * outer.gradient_bytes
                peaks = outer.peaks if moment.at_outer else peaks
            most = np.maximum(most, held + peaks[moment.makes])
        states = (self._problem.num_chunks - (outer is not None)) * chain.state_bytes
        return np.asarray(states + most + (0.0 if outer is None else outer.state_bytes))

    def _whole(self, chunks: ChunkLabels, rows: Ints) -> _Whole:
        """Return the labels in `rows` with every option of embedding and head; if they do not fit, at infinite cost."""
        problem, embedding, head = self._problem, self._embedding, self._head
        index, first, last = np.indices((len(rows), len(embedding.time_ps), len(head.time_ps))).reshape(3, -1)
        label = rows[index]
        labels = chunks.take(label)
        ends = embedding.take(first), head.take(last)
        times, exposed = self._stage_times(labels, *ends), self._stage_ends(labels, *ends)
        objective = step_time(problem.closed_forms, times.sum(0), times.max(0), exposed.max(0))
        objective = objective + problem.tied_ps[ends[0].input_layout, ends[1].output_layout]
        fits = self._peak_bytes(labels, *ends) <= problem.group.budget_bytes
        if problem.group.offloads:
            fits = fits & (np.max(hosted(problem, labels.chains), 0) <= problem.group.host_budget_bytes)
        if problem.lacking[0] == len(problem.positions):
            fits = fits & (ends[0].output_layout == labels.chains[0].output_layout)
        return _Whole(np.where(fits, objective, np.inf), label, first, last)

    def _stage_times(self, labels: ChunkLabels, embedding: Options, head: Options) -> Numbers:
        """Return A', the time of a microbatch with sends and redistribution, of every stage [stages, labels]."""
        problem, (chain, *_) = self._problem, labels.chains
        v, moves, kinds = problem.num_chunks, problem.group.redistribution_ps, problem.positions
        whole, (ahead, behind) = len(kinds), problem.lacking
        first, last = labels.chains[problem.spans.first], labels.chains[problem.spans.last]
        # A chunk receives the outputs of the one before, in their layout; the first one receives from the embedding.
        wrap = moves[kinds[-1]][chain.output_layout, chain.input_layout]
        sends = problem.sends_ps[:, kinds[-1]][:, chain.output_layout]
        times = v * (chain.time_ps + wrap)[None, :] + np.zeros((problem.pp_size, 1))
        # Every chunk crosses each cut, and that takes the time of both stages.
        times[:-1] += v * sends[:-1]
        times[1:] += v * sends[:-1]
        times[[0, -1]] += (v - 1) * sends[-1] - chain.time_ps
        times[0] += embedding.time_ps + first.time_ps - wrap
        times[-1] += head.time_ps + last.time_ps
        if ahead < whole:
            times[0] += moves[problem.embedding][embedding.output_layout, first.input_layout]
        if behind < whole:
            times[-1] += moves[kinds[whole - behind - 1]][last.output_layout, head.input_layout]
        else:
            times[-1] += moves[kinds[-1]][chain.output_layout, head.input_layout] - wrap
        return np.asarray(times)

    def _stage_ends(self, labels: ChunkLabels, embedding: Options, head: Options) -> Numbers:
        """Return U, the time once a step, of the first, the last and (if any) a middle stage [stages, labels]."""
        problem, chunk_ps = self._problem, labels.chains[0].exposed_ps
        ends = (embedding, problem.spans.first), (head, problem.spans.last)
        outer = [
            o.exposed_ps + labels.chains[span].exposed_ps + (problem.num_chunks - 1) * chunk_ps for o, span in ends
        ]
        return np.stack([*outer, problem.num_chunks * chunk_ps] if problem.pp_size > 2 else outer)

    def _peak_bytes(self, labels: ChunkLabels, embedding: Options, head: Options) -> Numbers:
        """Return the peak bytes of the fullest stage, by label.

        Every chunk except the very first holds the inputs that it received of each microbatch in flight. Every stage
        holds what it is receiving for the next pass, and the gradients of the inputs and outputs of one microbatch.
        """
        problem, chain = self._problem, labels.chains[0]
        received = problem.boundary_bytes[problem.positions[-1]][chain.output_layout]
        outer = {
            Place.FIRST: self._with_embedding(labels.chains[problem.spans.first], embedding),
            Place.LAST: _with_head(labels.chains[problem.spans.last], head, received),
        }
        moments = zip(Place, problem.moments_in_flight, strict=True)
        peaks = [
            self._held_bytes(chain, each, outer.get(place), received)
            for place, each in moments
            if place in problem.places
        ]
        return np.asarray(np.maximum.reduce(peaks) + 3 * received)

    def _with_embedding(self, chain: Chain, embedding: Options) -> _Outer:
        """Return the memory of the embedding together with the chunk after it."""
        if self._problem.lacking[0] == len(self._problem.positions):
            embedding = self._freed(embedding)
        nothing = np.zeros((len(chain.time_ps), 2))
        before = StageMemory(nothing, nothing).then(passes_of(embedding))
        made = np.stack([np.zeros_like(chain.gradient_bytes), chain.gradient_bytes], -1)
        peak = np.maximum(before.peak + made, before.resident + chain.memory.peak)
        return _outer(chain, embedding, StageMemory(before.resident + chain.memory.resident, peak))

    def _decoded(self, levels: Sequence[ChunkLabels], whole: _Whole, row: int) -> Solution:
        problem = self._problem
        label, chain = int(whole.label[row]), list[int]()
        for level in reversed(levels[1:]):
            chain.insert(0, int(level.option[label]))
            label = int(level.parent[label])
        layers, (ahead, behind) = chain * (problem.pp_size * problem.num_chunks), problem.lacking
        layers = layers[ahead : len(layers) - behind]
        options = (int(whole.embedding[row]), *layers, int(whole.head[row]))
        ends = tuple(1 + len(layers) * (stage + 1) // problem.pp_size for stage in range(problem.pp_size - 1))
        return Solution((*ends, len(options)), options, (0,) * problem.pp_size)


def _with_head(chain: Chain, head: Options, received: Numbers) -> _Outer:
    """Return the memory of the head together with the chunk before it, which has received `received` bytes."""
    chunk = chain._replace(
        activation_bytes=chain.activation_bytes + received,
        peak_bytes=chain.peak_bytes + received,
        making_bytes=chain.making_bytes + received,
    )
    return _outer(chain, head, chunk.memory.then(passes_of(head)))


def _outer(chain: Chain, options: Options, memory: StageMemory) -> _Outer:
    """Return the bytes of a chunk with the embedding or the head, given their memory for one microbatch together."""
    return _Outer(
        state_bytes=chain.state_bytes + options.state_bytes,
        activation_bytes=memory.resident[:, 0],
        gradient_bytes=chain.gradient_bytes + options.late_bytes + options.sum_bytes,
        peaks=(memory.peak[:, 0], memory.peak[:, 1]),
    )
