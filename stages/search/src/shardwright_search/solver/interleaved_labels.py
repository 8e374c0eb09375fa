"""Labels of the interleaved schedule: choices of options for the first positions of a chunk, and their comparison.

Chunks that lack positions have numbers of their own, so that a label is as many chains as there are such chunks, and
one of all positions. Everything that matters grows with each number, so non-dominated labels are enough; what grows
with several numbers at once is compared as one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardwright_search.solver.interleaved_problem import InFlight, InterleavedProblem, Place
from shardwright_search.solver.problem import Options
from shardwright_search.step.memory import LayerMemory, StageMemory, layer_passes
from shardwright_search.step.pareto import Ints, Numbers


class Chain(NamedTuple):
    """Ways to treat the positions so far of one range, one entry each."""

    time_ps: Numbers
    exposed_ps: Numbers
    state_bytes: Numbers
    activation_bytes: Numbers
    gradient_bytes: Numbers
    """Bytes once they are made, with the sums that are kept in addition to them."""
    peak_bytes: Numbers
    """The most that one microbatch holds on its way."""
    making_bytes: Numbers
    """The most that it holds in a backward pass that makes the gradients on its way."""
    host_bytes: Numbers
    input_layout: Ints
    output_layout: Ints

    def take(self, rows: Ints) -> "Chain":
        """Return the ways in these rows."""
        return Chain._make(column[rows] for column in self)

    @property
    def memory(self) -> StageMemory:
        """Return the memory of one micro-batch [labels, kinds of passes]: without and with gradients."""
        peaks = np.stack([self.peak_bytes, self.making_bytes], -1)
        return StageMemory(np.broadcast_to(self.activation_bytes[:, None], peaks.shape), peaks)

    def then(self, options: Options, redistribution_ps: Numbers | None) -> "Chain":
        """Return each way with an option of the next position; without redistribution it is the first of the range."""
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
    """Ways to treat the first positions of a chunk, one entry each."""

    chains: tuple[Chain, ...]
    """The ways by range of positions."""
    parent: Ints
    option: Ints

    def take(self, rows: Ints) -> "ChunkLabels":
        """Return the labels in these rows."""
        return ChunkLabels(tuple(chain.take(rows) for chain in self.chains), self.parent[rows], self.option[rows])


def passes_of(options: Options) -> LayerMemory:
    """Return the memory of a layer for one micro-batch [options, kinds of passes]."""
    return layer_passes(options.late_bytes + options.sum_bytes, options.activation_bytes, options.workspace_bytes)


class _Held(NamedTuple):
    """The memory of a stage at a moment as a sum: a weight for each range's numbers, and a peak of the active chunk."""

    peak: int
    """Index of the peak: 0 for none, 1 for passes that make no gradients, 2 for the others."""
    worked_on: int
    """Range of the chunk worked on; without a peak 0."""
    states: tuple[float, ...]
    """Counts by range."""
    activations: tuple[float, ...]
    gradients: tuple[float, ...]

    def bytes(self, chains: Sequence[Chain]) -> Numbers:
        """Return this sum's bytes for each label."""
        held = np.zeros(len(chains[0].time_ps))
        for chain, states, activations, gradients in zip(
            chains, self.states, self.activations, self.gradients, strict=True
        ):
            held += states * chain.state_bytes + activations * chain.activation_bytes + gradients * chain.gradient_bytes
        worked_on = chains[self.worked_on]
        return held + (0.0, worked_on.peak_bytes, worked_on.making_bytes)[self.peak]


class Comparison:
    """The columns in which one label must be no worse to dominate another.

    A plan's T is a number times the sum of A', another times the largest of them, and the largest U: there is such a
    sum for each place of the slowest stage and of that with the largest U.
    What a stage holds at a moment is so many chunks' states, activations and gradients, and a peak or what follows.
    """

    def __init__(self, problem: InterleavedProblem) -> None:
        self._problem = problem
        self.held = tuple(_sums_of_moments(problem))

    def columns(self, labels: ChunkLabels) -> Numbers:
        """Return the numbers to compare [labels, columns]."""
        problem, m = self._problem, self._problem.num_microbatches
        # Of long steps with as many microbatches as stages or more, the first sum is the larger one.
        few = m < problem.pp_size or bool((labels.chains[0].time_ps < 2 * m).any())
        times, exposed = (np.stack([chain[number] for chain in labels.chains]) for number in range(2))
        costs = [by_time @ times + by_exposed @ exposed for by_time, by_exposed in self._costs(1 + few)]
        hosts = hosted(problem, labels.chains) if problem.group.offloads else []
        return np.stack([*costs, *(sum_of.bytes(labels.chains) for sum_of in self.held), *hosts], 1)

    def _costs(self, forms: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield how often T counts the time and U of each range."""
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
    """Return the host memory that stages of each place take, by label; embedding and head take none."""
    v = problem.num_chunks
    counts = (problem.by_span(place, v, place is not Place.MIDDLE) for place in problem.places)
    return [np.asarray(sum(n * chain.host_bytes for n, chain in zip(each, chains, strict=True))) for each in counts]


def _sums_of_moments(problem: InterleavedProblem) -> Iterator[_Held]:
    """Yield the memory sums of all moments: a peak, and chunks' states, activations and gradients.

    Of peaks 0 is none: activations count once more, where a workspace follows a chunk, and gradients, where one
    comes ahead of it. Sums between others are left out: what is no larger in those is no larger in these.
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
    """Yield the possible memory sums of a stage at a moment, at the active chunk's peak and right after it."""
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
    """Return the corners of the convex hull, in order."""
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
