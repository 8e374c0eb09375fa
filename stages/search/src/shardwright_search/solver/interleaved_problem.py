"""A configuration of the interleaved schedule as bare numbers, and lower bounds on T for it.

A stage may hold the most at some moments of its action list. Bounds are of whole plans, and of what the first positions
of a chunk can lead to.

T is no less than a weighted sum of all stages' A' and U in which one stage counts as the slowest, with the coefficients
of the closed form. At any price of a byte on the first or the last stage a plan costs
no less than that sum and its memory there, less the price of the budget (Lagrange). Both are sums over options and over
what lies between them: their least is a shortest path over positions and layouts.
"""

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_formats.semantics.schedules.closed_form import ClosedForm
from shardwright_formats.semantics.schedules.schedule import PipelineSchedule
from shardwright_search.solver.problem import DeviceGroup, Options
from shardwright_search.solver.stage_bounds import Dual, rounded_down
from shardwright_search.step.memory import PassCounts, pass_counts
from shardwright_search.step.pareto import Ints, Numbers

_PRICES = 9
"""Prices of a byte on a stage, around the one that bounds most."""
_ROUNDING = 1e-12
_EMBEDDING, _INNER, _LAST, _HEAD = range(4)


class InFlight(NamedTuple):
    """The counts at a moment of a stage's action list, without the microbatch and chunk that is worked on."""

    chunks: int
    """Activations held, each of one microbatch in one chunk."""
    outer: int
    """Activations held of the chunk that the embedding or the head is with; a stage in the middle has no such chunk."""
    freed: int
    """Outputs, each of one of these activations, whose memory is free because they were received."""
    at_outer: bool
    """True where that chunk is the one worked on."""
    made: int
    """Chunks whose gradients are there: they have been through a backward pass before."""
    outer_made: bool
    """True where that chunk is one of them."""
    makes: bool
    """True in the first backward pass of the chunk worked on, which makes its gradients layer by layer."""


def moments_in_flight(
    schedule: PipelineSchedule, pp_size: int, num_microbatches: int, num_chunks: int, frees_outputs: bool
) -> tuple[tuple[InFlight, ...], ...]:
    """Return the moments of the first stage, of the stages in the middle, and of the last that no other exceeds.

    `frees_outputs` is that of the problem. Of fewer than three stages the last stands for the middle. Stages further on
    have no more in flight, but in a short step as much as the second, of which they may have freed less.
    """
    is_short = frees_outputs and num_microbatches < 2 * (pp_size - 1)
    middle = range(1, pp_size - 1) if is_short else (min(1, pp_size - 1),)
    walk = partial(pass_counts, schedule, pp_size, num_microbatches, num_chunks=num_chunks)
    first, last = (
        _largest({_counted(counts, outer, frees_outputs) for counts in walk(stage=stage)})
        for stage, outer in ((0, 0), (pp_size - 1, num_chunks - 1))
    )
    between: tuple[InFlight, ...] = ()
    for stage in middle:
        between = _largest({*between, *(_counted(counts, None, frees_outputs) for counts in walk(stage=stage))})
    return first, between, last


def _largest(counted: set[InFlight]) -> tuple[InFlight, ...]:
    return tuple(sorted(one for one in counted if not any(_beaten(one, other) for other in counted)))


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


def _beaten(one: InFlight, other: InFlight) -> bool:
    """Return whether another moment with the same kind of chunk holds no less, of the outer chunk and of all others.

    The first stage's outer chunk receives nothing, so that more of it may be less. Any other chunk has received as much
    as it gives out: where more outputs are freed at the other moment, as many more of these chunks must be held there.
    A pass that makes gradients holds at least as much as one that does not, and at most as much as that with its
    chunk's gradients as well.
    """
    if one == other or one.at_outer != other.at_outer:
        return False
    if one.makes > other.makes:
        one = one._replace(made=one.made + 1, outer_made=one.outer_made or one.at_outer)
    return all(mine <= theirs for mine, theirs in zip(_compared(one), _compared(other), strict=True))


def _compared(moment: InFlight) -> tuple[int, ...]:
    chunks, outer, freed, _, made, outer_made, _ = moment
    return chunks, outer, chunks - outer, chunks - outer - freed, outer_made, made - outer_made


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
    closed_forms: tuple[ClosedForm, ...]
    """Coefficients of T, which is the largest of them."""
    sends_ps: Numbers
    """[cuts, types, layouts]: over the cut after each stage, one way; the last from the last stage to the first."""
    moments_in_flight: tuple[tuple[InFlight, ...], ...]
    """Moments of the first stage, of those in the middle (the last if there are none), and of the last."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tied_ps: Numbers
    frees_outputs: bool = True
    """True where an output's memory is free once it was received."""


