"""The memory of a pipeline stage's communicators: what all plans of a configuration hold, and what strategies add.

A group counts once in a stage, however many of its layers use it. A layer counts the groups of its strategy as
workspace, of which a stage holds the most of any layer: that is exact where the layers of a stage use the same groups,
else too little, and never too much. `parts` splits a configuration where it is too little for its best plan.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwright.plan.process_groups import Purpose, communicator_bytes
from shardwright.types import Model
from shardwright_search.solver.problem import Cut, Moves, Options
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.rank_groups import TIED, RankGroups, StageLimit, tied_types
from shardwright_search.space.request import StageWidths

_EDGES = 2
"""Edges of a rank to a neighbouring stage that is as wide, one for each pass."""
_NEVER_FITS = 2.0**52
"""Bytes: more than any device has."""


class StageRoom(NamedTuple):
    """The communicators of a pipeline stage's ranks that are known before its layers have strategies."""

    edges: int = 0
    """Edges of the pipeline."""
    required: RankGroups = frozenset()
    """Groups that the stage has."""
    excluded: RankGroups = frozenset()
    """Groups that it may not have."""

    def held_bytes(self, of_each: int) -> int:
        """Return what a rank holds, where a communicator that is no edge holds `of_each`."""
        return communicator_bytes({Purpose.WORLD: len(self.required), Purpose.EDGE: self.edges}, of_each)

    def added_bytes(self, groups: RankGroups, of_each: int) -> float:
        """Return what a layer with these groups adds; more than any device has where it may not be in the stage."""
        return _NEVER_FITS if groups & self.excluded else float(of_each * len(groups - self.required))

    def within(self, limit: StageLimit) -> "StageRoom":
        """Return the room in a part of the configuration."""
        return StageRoom(self.edges, self.required | limit.required, self.excluded | limit.excluded)


NO_ROOM = StageRoom()


def stage_rooms(configuration: Configuration, model: Model) -> tuple[StageRoom, ...]:
    """Return what is known of the communicators of each pipeline stage, beside the one of all ranks.

    Of unequal widths that is one edge: how many there are depends on the layouts at both ends of a cut.
    """
    p = configuration.pp_size
    if p == 1:
        rooms = [StageRoom(0, frozenset({TIED} if tied_types(model) else ()))]
    elif not is_divisible(configuration):
        rooms = [StageRoom(2 * _EDGES if configuration.num_chunks > 1 else 1)] * p
    else:
        end = StageRoom(_EDGES, frozenset({TIED} if model.tied else ()))
        rooms = [end, *[StageRoom(2 * _EDGES)] * (p - 2), end]
    for limit in configuration.limits:
        rooms[limit.stage] = rooms[limit.stage].within(limit)
    return tuple(rooms)


def is_divisible(configuration: Configuration) -> bool:
    """Return whether a configuration can be split by the groups of its stages: each is one range, and as wide."""
    return configuration.num_chunks == 1 and (configuration.pp_size == 1 or configuration.widths is StageWidths.EQUAL)


def with_groups(options: Options, groups: Iterable[RankGroups], room: StageRoom, of_each: int) -> Options:
    """Return options with what the groups of each add to the communicators of a stage."""
    added = np.array([room.added_bytes(each, of_each) for each in groups])
    return options._replace(workspace_bytes=options.workspace_bytes + added)


def numbered_by_room(
    placements: Sequence[Moves], topologies: int, rooms: Sequence[StageRoom]
) -> tuple[tuple[Moves, ...], Iterator[tuple[Cut, Cut]]]:
    """Return moves with each topology numbered anew for each room, and every cut with what it was by topology alone.

    Group `topologies` * room + topology is a topology with one of the different rooms, in the order of the stages.
    """
    number = {room: topologies * count for count, room in enumerate(dict.fromkeys(rooms))}
    first = [number[room] for room in rooms]
    moves = tuple(
        {position: tuple((group + more, after) for group, after in ways) for position, ways in placed.items()}
        for placed, more in zip(placements, first, strict=True)
    )
    return moves, _cuts(placements, first)


def _cuts(placements: Sequence[Moves], first: Sequence[int]) -> Iterator[tuple[Cut, Cut]]:
    for (moves, following), (here, there) in zip(pairwise(placements), pairwise(first), strict=True):
        for before, position in dict.fromkeys(move for ways in moves.values() for move in ways):
            for behind, _ in following[position]:
                yield Cut(position, before + here, behind + there), Cut(position, before, behind)
