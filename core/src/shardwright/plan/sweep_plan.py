"""The plan of a sweep: which collectives are timed, among which ranks, and at which sizes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.groups import groups_by_kind
from shardwright.types import Cluster
from shardwright.types.hardware_profile import Collective, CollectiveKey, GroupKind

_ALWAYS_BYTES = 1024 * 1024
"""Sizes up to this one are timed no matter how short the time budget is."""
SIZE_STEP = 4
"""The factor between one message size and the next."""
COMPUTE_RATIOS = (0.5, 1.0, 2.0)
"""Times of the computations that a collective is overlapped with, relative to the collective's own time."""

_MIN_OVERLAP_BYTES = 4096
_OVERLAPPED = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""Collectives of data parallelism, which are timed while overlapped with a computation."""
_PAIR_BYTES = {"cpu": _ALWAYS_BYTES, "cuda": 16 * _ALWAYS_BYTES}
"""Bytes of the larger message of a pair: on GPUs, 1 MiB takes hardly longer than an empty message."""

Groups = tuple[tuple[int, ...], ...]


class CollectiveKind(NamedTuple):
    """A collective and the disjoint groups of one kind that run it at the same time.

    The groups of p2p are pairs (sender, receiver). Training uses all groups of a mesh axis at once, so that they share
    the links of a node: a group timed by itself would be too fast.
    """

    key: CollectiveKey
    groups: Groups

    def __str__(self) -> str:
        return f"{self.key.collective} of {self.key.group}"


class PairRound(NamedTuple):
    """Disjoint pairs (sender, receiver) of ranks at equal distance that send messages of one size at the same time."""

    pairs: Groups
    message_bytes: int

    def __str__(self) -> str:
        (source, target), count = self.pairs[0], len(self.pairs)
        return f"p2p of ranks {target - source} apart ({count} at once)"


class SizeRange(NamedTuple):
    """The smallest and the largest requested message in bytes, which define the sizes to time."""

    min_bytes: int
    max_bytes: int

    def all(self, group_size: int) -> tuple[int, ...]:
        """Return ascending sizes, each rounded up so that every rank of the group holds whole float32 numbers."""
        unit, size, sizes = 4 * group_size, self.min_bytes, []
        while size <= self.max_bytes:
            sizes.append(-(-size // unit) * unit)
            size *= SIZE_STEP
        return tuple(dict.fromkeys(sizes))

    def always(self, group_size: int) -> tuple[int, ...]:
        """Return the sizes that are timed no matter how short the budget is: up to the first of at least 1 MiB."""
        sizes = self.all(group_size)
        return sizes[: 1 + sum(size < _ALWAYS_BYTES for size in sizes)]

    def overlapped(self, group_size: int) -> tuple[int, ...]:
        """Return the sizes that are timed while overlapped with a computation: every second one.

        The largest size of `always` is included; sizes below 4 KiB are excluded, unless there are no others.
        """
        sizes, always = self.all(group_size), len(self.always(group_size))
        chosen = [size for number, size in enumerate(sizes, start=1) if (number - always) % 2 == 0]
        return tuple(size for size in chosen if size >= _MIN_OVERLAP_BYTES) or tuple(chosen[-1:])

    def of_pairs(self, device_type: str) -> tuple[int, ...]:
        """Return the one or two sizes at which links are timed."""
        small = min(-(-size // 4) * 4 for size in self)
        return tuple(sorted({small, max(small, min(self.max_bytes, _PAIR_BYTES[device_type]) // 4 * 4)}))


class SweepPlan(NamedTuple):
    """The messages to time, in order; they are timed after the rates."""

    kinds: tuple[CollectiveKind, ...]
    rounds: tuple[PairRound, ...]
    overlapped: tuple[CollectiveKind, ...]

    @classmethod
    def for_cluster(cls, cluster: Cluster, sizes: SizeRange, device_type: str) -> "SweepPlan":
        """Return the plan for a cluster, the same on all ranks."""
        kinds = collective_kinds(cluster)
        return cls(kinds, pair_rounds(cluster, sizes.of_pairs(device_type)), overlap_kinds(kinds))

    @property
    def steps(self) -> int:
        """Return the number of steps, for the display of progress."""
        return 1 + sum(map(len, self))


def collective_kinds(cluster: Cluster) -> tuple[CollectiveKind, ...]:
    """Return the collectives for each kind of group that layouts on the cluster have, and p2p of near and far ranks.

    The groups of a layout are cut out of blocks of neighbouring ranks, a stride apart; sizes and strides divide the
    devices of the cluster, or of a node. If several layouts have groups of the same kind, the layout with the largest
    stride represents all of them; if its groups are of several kinds, the groups of each kind are timed at once.
    """
    groups_by_key: dict[CollectiveKey, Groups] = {}
    for keys, groups in messages_alike(cluster):
        groups_by_key |= dict.fromkeys(keys, tuple(map(tuple, groups.tolist())))
    return tuple(CollectiveKind(key, groups) for key, groups in sorted(groups_by_key.items()))


def messages_alike(cluster: Cluster) -> Iterator[tuple[list[CollectiveKey], NDArray[Any]]]:
    """Yield the groups of `collective_kinds` as arrays [groups, size], each with the collectives that they run."""
    nodes = np.array(cluster.domain_of_rank)
    others = tuple(collective for collective in Collective if collective is not Collective.P2P)
    pairings = (_Grouping(pairs, pairs.view) for pairs in map(np.asarray, _pairings(cluster)))
    for collectives, layouts in ((others, _partitions(cluster)), ((Collective.P2P,), pairings)):
        seen: set[GroupKind] = set()
        for layout in layouts:
            if groups_by_kind(layout.sample, nodes).keys() <= seen:
                continue
            for kind, groups in groups_by_kind(layout.groups(), nodes).items():
                if kind not in seen:
                    seen.add(kind)
                    yield [CollectiveKey(collective, *kind) for collective in collectives], groups


def overlap_kinds(kinds: Sequence[CollectiveKind]) -> tuple[CollectiveKind, ...]:
    """Return the kinds that are timed while overlapped with a computation, including sends as in ring attention."""
    groups = dict(kinds)
    return tuple(CollectiveKind(key, groups[key]) for key in overlap_keys(groups, (*_OVERLAPPED, Collective.P2P)))


def overlap_keys(
    keys: Iterable[CollectiveKey], collectives: Sequence[Collective] = _OVERLAPPED
) -> tuple[CollectiveKey, ...]:
    """Return the keys that are timed while overlapped with a computation: each group size inside and across nodes.

    Among groups of one size across nodes, those with the fewest ranks per node are chosen, as in data parallelism.
    """
    chosen: dict[tuple[Collective, int, bool], CollectiveKey] = {}
    for key in sorted(keys, key=_overlap_order):
        if key.collective in collectives:
            chosen.setdefault((key.collective, key.group_size, key.group.across_nodes), key)
    return tuple(chosen.values())


def _overlap_order(key: CollectiveKey) -> tuple[object, ...]:
    return -key.group_size, key.group.across_nodes, key.collective, key.ranks_per_node, not key.consecutive


def pair_rounds(cluster: Cluster, message_bytes: Sequence[int]) -> tuple[PairRound, ...]:
    """Return all pairs of neighbours in pipelines of every possible number of stages, in disjoint rounds.

    The ranks of a stage are consecutive, so that the distance of neighbours is a stage's number of ranks.
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


