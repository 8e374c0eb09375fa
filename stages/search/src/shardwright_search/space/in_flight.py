"""The moments of an interleaved schedule at which a pipeline stage may hold the most."""

from shardwright_formats.semantics.schedule import Pass, actions
from shardwright_search.solver.interleaved_problem import InFlight
from shardwright_search.space.configurations import Configuration


def moments_in_flight(configuration: Configuration, stage: int) -> tuple[InFlight, ...]:
    """The moments of a stage's action list that no other exceeds in all counts."""
    outer = 0 if stage == 0 else configuration.num_chunks - 1
    resident = [0] * configuration.num_chunks
    found: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    lists = actions(
        configuration.schedule, configuration.pp_size, configuration.num_microbatches, stage, configuration.num_chunks
    )
    for action in lists:
        if action.kind is Pass.BACKWARD:
            resident[action.chunk] -= 1
        found[action.chunk == outer].add((sum(resident), resident[outer]))
        if action.kind is Pass.FORWARD:
            resident[action.chunk] += 1
    return tuple(
        InFlight(chunks, of_outer, at_outer)
        for at_outer, counts in found.items()
        for chunks, of_outer in sorted(counts)
        if not any(_beaten((chunks, of_outer), other) for other in counts)
    )


def _beaten(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether another moment holds no less, of the outer chunk, of all others, and together.

    The first stage's outer chunk receives nothing, so that more of it may be less.
    """
    (chunks, outer), (most, most_outer) = one, other
    return one != other and chunks <= most and outer <= most_outer and chunks - outer <= most - most_outer
