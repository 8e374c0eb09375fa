"""The moments of an interleaved schedule at which a pipeline stage may hold the most."""

from collections.abc import Iterator

from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.semantics.schedules.registry import schedule_of
from shardwright_search.solver.interleaved_problem import InFlight
from shardwright_search.space.configurations import Configuration


def moments_in_flight(configuration: Configuration, stage: int) -> tuple[InFlight, ...]:
    """The moments of a stage's action list that no other exceeds in all counts."""
    every = set(_moments(configuration, stage))
    return tuple(sorted(one for one in every if not any(_beaten(one, other) for other in every)))


def _moments(configuration: Configuration, stage: int) -> Iterator[InFlight]:
    """Of every action what is there beside the pass."""
    outer = 0 if stage == 0 else configuration.num_chunks - 1
    resident, made = [0] * configuration.num_chunks, set[int]()
    shape = configuration.pp_size, configuration.num_microbatches, stage, configuration.num_chunks
    for action in schedule_of(configuration.schedule).actions(*shape):
        backward, own = action.kind is Pass.BACKWARD, action.chunk
        resident[own] -= backward
        yield InFlight(
            chunks=sum(resident),
            outer=resident[outer],
            at_outer=own == outer,
            made=len(made),
            outer_made=outer in made,
            makes=backward and own not in made,
        )
        made |= {own} if backward else set()
        resident[own] += not backward


def _beaten(one: InFlight, other: InFlight) -> bool:
    """Whether another moment of the same kind of chunk holds no less: of the outer chunk, of all others, and together.

    The first stage's outer chunk receives nothing, so that more of it may be less. A pass that makes gradients holds
    at least as much as one that does not, and at most as much as that with its chunk's gradients beside it.
    """
    if one == other or one.at_outer != other.at_outer:
        return False
    if one.makes > other.makes:
        one = one._replace(made=one.made + 1, outer_made=one.outer_made or one.at_outer)
    counts = ((m.chunks, m.outer, m.chunks - m.outer, m.outer_made, m.made - m.outer_made) for m in (one, other))
    return all(mine <= theirs for mine, theirs in zip(*counts, strict=True))