class _Grouping(NamedTuple):
    """A way to split ranks into groups of one size [groups, size]."""

    sample: NDArray[Any]
    """Groups of the layout that include at least one of each kind."""
    groups: Callable[[], NDArray[Any]]
    """Function that returns all groups of the layout."""


def _partitions(cluster: Cluster) -> Iterator[_Grouping]:
    """Yield the ranks cut into groups of one size: inside each node first, then over the whole cluster."""
    nodes = _nodes(cluster)
    for size in range(2, max(map(len, nodes)) + 1):
        fitting = [node for node in nodes if len(node) % size == 0]
        for strided in (False, True):
            if wanted := [node for node in fitting if len(node) > size or not strided]:
                groups = _in_nodes(wanted, size, strided)
                yield _Grouping(groups, groups.view)
    world = cluster.num_devices
    same = len(nodes[0]) if len(set(map(len, nodes))) == 1 else world
    for size in (size for size in range(2, world + 1) if world % size == 0):
        most = world // size
        for stride in (stride for stride in range(most, 0, -1) if most % stride == 0):
            yield _Grouping(_sample(world, size, stride, same), partial(_apart, np.arange(world), size, stride))


def _sample(world: int, size: int, stride: int, same: int) -> NDArray[Any]:
    """Return a sample of groups of ranks a stride apart [groups, size] that covers all kinds of groups.

    Ranks that differ by `same` are placed on nodes in the same way; groups that differ by `same` ranks or blocks are,
    too.
    """
    block = size * stride
    firsts = block * np.arange(min(same, world // block))[:, None] + np.arange(min(same, stride))
    return firsts.reshape(-1, 1) + stride * np.arange(size)


def _in_nodes(nodes: Sequence[tuple[int, ...]], size: int, strided: bool) -> NDArray[Any]:
    """Return groups inside each node [groups, size], of neighbours or as far apart as possible, by first rank."""
    lengths = sorted({len(node) for node in nodes})
    alike = [np.array([node for node in nodes if len(node) == length]) for length in lengths]
    groups = np.concatenate([_apart(ranks, size, ranks.shape[1] // size if strided else 1) for ranks in alike])
    return groups[np.argsort(groups[:, 0])]


def _apart(ranks: NDArray[Any], size: int, stride: int) -> NDArray[Any]:
    """Return groups of ranks that are a stride apart [groups, size]."""
    return ranks.reshape(-1, size, stride).swapaxes(1, 2).reshape(-1, size)


def _pairings(cluster: Cluster) -> Iterator[Groups]:
    """Yield pairs (sender, receiver): neighbours, in a node and between nodes; then half a node or world apart."""
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
    numbered = groupby(enumerate(cluster.domain_of_rank), key=lambda pair: pair[1])
    return tuple(tuple(rank for rank, _ in ranks) for _, ranks in numbered)
