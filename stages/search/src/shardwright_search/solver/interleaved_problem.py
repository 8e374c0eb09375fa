"""A configuration of the interleaved schedule as bare numbers, and lower bounds on its step time.

Chunks hold the same positions, except that some may be missing at the start of the first chunk and at the end of the
last one: the embedding and the head take their places. A stage's memory is the most that it holds at some moments of
its action list.
"""

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright.plan.schedules.schedule import ClosedForm, PipelineSchedule
from shardwright_search.solver.problem import DeviceGroup, Options
from shardwright_search.solver.stage_options import Dual, rounded_down
from shardwright_search.step.memory import PassCounts, pass_counts
from shardwright_search.step.pareto import Ints, Numbers

_ROUNDS = 4
"""Rounds of one microbatch for each stage, after which further ones bring no new moment."""


class Place(Enum):
    """The place of a stage in the pipeline: first, middle or last."""

    FIRST = "first"
    """It has the embedding."""
    MIDDLE = "middle"
    """It has neither."""
    LAST = "last"
    """It has the head."""


class InFlight(NamedTuple):
    """The counts at a moment of a stage's action list, without the microbatch and chunk that is worked on."""

    chunks: int
    """Activations held, each of one microbatch in one chunk."""
    outer: int
    """Activations held of the chunk that the embedding or the head is with; a stage in the middle has no such chunk."""
    freed: int
    """Outputs of these activations whose memory is free, because the next stage has received them."""
    at_outer: bool
    """True if the chunk with the embedding or the head is the one worked on."""
    made: int
    """Chunks whose gradients exist, because they have been through a backward pass before."""
    outer_made: bool
    """True if the chunk with the embedding or the head is one of these."""
    makes: bool
    """True in the first backward pass of the chunk worked on, which makes its gradients layer by layer."""


@lru_cache(maxsize=1024)
def moments_in_flight(
    schedule: PipelineSchedule, pp_size: int, num_microbatches: int, num_chunks: int, frees_outputs: bool
) -> tuple[tuple[InFlight, ...], ...]:
    """Return the moments with the most memory in the first, a middle and the last stage: none is dominated by another.

    `frees_outputs`: as in `InterleavedProblem`. The second stage represents all middle ones, which hold no more in
    flight; with two stages it is the last one. Only in a short step are all middle stages examined: they may hold as
    much as the second and have freed less. Four rounds of `pp_size` microbatches represent any larger whole number of
    rounds.
    """
    if num_microbatches % pp_size == 0:
        num_microbatches = min(num_microbatches, _ROUNDS * pp_size)
    is_short = frees_outputs and num_microbatches < 2 * (pp_size - 1)
    middle = range(1, pp_size - 1) if is_short else (min(1, pp_size - 1),)
    walk = partial(pass_counts, schedule, pp_size, num_microbatches, num_chunks=num_chunks)
    first, last = (
        _largest({_counted(counts, outer, frees_outputs) for counts in walk(stage=stage)})
        for stage, outer in ((0, 0), (pp_size - 1, num_chunks - 1))
    )
    between = _largest({_counted(counts, None, frees_outputs) for stage in middle for counts in walk(stage=stage)})
    return first, between, last


def _largest(counted: set[InFlight]) -> tuple[InFlight, ...]:
    """Return the moments that no other moment dominates.

    A moment dominates another one that works on the same kind of chunk (outer or not) if it holds at least as much of
    every chunk. As the first stage's outer chunk receives nothing, holding more of it in place of others may take less
    memory. Any other chunk has received as much as it gives out: if more outputs are freed at the first moment, that
    many more of these chunks must be held there. A pass that makes gradients holds at least as much as one that does
    not, and at most as much as the latter with the gradients of its chunk.
    """
    if not counted:
        return ()
    # Sorted, so that every process has the same order: a set has none.
    moments = sorted(counted)
    chunks, outer, freed, at_outer, made, outer_made, makes = np.array(moments, np.int64).T
    held = [chunks, outer, chunks - outer, chunks - outer - freed]
    made_after, outer_after = made + 1, outer_made | at_outer
    beaten = np.zeros(len(moments), bool)
    for other in range(len(moments)):
        no_more = (at_outer == at_outer[other]) & (np.arange(len(moments)) != other)
        for column in held:
            no_more &= column <= column[other]
        after = makes > makes[other]
        for now, then in ((outer_made, outer_after), (made - outer_made, made_after - outer_after)):
            no_more &= np.where(after, then, now) <= now[other]
        beaten |= no_more
    return tuple(moment for moment, dominated in zip(moments, beaten, strict=True) if not dominated)


