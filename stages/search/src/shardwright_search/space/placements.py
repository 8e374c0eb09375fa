"""Where the pipeline stages of a configuration can be: neighbouring ranks of one node type, types in any order."""

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from shardwright_formats.types.cluster import Cluster
from shardwright_search.cost_model.topology import StageTopology, stage_topology
from shardwright_search.solver.problem import Cut, Moves, Position


class Placements(NamedTuple):
    """The kinds of pipeline stage, and in which order they can follow one another."""

    topologies: tuple[StageTopology, ...]
    """By the solver's device group."""
    moves: tuple[Moves, ...]
    """By pipeline stage; a position is the number of ranks of each node type that the stages before it take up."""
    pools: tuple[tuple[int, ...], ...]
    """The ranks of each node type: a type's stages take them up in their order."""
    pool_of: tuple[int, ...]
    """By device group: the number of its node type."""

    @property
    def cuts(self) -> Iterator[Cut]:
        """Everything that can be between two stages."""
        for moves, following in pairwise(self.moves):
            for before, position in dict.fromkeys(move for own in moves.values() for move in own):
                for behind, _ in following[position]:
                    yield Cut(position, before, behind)

    def stage_ranks(self, groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The ranks of stages on these device groups."""
        position, found = (0,) * len(self.pools), []
        for group in groups:
            position = _behind(position, self.pool_of[group], self.topologies[group].size)
            found.append(self.ranks_before(position, group))
        return tuple(found)

    def ranks_before(self, position: Position, group: int) -> tuple[int, ...]:
        """The ranks of the stage that ends at a position."""
        pool, end = self.pool_of[group], position[self.pool_of[group]]
        return self.pools[pool][end - self.topologies[group].size : end]

    def ranks_behind(self, position: Position, group: int) -> tuple[int, ...]:
        """The ranks of the stage that starts at a position."""
        return self.ranks_before(_behind(position, self.pool_of[group], self.topologies[group].size), group)


class _Stage(NamedTuple):
    """Ranks of a node type that a pipeline stage may take up, and the position behind it."""

    pool: int
    ranks: tuple[int, ...]
    behind: Position


def placements(
    cluster: Cluster, widths: Sequence[Collection[int]], by_nodes: bool = False, ends: tuple[str, str] | None = None
) -> Placements | None:
    """Every way to share out all ranks among stages, of which each has one of its own widths; None: there is none.

    A stage's ranks are of one node type. `by_nodes`: each stage is in one node, or takes up whole nodes, or is where it
    is if all are equally wide. `ends`: the node types of the first and last stage, if these are given.
    """
    pools = pools_of(cluster)
    nodes, equal = cluster.node_of_rank, cluster.num_devices / len(widths)
    borders = [
        {0, len(own), *(i for i, (a, b) in enumerate(pairwise(own), 1) if nodes[a] != nodes[b])} for own in pools
    ]

    def allowed(stage: int, position: Position, pool: int, end: int) -> bool:
        first, own = position[pool], pools[pool]
        alike = sum(position) == stage * equal and first % equal == 0 and end == first + equal
        return nodes[own[first]] == nodes[own[end - 1]] or {first, end} <= borders[pool] or alike

    types = [cluster.node_type_of_rank[own[0]] for own in pools]
    wanted = {} if ends is None else {len(widths) - 1: ends[1], 0: ends[0]}

    def following(stage: int, position: Position) -> Iterator[_Stage]:
        for pool, own in enumerate(pools):
            first = position[pool]
            if wanted.get(stage, types[pool]) != types[pool]:
                continue
            for end in (first + width for width in sorted(widths[stage])):
                if end <= len(own) and (not by_nodes or allowed(stage, position, pool, end)):
                    yield _Stage(pool, own[first:end], _behind(position, pool, end - first))

    levels: list[set[Position]] = [{(0,) * len(pools)}]
    for stage in range(len(widths)):
        levels.append({next_.behind for position in levels[-1] for next_ in following(stage, position)})
    alive = levels[-1] & {tuple(map(len, pools))}
    ways: list[dict[Position, list[_Stage]]] = []
    for stage in reversed(range(len(widths))):
        every = {at: [own for own in following(stage, at) if own.behind in alive] for at in sorted(levels[stage])}
        ways.insert(0, {position: own for position, own in every.items() if own})
        alive = set(ways[0])
    return _numbered(cluster, pools, ways) if alive else None


def pools_of(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node type, types in the order of their first ranks."""
    pools: dict[str, list[int]] = {}
    types = cluster.node_type_of_rank
    for name, ranks in groupby(range(len(types)), key=types.__getitem__):
        pools.setdefault(name, []).extend(ranks)
    return tuple(map(tuple, pools.values()))


def _behind(position: Position, pool: int, width: int) -> Position:
    return (*position[:pool], position[pool] + width, *position[pool + 1 :])


def _numbered(
    cluster: Cluster, pools: tuple[tuple[int, ...], ...], ways: Sequence[dict[Position, list[_Stage]]]
) -> Placements:
    """Device groups in the order of the stages; `ways`: by stage and position, what the stage can be."""
    numbers: dict[StageTopology, int] = {}
    pool_of: list[int] = []
    moves: list[Moves] = []
    for stage in ways:
        found: dict[Position, tuple[tuple[int, Position], ...]] = {}
        for position, every in stage.items():
            kinds = [stage_topology(cluster, own.ranks) for own in every]
            for kind, own in zip(kinds, every, strict=True):
                if kind not in numbers:
                    numbers[kind] = len(numbers)
                    pool_of.append(own.pool)
            found[position] = tuple((numbers[kind], own.behind) for kind, own in zip(kinds, every, strict=True))
        moves.append(found)
    return Placements(tuple(numbers), tuple(moves), pools, tuple(pool_of))
