"""Where the pipeline stages of a configuration can be: neighbouring ranks of a node type or of each of several."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, pairwise, product
from math import prod
from operator import add
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.types import Cluster
from shardwright_search.cost_model.topology import StageTopology, stage_topology
from shardwright_search.solver.problem import Cut, Moves, Position

NodeTypes = tuple[str, ...]
"""That a stage is on, in the order of their names."""


class Placements(NamedTuple):
    """The kinds of pipeline stage, and in which order they can follow one another."""

    topologies: tuple[StageTopology, ...]
    """By the solver's device group."""
    moves: tuple[Moves, ...]
    """By pipeline stage; a position is the number of ranks of each node type that the stages before it take up."""
    pools: tuple[tuple[int, ...], ...]
    """The ranks of each node type: stages take them up in their order."""
    taken: tuple[Position, ...]
    """By device group: how many ranks of each node type."""

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
            position = _behind(position, self.taken[group])
            found.append(self.ranks_before(position, group))
        return tuple(found)

    def ranks_before(self, position: Position, group: int) -> tuple[int, ...]:
        """The ranks of the stage that ends at a position."""
        return _ranks_before(self.pools, position, self.taken[group])

    def ranks_behind(self, position: Position, group: int) -> tuple[int, ...]:
        """The ranks of the stage that starts at a position."""
        return self.ranks_before(_behind(position, self.taken[group]), group)


class _Stage(NamedTuple):
    """Ranks that a pipeline stage may take up: how many of each node type, and the position behind it."""

    taken: Position
    behind: Position


def placements(
    cluster: Cluster,
    widths: Sequence[Collection[int]],
    by_nodes: bool = False,
    ends: tuple[NodeTypes, NodeTypes] | None = None,
    spans: bool = False,
) -> Placements | None:
    """Every way to share out all ranks among stages, of which each has one of its own widths; None: there is none.

    A stage's ranks are of one node type, unless it `spans` several. `by_nodes`: each stage is in one node, or takes up
    whole nodes, or is where it is if all are equally wide. `ends`: the node types of the first and last stage, if these
    are given.
    """
    nodes = _Nodes(cluster, len(widths), by_nodes, spans)
    wanted = _wanted(ends, len(widths))

    def following(stage: int, position: Position) -> Iterator[_Stage]:
        for taken in nodes.following(stage, position, sorted(widths[stage])):
            if wanted[stage] <= {nodes.types_of(taken)}:
                yield _Stage(taken, _behind(position, taken))

    levels: list[set[Position]] = [{(0,) * len(nodes.pools)}]
    for stage in range(len(widths)):
        levels.append({next_.behind for position in levels[-1] for next_ in following(stage, position)})
    alive = levels[-1] & {tuple(map(len, nodes.pools))}
    ways: list[dict[Position, list[_Stage]]] = []
    for stage in reversed(range(len(widths))):
        every = {at: [own for own in following(stage, at) if own.behind in alive] for at in sorted(levels[stage])}
        ways.insert(0, {position: own for position, own in every.items() if own})
        alive = set(ways[0])
    return _numbered(cluster, nodes.pools, ways) if alive else None


def can_be_placed(
    cluster: Cluster,
    widths: Sequence[Collection[int]],
    by_nodes: bool = False,
    ends: tuple[NodeTypes, NodeTypes] | None = None,
    spans: bool = False,
) -> bool:
    """Whether there are placements; told without them where each stage is on one node type."""
    if not all(widths):
        return False
    each = {width for own in widths for width in own}
    if spans:
        return placements(cluster, widths, by_nodes, ends, spans) is not None
    if by_nodes or len(each) > 1:
        return bool(widths_of_types(cluster, widths, by_nodes, ends))
    (width,) = each
    pools = {cluster.node_type_of_rank[own[0]]: len(own) for own in pools_of(cluster)}
    if len(widths) * width != cluster.num_devices or any(ranks % width for ranks in pools.values()):
        return False
    if ends is None:
        return True
    first, last = ends
    if len(widths) == 1:
        return first == last == tuple(pools)
    return all(pools.get(name, 0) >= stages * width for name, stages in Counter(first + last).items())


