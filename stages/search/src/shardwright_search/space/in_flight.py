"""The moments of an interleaved schedule at which a pipeline stage may hold the most."""

from shardwright_formats.semantics.schedule import Pass, actions
from shardwright_search.solver.interleaved import Flight
from shardwright_search.space.configurations import Case

__all__ = ["flights_of"]


def flights_of(case: Case, stage: int) -> tuple[Flight, ...]:
    """The moments of a stage's action list that no other exceeds in all counts."""
    outer = 0 if stage == 0 else case.num_chunks - 1
    held = [0] * case.num_chunks
    found: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    lists = actions(case.schedule, case.pp_size, case.num_microbatches, stage, case.num_chunks)
    for action in lists:
        if action.kind is Pass.BACKWARD:
            held[action.chunk] -= 1
        found[action.chunk == outer].add((sum(held), held[outer]))
        if action.kind is Pass.FORWARD:
            held[action.chunk] += 1
    return tuple(
        Flight(chunks, of_outer, at_outer)
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
