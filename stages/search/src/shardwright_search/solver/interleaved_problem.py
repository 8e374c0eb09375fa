"""A configuration of the interleaved schedule as bare numbers.

Chunks hold the same positions, except the first one, which may lack some at its start, and the last one, which may lack
some at its end: the embedding and the head take their places. A stage may hold the most at some moments of its action
list.
"""

from enum import Enum
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright.plan.schedules.schedule import ClosedForm, PipelineSchedule
from shardwright_search.solver.problem import DeviceGroup
from shardwright_search.step.memory import PassCounts, pass_counts
from shardwright_search.step.pareto import Numbers

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
    """Outputs with the size of these activations whose memory is free because they were received."""
    at_outer: bool
    """True if that chunk is the one worked on."""
    made: int
    """Chunks whose gradients are there: they have been through a backward pass before."""
    outer_made: bool
    """True if that chunk is one of them."""
    makes: bool
    """True in the first backward pass of the chunk worked on, which makes its gradients layer by layer."""


@lru_cache(maxsize=1024)
def moments_in_flight(
    schedule: PipelineSchedule, pp_size: int, num_microbatches: int, num_chunks: int, frees_outputs: bool
) -> tuple[tuple[InFlight, ...], ...]:
    """Return the moments of the first, the middle and the last stages that no other moment dominates.

    `frees_outputs` is that of the problem. Of fewer than three stages the last stands for the middle. Stages further on
    have no more in flight, but in a short step as much as the second, of which they may have freed less. Whole rounds
    of one microbatch for each stage repeat the same moments, so that four of them stand for more.
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

    Another one with the same kind of chunk that holds at least as much of every chunk does so. The first stage's outer
    chunk receives nothing, so that more of it may be less. Any other chunk has received as much as it gives out: where
    more outputs are freed at the other moment, as many more of these chunks must be held there. A pass that makes
    gradients holds at least as much as one that does not, and at most as much as that with its chunk's gradients.
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
    """Number of the first chunk's range."""
    last: int
    """Number of the last chunk's range."""

    def with_position(self, position: int) -> list[int]:
        """Return the numbers of the ranges that a position is in."""
        return [number for number, held in enumerate(self.ranges) if position in held]


class InterleavedProblem(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Positions of a chunk, and how often and where a chunk occurs."""

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
    """Moments of the first stage, of the middle ones (the last if there are none), and of the last."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tied_ps: Numbers
    frees_outputs: bool = True
    """True if an output's memory is free once it was received."""
    lacking: tuple[int, int] = (0, 0)
    """Positions that are missing at the start of the first chunk, and at the end of the last.

    A first chunk that lacks all needs an embedding that hands on what layers do; it does so in their layout.
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
        """Return the index of the range of the chunk with the embedding or the head; in the middle, of other chunks."""
        return {Place.FIRST: self.spans.first, Place.MIDDLE: 0, Place.LAST: self.spans.last}[place]

    def by_span(self, place: Place, count: float, outer: float) -> Numbers:
        """Return the weight of each range for a stage with `count` chunks, `outer` of them with embedding or head."""
        counts = np.zeros(len(self.spans.ranges))
        counts[0] = count - outer
        counts[self.span_at(place)] += outer
        return counts