def _wanted(ends: tuple[NodeTypes, NodeTypes] | None, pp_size: int) -> list[set[NodeTypes]]:
    """By stage, the node types that it has to be on."""
    wanted: list[set[NodeTypes]] = [set() for _ in range(pp_size)]
    if ends is not None:
        wanted[0].add(ends[0])
        wanted[-1].add(ends[1])
    return wanted


def widths_of_types(
    cluster: Cluster,
    widths: Sequence[Collection[int]],
    by_nodes: bool = False,
    ends: tuple[NodeTypes, NodeTypes] | None = None,
) -> dict[str, set[int]]:
    """By node type, how wide the stages on it are in the placements without stages that span types; {}: there are none.

    Told for all positions at once.
    """
    nodes, wanted = _Nodes(cluster, len(widths), by_nodes, False), _wanted(ends, len(widths))
    shape = tuple(len(own) + 1 for own in nodes.pools)
    moves = [
        [
            (pool, width, np.moveaxis(nodes.can_begin(stage, pool, width), pool, 0))
            for pool, width in product(range(len(shape)), own)
            if width < shape[pool] and wanted[stage] <= {nodes.types_of(_on_pool(shape, pool, width))}
        ]
        for stage, own in enumerate(widths)
    ]
    reached = [np.zeros(shape, bool) for _ in range(len(widths) + 1)]
    reached[0].flat[0] = True
    for (before, behind), own in zip(pairwise(reached), moves, strict=True):
        for pool, width, can in own:
            np.moveaxis(behind, pool, 0)[width:] |= np.moveaxis(before, pool, 0)[:-width] & can
    found: dict[str, set[int]] = {}
    alive = np.zeros(shape, bool)
    alive.flat[-1] = reached[-1].flat[-1]
    for before, own in zip(reached[-2::-1], reversed(moves), strict=True):
        leads = np.zeros(shape, bool)
        for pool, width, can in own:
            here = np.moveaxis(before, pool, 0)[:-width] & can & np.moveaxis(alive, pool, 0)[width:]
            if here.any():
                found.setdefault(nodes.names[pool], set()).add(width)
                np.moveaxis(leads, pool, 0)[:-width] |= here
        alive = leads
    return found


def _on_pool(pools: Sequence[object], pool: int, ranks: int) -> Position:
    """So many ranks of one node type."""
    return tuple(ranks if number == pool else 0 for number in range(len(pools)))


def most_moves(cluster: Cluster, widths: Sequence[Collection[int]], spans: bool = False) -> int:
    """No more stages than this are looked at behind all positions together, wherever they can be."""
    pools = pools_of(cluster)
    positions = prod(len(own) + 1 for own in pools)
    ways, last = max(len(own) * len(pools) for own in widths), len(widths) - 1
    if spans:  # so many nodes of each type; positions are looked at from which the end cannot be reached
        ways += prod(len({cluster.node_of_rank[rank] for rank in own}) + 1 for own in pools)
        return sum(ways * min(positions, ways**stage) for stage in range(len(widths)))
    return sum(ways * min(positions, ways ** min(stage, last - stage)) for stage in range(len(widths)))


