"""A configuration of the interleaved schedule as bare numbers, with the moments at which a stage may hold the most."""

from typing import NamedTuple

import msgspec

from shardwright_formats.semantics.schedules.closed_form import ClosedForm
from shardwright_formats.semantics.schedules.schedule import PipelineSchedule
from shardwright_search.solver.problem import DeviceGroup
from shardwright_search.step.memory import Moment, moments
from shardwright_search.step.pareto import Numbers


class InFlight(NamedTuple):
    """The counts at a moment of a stage's action list, beside the microbatch and chunk that is worked on."""

    chunks: int
    """Activations held, each of one microbatch in one chunk."""
    outer: int
    """Activations held of the chunk that the embedding or the head is with."""
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
    schedule: PipelineSchedule, pp_size: int, num_microbatches: int, stage: int, num_chunks: int, frees_outputs: bool
) -> tuple[InFlight, ...]:
    """Return the moments of a stage's actions that no other exceeds in all counts.

    `frees_outputs` is that of the problem.
    """
    outer = 0 if stage == 0 else num_chunks - 1
    walked = moments(schedule, pp_size, num_microbatches, stage, num_chunks)
    counted = {_counted(moment, outer, frees_outputs) for moment in walked}
    return tuple(sorted(one for one in counted if not any(_beaten(one, other) for other in counted)))


def _counted(moment: Moment, outer: int, frees_outputs: bool) -> InFlight:
    return InFlight(
        chunks=sum(moment.in_flight),
        outer=moment.in_flight[outer],
        freed=sum(moment.freed) * frees_outputs,
        at_outer=moment.chunk == outer,
        made=sum(moment.made),
        outer_made=moment.made[outer],
        makes=moment.makes,
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
    """Moments of the first stage, of one in the middle (the last if there is none), and of the last."""
    boundary_bytes: Numbers
    """[types, layouts]: what a rank holds of one microbatch's outputs of that type and layout."""
    tie_ps: Numbers
    frees_outputs: bool = True
    """True where an output's memory is free once it was received."""