class _Sum(NamedTuple):
    """Sum in which each number of a plan counts so often; several sums have an axis for them in front."""

    options: Numbers
    """[embedding, position, last position, head; time, U, state, activations, gradients, workspace]."""
    wrap: Numbers
    """Redistribution from a chunk's last layout to its first."""
    sends: Numbers
    """[cuts]."""
    received_bytes: Numbers
    """Boundary tensors: what was received less what was sent and freed."""
    tied: Numbers

    def with_memory(self, memory: "_Sum", price: float) -> "_Sum":
        """Return the sum of both, the memory at a price."""
        return _Sum._make(mine + price * theirs for mine, theirs in zip(self, memory, strict=True))


class InterleavedBounds:
    """The bounds of one configuration: `relaxed_ps`, without layouts, at once, the others when they are asked for."""

    def __init__(self, problem: InterleavedProblem) -> None:
        self._problem = problem
        self._budget = float(problem.group.budget_bytes)
        self._numbers = [_numbers(options) for options in problem.group.options]
        form = problem.closed_forms[problem.num_microbatches < problem.pp_size]
        times = [_time(problem, form, slowest) for slowest in (_EMBEDDING, _HEAD)]
        first, *_, last = problem.moments_in_flight
        ends = (_EMBEDDING, first), (_HEAD, last)
        memories = [max((_memory(problem, m, end) for m in pass_counts), key=self._least) for end, pass_counts in ends]
        self.relaxed_ps, rows = 0.0, [(memory, 1.0) for memory in memories]
        for time, memory in product(times, memories):
            bound_ps, prices = self._relaxed(time, memory)
            self.relaxed_ps = max(self.relaxed_ps, bound_ps)
            rows += [(time.with_memory(memory, price), price) for price in prices]
        self._sums = _Sum._make(np.array(column) for column in zip(*(row for row, _ in rows), strict=True))
        self._prices = np.array([price for _, price in rows])
        self._num_memories = len(memories)

    def _least(self, weights: _Sum) -> float:
        """Return the least sum over options alone."""
        return sum(float(least.min()) * count for least, count in self._costs(weights))

    def _costs(self, weights: _Sum) -> Iterator[tuple[Numbers, int]]:
        """Yield what options cost and how many layers there are: embedding, each type of a position, and head."""
        problem = self._problem
        yield weights.options[_EMBEDDING] @ self._numbers[problem.embedding], 1
        for kind in dict.fromkeys(problem.positions):
            yield weights.options[_INNER] @ self._numbers[kind], problem.positions.count(kind)
        yield weights.options[_HEAD] @ self._numbers[problem.head], 1

    def _relaxed(self, time: _Sum, memory: _Sum) -> tuple[float, Numbers]:
        """Return a bound without layouts, and the prices around the one that gives it."""
        costs, counts = zip(*self._costs(time), strict=True)
        dual = Dual(costs, [held for held, _ in self._costs(memory)])
        # More may be freed than was received.
        left = self._budget - min(0.0, float(memory.received_bytes)) * float(self._problem.boundary_bytes.max())
        number = np.array([counts], float)
        return float(dual.runs(number, np.array([left]))[0]), dual.prices(number[0], left, _PRICES)

    @cached_property
    def lower_ps(self) -> float:
        """Lower bound on T, with layouts."""
        least = (self._steps(0) + self._rest[1].transpose(0, 2, 1)).min((1, 2))
        return max(self.relaxed_ps, float(self._bound(least[:, None])[0]))

    def after(self, count: int, chain: Numbers, input_layout: Ints, output_layout: Ints) -> Numbers:
        """Return a lower bound on T behind so many positions; infinity: none fits.

        chain: time, U, state, activations and gradients of these positions [5, labels].
        """
        layouts = self._layouts
        rest = self._rest[count][:, np.searchsorted(layouts, output_layout), np.searchsorted(layouts, input_layout)]
        return self._bound(self._sums.options[:, _INNER, :5] @ chain + rest)

    def _bound(self, priced: Numbers) -> Numbers:
        """Return the lower bound on T that sums [rows, labels] give; infinity: no plan fits."""
        least = rounded_down(priced - (self._prices * self._budget * (1 + _ROUNDING))[:, None])
        lacks = (least[: self._num_memories] > 0).any(0)
        return np.where(lacks, np.inf, least[self._num_memories :].max(0))

    @cached_property
    def _layouts(self) -> Ints:
        """Layouts that positions work in or give out."""
        options = [self._problem.group.options[kind] for kind in self._problem.positions]
        return np.unique(np.concatenate([layouts for o in options for layouts in (o.input_layout, o.output_layout)]))

    @cached_property
    def _rest(self) -> list[Numbers]:
        """Least of all from each position on [rows, output layout before, input layout of the first]."""
        rests = [self._ends()]
        for position in range(len(self._problem.positions) - 1, 0, -1):
            time = self._sums.options[:, _INNER, 0, None, None]
            moves = self._moves(self._problem.positions[position - 1])
            rests.append(_join(_join(time * moves, self._steps(position)), rests[-1]))
        return [np.empty(0), *reversed(rests)]

    def _steps(self, position: int) -> Numbers:
        """Return the least of a position's options [rows, input layout, output layout]."""
        kind, layouts = self._problem.positions[position], self._layouts
        options = self._problem.group.options[kind]
        role = _LAST if position == len(self._problem.positions) - 1 else _INNER
        at = np.searchsorted(layouts, options.input_layout), np.searchsorted(layouts, options.output_layout)
        return self._table(role, kind, at, (len(layouts), len(layouts)))

    def _table(self, role: int, kind: int, at: tuple[Ints, Ints], shape: tuple[int, int]) -> Numbers:
        """Return the least of the options in each place of a table [rows, *shape]."""
        table = np.full((*shape, len(self._prices)), np.inf)
        np.minimum.at(table, at, (self._sums.options[:, role] @ self._numbers[kind]).T)
        return np.asarray(table.transpose(2, 0, 1))

    def _moves(self, kind: int) -> Numbers:
        """Return the redistribution behind a type of layer [layouts, layouts]."""
        moves: Numbers = self._problem.group.redistribution_ps[kind]
        return moves[np.ix_(self._layouts, self._layouts)]

    def _ends(self) -> Numbers:
        """Return all except the positions [rows, output layout of the last position, input layout of the first]."""
        problem, sums, layouts = self._problem, self._sums, self._layouts
        options, moves, kind = problem.group.options, problem.group.redistribution_ps, problem.positions[-1]
        embedding, head, num_layouts = options[problem.embedding], options[problem.head], moves.shape[1]
        (classes, others), at = problem.tied_ps.shape, (embedding.input_layout, embedding.output_layout)
        first = self._table(_EMBEDDING, problem.embedding, at, (classes, num_layouts))
        last = self._table(_HEAD, problem.head, (head.input_layout, head.output_layout), (num_layouts, others))
        first = _join(first, sums.options[:, _EMBEDDING, 0, None, None] * moves[problem.embedding][:, layouts])
        last = _join(sums.options[:, _HEAD, 0, None, None] * moves[kind][layouts], last)
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


