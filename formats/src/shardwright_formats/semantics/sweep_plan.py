"""The plan of a sweep: which collectives are timed among which ranks, and at which sizes."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright_formats.semantics.groups import groups_by_kind
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey

_ALWAYS_BYTES = 1024 * 1024
"""Sizes up to this one are timed however short the time budget is."""
SIZE_STEP = 4
"""Each message size is so many times the one before."""
COMPUTE_RATIOS = (0.5, 1.0, 2.0)
"""How long the computations are that a collective is overlapped with, over the collective alone."""

_MIN_OVERLAP_BYTES = 4096
_OVERLAPPED = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""What data parallelism overlaps with the computation."""
_PAIR_BYTES = {"cpu": _ALWAYS_BYTES, "cuda": 16 * _ALWAYS_BYTES}
"""The larger message of a pair: on GPUs 1 MiB takes hardly longer than nothing."""

Groups = tuple[tuple[int, ...], ...]


class CollectiveKind(NamedTuple):
    """A collective, how its ranks lie, and the disjoint groups of ranks that exchange it, all at the same time.

    The groups of p2p are pairs (sender, receiver). Training uses all groups of a mesh axis at once, so that they share
    the links of a node: a group timed alone would be too fast.
    """

    key: CollectiveKey
    groups: Groups

    def __str__(self) -> str:
        return f"{self.key.collective} of {self.key.group}"


class PairRound(NamedTuple):
    """Disjoint pairs (sender, receiver) one distance apart that exchange a message of one size at the same time."""

    pairs: Groups
    message_bytes: int

    def __str__(self) -> str:
        (source, target), count = self.pairs[0], len(self.pairs)
        return f"p2p of ranks {target - source} apart ({count} at once)"


