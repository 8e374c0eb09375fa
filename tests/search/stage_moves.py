"""Where the stages of made-up problems can be, and what is between them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product

import numpy as np

from shardwright_search.solver.problem import Cut, Moves, Position


def counted(allowed: Sequence[Sequence[int]], available: Sequence[int]) -> tuple[Moves, ...]:
    """Placements where a position is how many stages are on each group, of which there are so many."""
    ways = [groups for groups in product(*allowed) if all(groups.count(i) <= most for i, most in enumerate(available))]
    used = [
        [tuple(on[:i].count(group) for group in range(len(available))) for i in range(len(allowed) + 1)] for on in ways
    ]
    return moves_of(len(allowed), zip(ways, used, strict=True))


def moves_of(pp_size: int, ways: Iterable[tuple[Sequence[int], Sequence[Position]]]) -> tuple[Moves, ...]:
    """By stage; a way is the groups of the stages, and the positions before each of them and behind the last."""
    found: list[dict[Position, dict[tuple[int, Position], None]]] = [{} for _ in range(pp_size)]
    for groups, positions in ways:
        for stage, group in enumerate(groups):
            found[stage].setdefault(positions[stage], {})[group, positions[stage + 1]] = None
    return tuple({position: tuple(own) for position, own in moves.items()} for moves in found)


def cuts_of(moves: Sequence[Moves]) -> Iterator[tuple[int, Cut]]:
    """Everything that can be between two stages, with the number of the first."""
    for stage, (own, following) in enumerate(pairwise(moves)):
        for before, position in {move for each in own.values() for move in each}:
            for behind, _ in following[position]:
                yield stage, Cut(position, before, behind)


def handed_as_given(moves: Sequence[Moves], sends: np.ndarray) -> dict[Cut, np.ndarray]:
    """Sends [cuts, groups, groups, types, layouts] that change no layout."""
    return {cut: _diagonal(sends[stage, cut.before, cut.behind]) for stage, cut in cuts_of(moves)}


def _diagonal(sends: np.ndarray) -> np.ndarray:
    return np.where(np.eye(sends.shape[-1], dtype=bool), sends[..., None], np.inf)