def _counted(counts: PassCounts, outer: int | None, frees_outputs: bool) -> InFlight:
    return InFlight(
        chunks=sum(counts.in_flight),
        outer=0 if outer is None else counts.in_flight[outer],
        freed=sum(counts.freed) * frees_outputs,
        at_outer=counts.chunk == outer,
        made=sum(counts.made),
        outer_made=outer is not None and counts.made[outer],
        makes=counts.makes,
    )


class Spans(NamedTuple):
    """The ranges of positions that chunks hold."""

    ranges: tuple[range, ...]
    """The distinct ranges: of all positions, as in most chunks, then of the first and of the last chunk."""
    first: int
    """Index of the first chunk's range."""
    last: int
    """Index of the last chunk's range."""

    def with_position(self, position: int) -> list[int]:
        """Return the indices of the ranges that contain a position."""
        return [number for number, held in enumerate(self.ranges) if position in held]


class InterleavedProblem(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Positions of a chunk, and how often and where a chunk occurs."""

    embedding: int
    """Type number, as in `positions` and `head`."""
    positions: tuple[int, ...]
    head: int
    group: DeviceGroup
    pp_size: int
    num_chunks: int
    num_microbatches: int
    closed_forms: tuple[ClosedForm, ...]
    """Coefficients of T, which is the largest of them."""
    sends_ps: Numbers
    """[cuts, types, layouts]: time of a send from each stage to the next, one way; from the last one to the first."""
    moments_in_flight: tuple[tuple[InFlight, ...], ...]
    """Moments of the first stage, of the middle ones (the last if there are none), and of the last."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tied_ps: Numbers
    frees_outputs: bool = True
    """True if an output's memory is free once it was received."""
    lacking: tuple[int, int] = (0, 0)
    """Positions that are missing at the start of the first chunk, and at the end of the last.

    If the first chunk has no positions at all, the embedding must output what layers output, and in their layout.
    """

    @cached_property
    def spans(self) -> Spans:
        """Return the ranges of positions that chunks hold."""
        whole, (ahead, behind) = len(self.positions), self.lacking
        held = range(whole), range(ahead, whole), range(whole - behind)
        ranges = tuple(dict.fromkeys(held))
        return Spans(ranges, ranges.index(held[1]), ranges.index(held[2]))

    @property
    def places(self) -> tuple[Place, ...]:
        """Return the places that stages have."""
        return tuple(place for place in Place if place is not Place.MIDDLE or self.pp_size > 2)

    def span_at(self, place: Place) -> int:
        """Return the index of the range of the chunk with the embedding or the head; in the middle, of any chunk."""
        return {Place.FIRST: self.spans.first, Place.MIDDLE: 0, Place.LAST: self.spans.last}[place]

    def by_span(self, place: Place, count: float, outer: float) -> Numbers:
        """Return the weight of each range for a stage with `count` chunks, `outer` of them with embedding or head."""
        counts = np.zeros(len(self.spans.ranges))
        counts[0] = count - outer
        counts[self.span_at(place)] += outer
        return counts


# Lower bounds on the step time T for a configuration of the interleaved schedule.
#
# They hold for all plans, or for all plans with given options at a chunk's first positions.
#
# T is no less than a weighted sum of all stages' A' and U in which one stage counts as the slowest, with the
# coefficients of the closed form. At any price of a byte on the first or the last stage, T is no less than that sum
# plus the priced memory of the stage, less the priced budget (Lagrange). Both are sums over options and over the moves
# between them: their least is a shortest path over positions and layouts. The redistribution between the embedding and
# a first chunk with missing positions, or between such a last chunk and the head, is left out.


_PRICES = 9
"""Number of prices of a byte on a stage that are tried, around the one that gives the strongest bound."""
_ROUNDING = 1e-12
_EMBEDDING, _HEAD, _SPANS = range(3)
"""Rows of the weights: embedding, head, and from the last one on the ranges of positions."""
_WORKSPACE = 5


class _Sum(NamedTuple):
    """A weighted sum of a plan's numbers, given by the weights; several sums are stacked along a leading axis."""

    options: Numbers
    """[embedding, head, ranges of positions; time, U, state, activations, gradients, workspace]."""
    last_workspace: Numbers
    """Weight of the workspace of the last position."""
    wrap: Numbers
    """Weight of the redistribution from a chunk's last layout to its first."""
    sends: Numbers
    """[cuts]: weights of the sends."""
    received_bytes: Numbers
    """Weight of a boundary tensor's bytes: tensors received, less those sent and freed."""
    tied: Numbers

    def with_memory(self, memory: "_Sum", price: float) -> "_Sum":
        """Return the sum of time and priced memory."""
        return _Sum._make(mine + price * theirs for mine, theirs in zip(self, memory, strict=True))


class InterleavedBounds:
    """The bounds of one configuration: `relaxed_ps`, without layouts, is computed at once, the others on first use."""

    def __init__(self, problem: InterleavedProblem) -> None:
        self._problem = problem
        self._budget = float(problem.group.budget_bytes)
        self._numbers = [_numbers(options) for options in problem.group.options]
        form = problem.closed_forms[problem.num_microbatches < problem.pp_size]
        alike = len(problem.spans.ranges) == 1
        slowest = [place for place in problem.places if place is not Place.MIDDLE or not alike]
        times = [_time(problem, form, place) for place in slowest]
        first, *_, last = problem.moments_in_flight
        ends = (Place.FIRST, first), (Place.LAST, last)
        memories = [max((_memory(problem, m, end) for m in moments), key=self._least) for end, moments in ends]
        self.relaxed_ps, rows = 0.0, [(memory, 1.0) for memory in memories]
        for time, memory in product(times, memories):
            bound_ps, prices = self._relaxed(time, memory)
            self.relaxed_ps = max(self.relaxed_ps, bound_ps)
            rows += [(time.with_memory(memory, price), price) for price in prices]
        self._sums = _Sum._make(np.array(column) for column in zip(*(row for row, _ in rows), strict=True))
        self._prices = np.array([price for _, price in rows])
        self._num_memories = len(memories)

    def _least(self, weights: _Sum) -> float:
        """Return the sum over layers of the least cost over their options."""
        return sum(float(least.min()) * count for least, count in self._costs(weights))

    def _costs(self, weights: _Sum) -> Iterator[tuple[Numbers, int]]:
        """Yield the costs of the options and the number of layers, for embedding, each kind of position, and head."""
        problem = self._problem
        yield weights.options[_EMBEDDING] @ self._numbers[problem.embedding], 1
        held = ((kind, tuple(problem.spans.with_position(i))) for i, kind in enumerate(problem.positions))
        for (kind, spans), count in Counter(held).items():
            yield weights.options[_SPANS:][list(spans)].sum(0) @ self._numbers[kind], count
        yield weights.options[_HEAD] @ self._numbers[problem.head], 1

    def _relaxed(self, time: _Sum, memory: _Sum) -> tuple[float, Numbers]:
        """Return a bound without layouts, and the prices near the one that gives it."""
        costs, counts = zip(*self._costs(time), strict=True)
        dual = Dual(costs, [held for held, _ in self._costs(memory)])
        # More may be freed than was received.
        left = self._budget - min(0.0, float(memory.received_bytes)) * float(self._problem.boundary_bytes.max())
        number = np.array([counts], float)
        return float(dual.runs(number, np.array([left]))[0]), dual.prices(number[0], left, _PRICES)

    @cached_property
    def lower_ps(self) -> float:
        """Return a lower bound on the step time T, with layouts."""
        least = (self._steps(0) + self._rest[1].transpose(0, 2, 1)).min((1, 2))
        return max(self.relaxed_ps, float(self._bound(least[:, None])[0]))

    @property
    def missing_bytes(self) -> tuple[int, ...]:
        """Return lower bounds of the bytes by which the first and the last stage exceed their budgets.

        A stage with 0 or less may fit.
        """
        held = (self._steps(0) + self._rest[1].transpose(0, 2, 1)).min((1, 2))[: self._num_memories]
        return tuple(int(np.floor(each)) - int(self._budget) for each in rounded_down(held))

    def after(self, count: int, chains: Numbers, input_layout: Ints, output_layout: Ints) -> Numbers:
        """Return a lower bound on T for each choice of options for the first `count` positions; infinity: none fits.

        `chains`: time, U, state, activations and gradients of these positions [ranges, 5, labels]. `input_layout` is
        the first one's, `output_layout` the last one's.
        """
        layouts = self._layouts
        rest = self._rest[count][:, np.searchsorted(layouts, output_layout), np.searchsorted(layouts, input_layout)]
        return self._bound(np.tensordot(self._sums.options[:, _SPANS:, :_WORKSPACE], chains) + rest)

    def _bound(self, priced: Numbers) -> Numbers:
        """Return the lower bound on the step time T that sums [rows, labels] give; infinity: no plan fits."""
        least = rounded_down(priced - (self._prices * self._budget * (1 + _ROUNDING))[:, None])
        lacks = (least[: self._num_memories] > 0).any(0)
        return np.where(lacks, np.inf, least[self._num_memories :].max(0))

    @cached_property
    def _layouts(self) -> Ints:
        """Return the input and output layouts of all positions' options."""
        options = [self._problem.group.options[kind] for kind in self._problem.positions]
        return np.unique(np.concatenate([layouts for o in options for layouts in (o.input_layout, o.output_layout)]))

    @cached_property
    def _rest(self) -> list[Numbers]:
        """The least of each sum from each position to the end [rows, output layout before it, first input layout]."""
        rests = [self._ends()]
        for position in range(len(self._problem.positions) - 1, 0, -1):
            time = self._weights(position - 1, position)[:, 0, None, None]
            moves = self._moves(self._problem.positions[position - 1])
            rests.append(_join(_join(time * moves, self._steps(position)), rests[-1]))
        return [np.empty(0), *reversed(rests)]

    def _weights(self, *positions: int) -> Numbers:
        """Return the total weights of the chunks that hold all these positions [rows, numbers]."""
        with_position = self._problem.spans.with_position
        spans = sorted(set.intersection(*(set(with_position(position)) for position in positions)))
        return np.asarray(self._sums.options[:, _SPANS:][:, spans].sum(1))

    def _steps(self, position: int) -> Numbers:
        """Return the least of each sum over a position's options [rows, input layout, output layout]."""
        kind, layouts, weights = self._problem.positions[position], self._layouts, self._weights(position)
        options = self._problem.group.options[kind]
        if position == len(self._problem.positions) - 1:
            weights[:, _WORKSPACE] = self._sums.last_workspace
        at = np.searchsorted(layouts, options.input_layout), np.searchsorted(layouts, options.output_layout)
        return self._table(weights, kind, at, (len(layouts), len(layouts)))

    def _table(self, weights: Numbers, kind: int, at: tuple[Ints, Ints], shape: tuple[int, int]) -> Numbers:
        """Return the minimum over the options of each entry of a table [rows, *shape]."""
        table = np.full((*shape, len(self._prices)), np.inf)
        np.minimum.at(table, at, (weights @ self._numbers[kind]).T)
        return np.asarray(table.transpose(2, 0, 1))

    def _moves(self, kind: int) -> Numbers:
        """Return the redistribution time after a type of layer [layouts, layouts]."""
        moves: Numbers = self._problem.group.redistribution_ps[kind]
        return moves[np.ix_(self._layouts, self._layouts)]

    def _ends(self) -> Numbers:
        """Return the least of each sum without the positions [rows, last output layout, first input layout]."""
        problem, sums, layouts = self._problem, self._sums, self._layouts
        options, moves, kind = problem.group.options, problem.group.redistribution_ps, problem.positions[-1]
        embedding, head, num_layouts = options[problem.embedding], options[problem.head], moves.shape[1]
        (classes, others), at = problem.tied_ps.shape, (embedding.input_layout, embedding.output_layout)
        behind_embedding, ahead_of_head = moves[problem.embedding][:, layouts], moves[kind][layouts]
        if problem.lacking[0]:
            behind_embedding = np.zeros_like(behind_embedding)
        if problem.lacking[1] % len(problem.positions):
            ahead_of_head = np.zeros_like(ahead_of_head)
        ends = sums.options[:, _EMBEDDING], sums.options[:, _HEAD]
        first = self._table(ends[0], problem.embedding, at, (classes, num_layouts))
        last = self._table(ends[1], problem.head, (head.input_layout, head.output_layout), (num_layouts, others))
        first = _join(first, ends[0][:, 0, None, None] * behind_embedding)
        last = _join(ends[1][:, 0, None, None] * ahead_of_head, last)
        tied_ps = np.where(np.isfinite(problem.tied_ps), problem.tied_ps, 0.0) * sums.tied[:, None, None]
        tied_ps = np.where(np.isfinite(problem.tied_ps), tied_ps, np.inf).transpose(0, 2, 1)
        around = _join(_join(last, tied_ps), first)
        sent = sums.sends @ problem.sends_ps[:, kind][:, layouts]
        sent = sent + sums.received_bytes[:, None] * problem.boundary_bytes[kind][layouts]
        return np.asarray(around + sums.wrap[:, None, None] * self._moves(kind) + sent[:, :, None])


def _numbers(o: Options) -> Numbers:
    """Return the numbers of options [time, U, state, activations, gradients, workspace; options]."""
    gradients = o.late_bytes + o.sum_bytes
    return np.array((o.time_ps, o.exposed_ps, o.state_bytes, o.activation_bytes, gradients, o.workspace_bytes))


def _no_options(problem: InterleavedProblem) -> Numbers:
    """Return weights of 0 for the options of a sum."""
    return np.zeros((_SPANS + len(problem.spans.ranges), _WORKSPACE + 1))


def _time(problem: InterleavedProblem, form: ClosedForm, slowest: Place) -> _Sum:
    """Return the sum that T is no less than if the stage at `slowest` is the slowest; in the middle, the second one."""
    p, v, fill, more = problem.pp_size, problem.num_chunks, form.fill / form.parts, form.steady / form.parts
    at_first, at_last = slowest is Place.FIRST, slowest is Place.LAST
    ends = problem.by_span(Place.FIRST, v, 1) + problem.by_span(Place.LAST, v, 1)
    options = _no_options(problem)
    options[[_EMBEDDING, _HEAD], 0] = fill + more * at_first, fill + more * at_last
    options[_SPANS:, 0] = fill * (problem.by_span(Place.MIDDLE, (p - 2) * v, 0) + ends)
    options[_SPANS:, 0] += more * problem.by_span(slowest, v, slowest is not Place.MIDDLE)
    options[[_EMBEDDING, _HEAD], 1], options[_SPANS:, 1] = 0.5, ends / 2  # no maximum is less than the mean
    # Neither the first chunk nor a last one with nothing but the head begins with such a redistribution.
    alone = problem.lacking[1] == len(problem.positions)
    wrap = fill * (p * v - 1 - alone) + more * (v - at_first - (at_last and alone))
    sends = 2 * fill * np.array([*[v] * (p - 1), v - 1.0])
    if slowest is Place.MIDDLE:
        sends[:2] += more * v
    else:
        sends[0 if at_first else p - 2] += more * v
        sends[-1] += more * (v - 1)
    return _Sum(options, np.zeros(()), np.array(wrap), sends, np.zeros(()), np.ones(()))


def _memory(problem: InterleavedProblem, moment: InFlight, end: Place) -> _Sum:
    """Return the sum that bounds the memory of the stage with the embedding or the head at a moment from below."""
    v, at_outer, at_first = problem.num_chunks, moment.at_outer, end is Place.FIRST
    options = _no_options(problem)
    options[_SPANS:, 2] = problem.by_span(end, v, 1)
    options[_SPANS:, 3] = problem.by_span(end, moment.chunks + 1, moment.outer + at_outer)
    options[_SPANS:, 4] = problem.by_span(end, moment.made, moment.outer_made)
    at = _EMBEDDING if at_first else _HEAD
    options[at, 2:_WORKSPACE] = 1, moment.outer + at_outer, moment.outer_made
    at_head = at_outer and not at_first
    options[_HEAD, _WORKSPACE] = at_head
    at_last = not at_head and not (at_outer and problem.lacking[0] == len(problem.positions))
    # Four: the gradients of input and output of one microbatch, the next pass's input, and this pass's input. The first
    # chunk receives none.
    received = 4 + moment.chunks - (moment.outer + at_outer if at_first else 0) - moment.freed
    received -= at_last and problem.frees_outputs
    none = np.zeros(())
    return _Sum(options, np.array(float(at_last)), none, np.zeros(problem.pp_size), np.array(float(received)), none)


def _join(one: Numbers, other: Numbers) -> Numbers:
    """Return the minimum over `between` of [.., in, between] plus [.., between, out]."""
    return np.asarray((one[..., :, :, None] + other[..., None, :, :]).min(-2))