def equal_stages(cluster: Cluster, width: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By node type the ranks of each stage, where all stages are so wide and none spans several types."""
    return tuple(tuple(own[i : i + width] for i in range(0, len(own), width)) for own in pools_of(cluster))


class _Nodes:
    """What a stage may take up of a cluster's nodes."""

    def __init__(self, cluster: Cluster, pp_size: int, by_nodes: bool, spans: bool) -> None:
        self.pools, self._nodes = pools_of(cluster), cluster.node_of_rank
        self.names = [cluster.node_type_of_rank[own[0]] for own in self.pools]
        self._equal, self._by_nodes = cluster.num_devices / pp_size, by_nodes
        self._spans = spans and len(self.pools) > 1
        nodes = self._nodes
        self._borders = [
            {0, len(own), *(i for i, (a, b) in enumerate(pairwise(own), 1) if nodes[a] != nodes[b])}
            for own in self.pools
        ]

    def types_of(self, taken: Position) -> NodeTypes:
        """The node types that so many ranks of each are of."""
        return tuple(sorted(name for name, count in zip(self.names, taken, strict=True) if count))

    def following(self, stage: int, position: Position, widths: Sequence[int]) -> Iterator[Position]:
        """How many ranks of each node type a stage may take up."""
        for pool, own in enumerate(self.pools):
            for width in widths:
                end = position[pool] + width
                if end <= len(own) and (not self._by_nodes or self._is_allowed(stage, position, pool, end)):
                    yield _on_pool(self.pools, pool, width)
        if self._spans:
            yield from self._spanning(stage, position, widths)

    def _is_allowed(self, stage: int, position: Position, pool: int, end: int) -> bool:
        """Of ranks of one type."""
        first, own, equal = position[pool], self.pools[pool], self._equal
        alike = sum(position) == stage * equal and (self._spans or first % equal == 0) and end == first + equal
        return self._nodes[own[first]] == self._nodes[own[end - 1]] or {first, end} <= self._borders[pool] or alike

    def can_begin(self, stage: int, pool: int, width: int) -> NDArray[Any]:
        """As `following` of ranks of one type, of all positions that leave enough of these, or an axis of them."""
        sizes = [len(own) + 1 for own in self.pools]
        sizes[pool] -= width
        axis = [size if number == pool else 1 for number, size in enumerate(sizes)]
        if not self._by_nodes:
            return np.ones(axis, bool)
        own, first = np.array([self._nodes[rank] for rank in self.pools[pool]]), np.arange(sizes[pool])
        borders = np.isin(np.arange(len(own) + 1), list(self._borders[pool]))
        here = (own[first] == own[first + width - 1]) | (borders[first] & borders[first + width])
        if width != self._equal:
            return np.asarray(here.reshape(axis))
        at = np.indices(sizes)
        return np.asarray(here.reshape(axis) | ((at.sum(0) == stage * width) & (at[pool] % width == 0)))

    def _spanning(self, stage: int, position: Position, widths: Sequence[int]) -> Iterator[Position]:
        """Of ranks of several types: whole nodes, or all that is left of them but for one type's."""
        left = [len(own) - first for own, first in zip(self.pools, position, strict=True)]
        whole = [
            [end - first for end in sorted(borders) if end > first] if first in borders else []
            for first, borders in zip(position, self._borders, strict=True)
        ]
        found = {taken for taken in product(*([0, *counts] for counts in whole)) if sum(taken) in widths}
        rests = widths
        if self._by_nodes:
            rests = [width for width in widths if width == self._equal and sum(position) == stage * width]
        for used in product(*({0, count} for count in left)):
            missing = [width - sum(used) for width in rests]
            found |= {used for more in missing if more == 0}
            found |= {
                (*used[:pool], more, *used[pool + 1 :])
                for pool, count in enumerate(left)
                for more in missing
                if used[pool] == 0 and 0 < more < count
            }
        yield from sorted(taken for taken in found if sum(map(bool, taken)) > 1)


def pools_of(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node type, types in the order of their first ranks."""
    pools: dict[str, list[int]] = {}
    types = cluster.node_type_of_rank
    for name, ranks in groupby(range(len(types)), key=types.__getitem__):
        pools.setdefault(name, []).extend(ranks)
    return tuple(map(tuple, pools.values()))


def _behind(position: Position, taken: Position) -> Position:
    return tuple(map(add, position, taken))


def _ranks_before(pools: Sequence[Sequence[int]], position: Position, taken: Position) -> tuple[int, ...]:
    """The ranks of a stage that takes up so many of each node type and ends at a position."""
    each = zip(pools, position, taken, strict=True)
    return tuple(sorted(rank for own, end, count in each for rank in own[end - count : end]))


def _numbered(
    cluster: Cluster, pools: tuple[tuple[int, ...], ...], ways: Sequence[dict[Position, list[_Stage]]]
) -> Placements:
    """Device groups in the order of the stages; `ways`: by stage and position, what the stage can be."""
    numbers: dict[StageTopology, int] = {}
    taken: list[Position] = []
    moves: list[Moves] = []
    for stage in ways:
        found: dict[Position, tuple[tuple[int, Position], ...]] = {}
        for position, every in stage.items():
            kinds = [stage_topology(cluster, _ranks_before(pools, own.behind, own.taken)) for own in every]
            for kind, own in zip(kinds, every, strict=True):
                if kind not in numbers:
                    numbers[kind] = len(numbers)
                    taken.append(own.taken)
            found[position] = tuple((numbers[kind], own.behind) for kind, own in zip(kinds, every, strict=True))
        moves.append(found)
    return Placements(tuple(numbers), tuple(moves), pools, tuple(taken))
