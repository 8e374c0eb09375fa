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


def placements(cluster: Cluster, widths: Sequence[Collection[int]], by_nodes: bool = False) -> Placements | None:
    """Every way to share out all ranks among stages, of which each has one of its own widths; None: there is none.

    `by_nodes`: each stage is in one node, or takes up whole nodes, or is where it is if all are equally wide.
    """
    nodes, devices, equal = cluster.node_of_rank, cluster.num_devices, cluster.num_devices / len(widths)
    borders = {rank for rank in range(devices + 1) if rank in (0, devices) or nodes[rank - 1] != nodes[rank]}

    def ends(stage: int, rank: int) -> list[int]:
        every = [rank + width for width in sorted(widths[stage]) if rank + width <= devices]
        alike = (stage + 1) * equal if rank == stage * equal else 0
        whole = borders if rank in borders else set()
        return [end for end in every if not by_nodes or nodes[rank] == nodes[end - 1] or end in whole or end == alike]

    levels = [{0}]
    for stage in range(len(widths)):
        levels.append({end for rank in levels[-1] for end in ends(stage, rank)})
    alive = levels[-1] & {devices}
    ways: list[dict[int, list[int]]] = []
    for stage in reversed(range(len(widths))):
        every = {rank: [end for end in ends(stage, rank) if end in alive] for rank in sorted(levels[stage])}
        ways.insert(0, {rank: own for rank, own in every.items() if own})
        alive = set(ways[0])
    return _numbered(cluster, ways) if alive else None


def _numbered(cluster: Cluster, ways: Sequence[dict[int, list[int]]]) -> Placements:
    """Device groups in the order of the stages; `ways`: by stage and first rank, where it can end."""
    numbers: dict[StageTopology, int] = {}
    moves: list[Moves] = []
    for stage in ways:
        found = {rank: [(stage_topology(cluster, range(rank, end)), end) for end in stage[rank]] for rank in stage}
        for topology in (topology for own in found.values() for topology, _ in own):
            numbers.setdefault(topology, len(numbers))
        moves.append({(rank,): tuple((numbers[kind], (end,)) for kind, end in own) for rank, own in found.items()})
    return Placements(tuple(numbers), tuple(moves))
