"""Where the pipeline stages of a configuration can be: neighbouring ranks of a node type or of each of several."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import groupby, pairwise, product
from math import prod
from operator import add
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.types import Cluster
from shardwright_search.cost_model.collectives import StageTopology, stage_topology
from shardwright_search.solver.problem import Cut, Moves, Position

NodeTypes = tuple[str, ...]
"""Node types that a stage is on, sorted by name."""
_Way = tuple[Position, Position]
"""Ranks that a pipeline stage may take up: how many of each node type, and the position after it."""


class Placements(NamedTuple):
    """The kinds of pipeline stages, and the possible order of them."""

    topologies: tuple[StageTopology, ...]
    """Topologies of stages by the solver's device group."""
    moves: tuple[Moves, ...]
    """Moves by pipeline stage; a position is the number of ranks of each node type that earlier stages take up."""
    pools: tuple[tuple[int, ...], ...]
    """The ranks of each node type, in the order in which stages take them up."""
    taken: tuple[Position, ...]
    """Ranks of each node type that a stage takes up, by device group."""

    @property
    def cuts(self) -> Iterator[Cut]:
        """Return all possible boundaries between two stages."""
        for moves, following in pairwise(self.moves):
            for before, position in dict.fromkeys(move for behind in moves.values() for move in behind):
                for behind, _ in following[position]:
                    yield Cut(position, before, behind)

    def stage_ranks(self, groups: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of stages on these device groups."""
        position, stages = (0,) * len(self.pools), []
        for group in groups:
            stages.append(self.ranks_behind(position, group))
            position = _behind(position, self.taken[group])
        return tuple(stages)

    def ranks_before(self, position: Position, group: int) -> tuple[int, ...]:
        """Return the ranks of the stage that ends at a position."""
        return _ranks_before(self.pools, position, self.taken[group])

    def ranks_behind(self, position: Position, group: int) -> tuple[int, ...]:
        """Return the ranks of the stage that starts at a position."""
        return self.ranks_before(_behind(position, self.taken[group]), group)


class StageWays(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The ways to divide all ranks of a cluster among pipeline stages of given widths.

    A stage's ranks have one node type, unless it may span several (`spans`). `by_nodes`: each stage is in one node, or
    takes up whole nodes, or is placed as among equally wide stages. `ends`: the node types of the first and last stage,
    if these are given.
    """

    cluster: Cluster
    widths: Sequence[Collection[int]]
    """The widths that each pipeline stage may have."""
    by_nodes: bool = False
    ends: tuple[NodeTypes, NodeTypes] | None = None
    spans: bool = False

    @property
    def _required_types(self) -> list[set[NodeTypes]]:
        """Return the node types that each stage must be on; an empty set: any."""
        required: list[set[NodeTypes]] = [set() for _ in self.widths]
        if self.ends is not None:
            required[0].add(self.ends[0])
            required[-1].add(self.ends[1])
        return required

    @cached_property
    def placements(self) -> Placements | None:
        """Return all ways, listed; None if there is none."""
        widths, required = self.widths, self._required_types
        nodes = _Nodes(self.cluster, len(widths), self.by_nodes, self.spans)

        def following(stage: int, position: Position) -> list[_Way]:
            taken = nodes.following(stage, position, sorted(widths[stage]))
            return [(each, _behind(position, each)) for each in taken if required[stage] <= {nodes.types_of(each)}]

        levels: list[set[Position]] = [{(0,) * len(nodes.pools)}]
        for stage in range(len(widths)):
            levels.append({behind for position in levels[-1] for _, behind in following(stage, position)})
        alive = levels[-1] & {tuple(map(len, nodes.pools))}
        stages: list[dict[Position, list[_Way]]] = []
        for stage in reversed(range(len(widths))):
            ways = {at: [way for way in following(stage, at) if way[1] in alive] for at in sorted(levels[stage])}
            stages.insert(0, {position: kept for position, kept in ways.items() if kept})
            alive = set(stages[0])
        return _numbered(self.cluster, nodes.pools, stages) if alive else None

    @cached_property
    def exist(self) -> bool:
        """Return whether there is a way, without listing them if each stage is on one node type."""
        if not all(self.widths):
            return False
        if self.spans:
            return self.placements is not None
        if self.by_nodes or len(alike := {width for each in self.widths for width in each}) > 1:
            return bool(self.widths_of_types)
        (width,), pools = alike, Counter(self.cluster.node_type_of_rank)
        if len(self.widths) * width != self.cluster.num_devices or any(ranks % width for ranks in pools.values()):
            return False
        if self.ends is None:
            return True
        first, last = self.ends
        if len(self.widths) == 1:
            return first == last == tuple(pools)
        return all(pools[name] >= stages * width for name, stages in Counter(first + last).items())

    @cached_property
    def widths_of_types(self) -> dict[str, set[int]]:
        """The widths of stages on each node type, over all ways in which no stage spans types; {}: there are none.

        All positions are examined together, as arrays [ranks of each node type].
        """
        nodes, required = _Nodes(self.cluster, len(self.widths), self.by_nodes, False), self._required_types
        shape = tuple(len(pool) + 1 for pool in nodes.pools)
        moves = [
            [
                (pool, width, np.moveaxis(nodes.can_begin(stage, pool, width), pool, 0))
                for pool, width in product(range(len(shape)), allowed)
                if width < shape[pool] and required[stage] <= {(nodes.names[pool],)}
            ]
            for stage, allowed in enumerate(self.widths)
        ]
        reached = [np.zeros(shape, bool) for _ in range(len(self.widths) + 1)]
        reached[0].flat[0] = True
        for (before, behind), ways in zip(pairwise(reached), moves, strict=True):
            for pool, width, can in ways:
                np.moveaxis(behind, pool, 0)[width:] |= np.moveaxis(before, pool, 0)[:-width] & can
        by_type: dict[str, set[int]] = {}
        alive = np.zeros(shape, bool)
        alive.flat[-1] = reached[-1].flat[-1]
        for before, ways in zip(reached[-2::-1], reversed(moves), strict=True):
            leads = np.zeros(shape, bool)
            for pool, width, can in ways:
                here = np.moveaxis(before, pool, 0)[:-width] & can & np.moveaxis(alive, pool, 0)[width:]
                if here.any():
                    by_type.setdefault(nodes.names[pool], set()).add(width)
                    np.moveaxis(leads, pool, 0)[:-width] |= here
            alive = leads
        return by_type

    @property
    def max_moves(self) -> int:
        """Return an upper bound of the number of stages tried at all positions together."""
        pools, last = pools_of(self.cluster), len(self.widths) - 1
        positions = prod(len(pool) + 1 for pool in pools)
        ways = max(len(each) * len(pools) for each in self.widths)
        if self.spans:  # any number of nodes of each type; positions that do not lead to the end are tried, too
            ways += prod(len({self.cluster.node_of_rank[rank] for rank in pool}) + 1 for pool in pools)
            return sum(ways * min(positions, ways**stage) for stage in range(last + 1))
        return sum(ways * min(positions, ways ** min(stage, last - stage)) for stage in range(last + 1))


class _Nodes:
    """The ranks of a cluster's nodes that a stage may take up."""

    def __init__(self, cluster: Cluster, pp_size: int, by_nodes: bool, spans: bool) -> None:
        self.pools, self._nodes = pools_of(cluster), cluster.node_of_rank
        self.names = [cluster.node_type_of_rank[pool[0]] for pool in self.pools]
        self._equal, self._by_nodes = cluster.num_devices / pp_size, by_nodes
        self._spans = spans and len(self.pools) > 1
        self._borders = [
            {0, len(pool), *(i for i, (a, b) in enumerate(pairwise(pool), 1) if self._nodes[a] != self._nodes[b])}
            for pool in self.pools
        ]

    def types_of(self, taken: Position) -> NodeTypes:
        """Return the node types of which a stage has ranks, from its number of ranks of each."""
        return tuple(sorted(name for name, count in zip(self.names, taken, strict=True) if count))

    def following(self, stage: int, position: Position, widths: Sequence[int]) -> Iterator[Position]:
        """Yield how many ranks of each node type a stage may take up."""
        for pool, ranks in enumerate(self.pools):
            for width in widths:
                end = position[pool] + width
                if end <= len(ranks) and (not self._by_nodes or self._is_allowed(stage, position, pool, end)):
                    yield tuple(width * (number == pool) for number in range(len(self.pools)))
        if self._spans:
            yield from self._spanning(stage, position, widths)

    def _is_allowed(self, stage: int, position: Position, pool: int, end: int) -> bool:
        """Return whether a stage may occupy these ranks of one type."""
        first, ranks, equal = position[pool], self.pools[pool], self._equal
        alike = sum(position) == stage * equal and (self._spans or first % equal == 0) and end == first + equal
        return self._nodes[ranks[first]] == self._nodes[ranks[end - 1]] or {first, end} <= self._borders[pool] or alike

    def can_begin(self, stage: int, pool: int, width: int) -> NDArray[Any]:
        """Return where `following` has this many ranks of one type, at all positions that leave enough of them.

        An axis is 1 where the number of ranks of its type makes no difference.
        """
        sizes = [len(ranks) + 1 for ranks in self.pools]
        sizes[pool] -= width
        axis = [size if number == pool else 1 for number, size in enumerate(sizes)]
        if not self._by_nodes:
            return np.ones(axis, bool)
        nodes, first = np.array([self._nodes[rank] for rank in self.pools[pool]]), np.arange(sizes[pool])
        borders = np.isin(np.arange(len(nodes) + 1), list(self._borders[pool]))
        here = (nodes[first] == nodes[first + width - 1]) | (borders[first] & borders[first + width])
        if width != self._equal:
            return np.asarray(here.reshape(axis))
        at = np.indices(sizes)
        return np.asarray(here.reshape(axis) | ((at.sum(0) == stage * width) & (at[pool] % width == 0)))

    def _spanning(self, stage: int, position: Position, widths: Sequence[int]) -> Iterator[Position]:
        """Yield ranks of each type that a stage over several may take up: whole nodes, or all that is left of types.

        In the latter case it may take up a part of one more type.
        """
        left = [len(ranks) - first for ranks, first in zip(self.pools, position, strict=True)]
        whole = [
            [end - first for end in sorted(borders) if end > first] if first in borders else []
            for first, borders in zip(position, self._borders, strict=True)
        ]
        ways = {taken for taken in product(*([0, *counts] for counts in whole)) if sum(taken) in widths}
        if self._by_nodes:
            widths = [width for width in widths if width == self._equal and sum(position) == stage * width]
        for used in product(*({0, count} for count in left)):
            missing = [width - sum(used) for width in widths]
            ways |= {used for more in missing if more == 0}
            ways |= {
                (*used[:pool], more, *used[pool + 1 :])
                for pool, count in enumerate(left)
                for more in missing
                if used[pool] == 0 and 0 < more < count
            }
        yield from sorted(taken for taken in ways if sum(map(bool, taken)) > 1)


def pools_of(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node type, types in the order of their first ranks."""
    pools: dict[str, list[int]] = {}
    types = cluster.node_type_of_rank
    for name, ranks in groupby(range(len(types)), key=types.__getitem__):
        pools.setdefault(name, []).extend(ranks)
    return tuple(map(tuple, pools.values()))


def _behind(position: Position, taken: Position) -> Position:
    return tuple(map(add, position, taken))


def _ranks_before(pools: Sequence[Sequence[int]], position: Position, taken: Position) -> tuple[int, ...]:
    """Return the ranks of a stage with these numbers of ranks of each node type that ends at a position."""
    parts = zip(pools, position, taken, strict=True)
    return tuple(sorted(rank for pool, end, count in parts for rank in pool[end - count : end]))


def _numbered(
    cluster: Cluster, pools: tuple[tuple[int, ...], ...], stages: Sequence[dict[Position, list[_Way]]]
) -> Placements:
    """Return the ways of each stage, by position, with device groups numbered in the order of the stages."""
    numbers, taken = dict[StageTopology, int](), list[Position]()

    def group_of(way: _Way) -> int:
        number = numbers.setdefault(stage_topology(cluster, _ranks_before(pools, way[1], way[0])), len(numbers))
        if number == len(taken):
            taken.append(way[0])
        return number

    moves = tuple(
        {position: tuple((group_of(way), way[1]) for way in following) for position, following in ways.items()}
        for ways in stages
    )
    return Placements(tuple(numbers), moves, pools, tuple(taken))