def _time(problem: InterleavedProblem, form: ClosedForm, slowest: int) -> _Sum:
    """Return a sum that is no larger than T, with the stage of the embedding or of the head as the slowest."""
    p, v, fill, more = problem.pp_size, problem.num_chunks, form.fill / form.parts, form.steady / form.parts
    at_first = slowest == _EMBEDDING
    chain = v * (fill * p + more)
    options = np.zeros((4, 6))
    options[:, 0] = fill + more * at_first, chain, chain, fill + more * (not at_first)
    options[:, 1] = 0.5, v, v, 0.5  # no maximum is less than the mean
    sends = 2 * fill * np.array([*[v] * (p - 1), v - 1.0])
    sends[0 if at_first else p - 2] += more * v
    sends[-1] += more * (v - 1)
    return _Sum(options, np.array(chain - fill - more * at_first), sends, np.zeros(()), np.ones(()))


def _memory(problem: InterleavedProblem, moment: InFlight, at: int) -> _Sum:
    """Return a sum that is no larger than what the stage of the embedding or of the head holds at a moment."""
    chunks, outer, at_outer = moment.chunks, moment.outer, moment.at_outer
    options = np.zeros((4, 6))
    options[_INNER : _LAST + 1, 2:5] = problem.num_chunks, chunks + 1, moment.made
    options[at, 2:5] = 1, outer + at_outer, moment.outer_made
    at_last = at == _EMBEDDING or not at_outer
    options[_LAST if at_last else _HEAD, 5] = 1
    # Of one microbatch the gradients of both ends, what comes next, and the pass's own; the first chunk receives none.
    received = 4 + chunks - (outer + at_outer if at == _EMBEDDING else 0) - moment.freed
    received -= at_last and problem.frees_outputs
    none = np.zeros(())
    return _Sum(options, none, np.zeros(problem.pp_size), np.array(float(received)), none)


def _join(one: Numbers, other: Numbers) -> Numbers:
    """Return the least over what is between [.., in, between] and [.., between, out]."""
    return np.asarray((one[..., :, :, None] + other[..., None, :, :]).min(-2))
