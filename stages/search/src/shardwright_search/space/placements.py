"""Where the pipeline stages of a configuration can be: blocks of neighbouring ranks, in the order of the stages."""

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from shardwright_formats.types.cluster import Cluster
from shardwright_search.cost_model.topology import StageTopology, stage_topology
from shardwright_search.solver.problem import Cut, Moves


class Placements(NamedTuple):
    """The kinds of pipeline stage, and in which order they can follow one another."""

    topologies: tuple[StageTopology, ...]
    """By the solver's device group."""
    moves: tuple[Moves, ...]
    """By pipeline stage; a position is the number of ranks before it."""

    @property
    def cuts(self) -> Iterator[Cut]:
        """Everything that can be between two stages."""
        for moves, following in pairwise(self.moves):
            for before, position in dict.fromkeys(move for own in moves.values() for move in own):
                for behind, _ in following[position]:
                    yield Cut(position, before, behind)

    def stage_ranks(self, groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks of stages on these device groups."""
        ends = accumulate((self.topologies[group].size for group in groups), initial=0)
        return tuple(tuple(range(low, high)) for low, high in pairwise(ends))


def placements(cluster: Cluster, widths: Sequence[Collection[int]]) -> Placements | None:
    """Every way to share out all ranks among stages, of which each has one of its own widths; None: there is none."""
    levels = [{0}]
    for own in widths:
        levels.append({rank + width for rank in levels[-1] for width in own})
    alive = levels[-1] & {cluster.num_devices}
    ways: list[dict[int, list[int]]] = []
    for ranks, own in zip(levels[-2::-1], widths[::-1], strict=True):
        every = {rank: [rank + width for width in sorted(own) if rank + width in alive] for rank in sorted(ranks)}
        ways.insert(0, {rank: ends for rank, ends in every.items() if ends})
        alive = set(ways[0])
    if not alive:
        return None
    numbers: dict[StageTopology, int] = {}
    moves: list[Moves] = []
    for stage in ways:
        found = {rank: [(stage_topology(cluster, range(rank, end)), end) for end in stage[rank]] for rank in stage}
        for topology in (topology for own in found.values() for topology, _ in own):
            numbers.setdefault(topology, len(numbers))
        moves.append({(rank,): tuple((numbers[kind], (end,)) for kind, end in own) for rank, own in found.items()})
    return Placements(tuple(numbers), tuple(moves))