class SizeRange(NamedTuple):
    """The smallest and the largest message that is asked for, in bytes, and the sizes that follow."""

    min_bytes: int
    max_bytes: int

    def all(self, group_size: int) -> tuple[int, ...]:
        """Ascending sizes, each rounded up so that every rank of the group holds whole float32 numbers."""
        unit, size, sizes = 4 * group_size, self.min_bytes, []
        while size <= self.max_bytes:
            sizes.append(-(-size // unit) * unit)
            size *= SIZE_STEP
        return tuple(dict.fromkeys(sizes))

    def always(self, group_size: int) -> tuple[int, ...]:
        """Those that are timed however short the time budget is: up to the first that reaches 1 MiB."""
        sizes = self.all(group_size)
        return sizes[: 1 + sum(size < _ALWAYS_BYTES for size in sizes)]

    def overlapped(self, group_size: int) -> tuple[int, ...]:
        """Those that are timed overlapped with a computation: every second one.

        The largest of `always` is among them; those under 4 KiB are not, unless there are no others.
        """
        sizes, always = self.all(group_size), len(self.always(group_size))
        chosen = [size for number, size in enumerate(sizes, start=1) if (number - always) % 2 == 0]
        return tuple(size for size in chosen if size >= _MIN_OVERLAP_BYTES) or tuple(chosen[-1:])

    def of_pairs(self, device_type: str) -> tuple[int, ...]:
        """The one or two sizes that links are timed at."""
        small = min(-(-size // 4) * 4 for size in self)
        return tuple(sorted({small, max(small, min(self.max_bytes, _PAIR_BYTES[device_type]) // 4 * 4)}))


class SweepPlan(NamedTuple):
    """What there is to time, in its order: rates, then these."""

    kinds: tuple[CollectiveKind, ...]
    rounds: tuple[PairRound, ...]
    overlapped: tuple[CollectiveKind, ...]

    @classmethod
    def of(cls, cluster: Cluster, sizes: SizeRange, device_type: str) -> "SweepPlan":
        """The plan for a cluster, the same on all ranks."""
        kinds = collective_kinds(cluster)
        return cls(kinds, pair_rounds(cluster, sizes.of_pairs(device_type)), overlap_kinds(kinds))

    @property
    def steps(self) -> int:
        """How many steps are counted while it goes on."""
        return 1 + sum(map(len, self))


def collective_kinds(cluster: Cluster) -> tuple[CollectiveKind, ...]:
    """Every collective by the kinds of group that layouts on the cluster have, and p2p of neighbours and far ranks.

    The groups of a layout are cut out of blocks of neighbouring ranks, a stride apart, where sizes and strides divide
    the devices of the cluster, or of a node. Of layouts with groups of the same kind that with the largest stride
    stands for all; where its groups are of several kinds, those of each are timed at once.
    """
    found: dict[CollectiveKey, Groups] = {}
    nodes = np.array(cluster.node_of_rank)
    others = tuple(collective for collective in Collective if collective is not Collective.P2P)
    layouts: list[tuple[tuple[Collective, ...], ArrayLike]] = [(others, groups) for groups in _partitions(cluster)]
    layouts += [((Collective.P2P,), pairs) for pairs in _pairings(cluster)]
    for collectives, groups in layouts:
        for kind, alike in groups_by_kind(groups, nodes).items():
            keys = [CollectiveKey(collective, *kind) for collective in collectives]
            if keys[0] not in found:
                found |= dict.fromkeys(keys, tuple(map(tuple, alike.tolist())))
    return tuple(CollectiveKind(key, groups) for key, groups in sorted(found.items()))


def overlap_kinds(kinds: Sequence[CollectiveKind]) -> tuple[CollectiveKind, ...]:
    """The kinds that are timed overlapped with a computation: each group size inside a node and across nodes.

    Of groups of one size across nodes those with the fewest ranks on a node are taken, as data parallelism has them.
    """
    found: dict[tuple[Collective, int, bool], CollectiveKind] = {}
    for kind in sorted(kinds, key=_overlap_order):
        if kind.key.collective in _OVERLAPPED:
            found.setdefault((*kind.key[:2], kind.key.group.across_nodes), kind)
    return tuple(found.values())


def _overlap_order(kind: CollectiveKind) -> tuple[object, ...]:
    key = kind.key
    return -key.group_size, key.group.across_nodes, key.collective, key.ranks_per_node, not key.consecutive


def pair_rounds(cluster: Cluster, message_bytes: Sequence[int]) -> tuple[PairRound, ...]:
    """Every pair of neighbours in a pipeline of as many stages as divide the ranks, at each size, in disjoint rounds.

    The ranks of a stage follow one another, so that neighbours are a stage's number of ranks apart.
    """
    world = cluster.num_devices
    rounds: list[PairRound] = []
    for apart in (apart for apart in range(1, world) if world % apart == 0):
        pairs = [(rank, rank + apart) for rank in range(world - apart)]
        for parity in (0, 1):
            # A rank is the receiver of one pair and the sender of the next: every second stage sends at a time.
            if disjoint := tuple(pair for pair in pairs if pair[0] // apart % 2 == parity):
                rounds.extend(PairRound(disjoint, size) for size in message_bytes)
    return tuple(rounds)


def _partitions(cluster: Cluster) -> Iterator[NDArray[Any]]:
    """The ranks cut into groups of one size [groups, size]: inside each node first, then over the whole cluster."""
    nodes = _nodes(cluster)
    for size in range(2, max(map(len, nodes)) + 1):
        fitting = [node for node in nodes if len(node) % size == 0]
        for strided in (False, True):
            if wanted := [node for node in fitting if len(node) > size or not strided]:
                yield np.concatenate([_apart(node, size, len(node) // size if strided else 1) for node in wanted])
    world = range(cluster.num_devices)
    for size in (size for size in range(2, len(world) + 1) if len(world) % size == 0):
        most = len(world) // size
        for stride in (stride for stride in range(most, 0, -1) if most % stride == 0):
            yield _apart(world, size, stride)


def _apart(ranks: Sequence[int], size: int, stride: int) -> NDArray[Any]:
    """Groups of ranks a stride apart [groups, size]."""
    return np.array(ranks).reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)


def _pairings(cluster: Cluster) -> Iterator[Groups]:
    """Senders and receivers: neighbours in a node and over a node's end, then ranks half a node or cluster apart."""
    nodes = _nodes(cluster)
    neighbours = tuple(pair for node in nodes for pair in zip(node[::2], node[1::2], strict=False))
    borders = tuple((left[-1], right[0]) for left, right in zip(nodes[::2], nodes[1::2], strict=False))
    world = tuple(range(cluster.num_devices))
    apart = ((part[i], part[i + len(part) // 2]) for part in nodes for i in range(len(part) // 2))
    far = ((world[i], world[i + len(world) // 2]) for i in range(len(world) // 2))
    for pairs in (neighbours, borders, tuple(apart), tuple(far)):
        if pairs:
            yield pairs


def _nodes(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    numbered = groupby(enumerate(cluster.node_of_rank), key=lambda pair: pair[1])
    return tuple(tuple(rank for rank, _ in ranks) for _, ranks in numbered)
