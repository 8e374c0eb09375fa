"""The plan of a sweep: which collectives are timed among which ranks, and at which sizes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright_formats.semantics.layout import tp_groups
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
        layout = "consecutive" if self.key.consecutive else "strided"
        place = "across nodes" if self.key.across_nodes else "in a node"
        return f"{self.key.collective} of {self.key.group_size} {layout} ranks {place}"


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
    """Every collective by group size and layout, and p2p between neighbours and between far ranks.

    Group sizes are the divisors, from 2, of the number of devices and of each node's. Where all ranks form one group
    there is only the consecutive kind.
    """
    kinds: dict[CollectiveKey, Groups] = {}
    for consecutive, groups in _partitions(cluster):
        for collective in (c for c in Collective if c is not Collective.P2P):
            key = CollectiveKey(collective, len(groups[0]), consecutive, _crosses(cluster, groups))
            kinds.setdefault(key, groups)
    for consecutive, pairs in _pairings(cluster):
        kinds.setdefault(CollectiveKey(Collective.P2P, 2, consecutive, _crosses(cluster, pairs)), pairs)
    return tuple(CollectiveKind(key, groups) for key, groups in sorted(kinds.items()))


def overlap_kinds(kinds: Sequence[CollectiveKind]) -> tuple[CollectiveKind, ...]:
    """The kinds that are timed overlapped with a computation: consecutive, each group size once, the largest first.

    Of groups of one size inside a node and across nodes those inside are taken.
    """
    found: dict[tuple[Collective, int], CollectiveKind] = {}
    for kind in sorted(kinds, key=lambda kind: (-kind.key.group_size, kind.key.across_nodes, kind.key.collective)):
        if kind.key.collective in _OVERLAPPED and kind.key.consecutive:
            found.setdefault(kind.key[:2], kind)
    return tuple(found.values())


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


def _partitions(cluster: Cluster) -> Iterator[tuple[bool, Groups]]:
    """The ranks cut into groups of one size: inside each node first, then over the whole cluster."""
    nodes = _nodes(cluster)
    for size in range(2, max(map(len, nodes)) + 1):
        fitting = [node for node in nodes if len(node) % size == 0]
        for consecutive in (True, False):
            wanted = [node for node in fitting if consecutive or len(node) > size]
            groups = tuple(group for node in wanted for group in tp_groups(node, size, consecutive))
            if groups:
                yield consecutive, groups
    world = range(cluster.num_devices)
    for size in (size for size in range(2, len(world) + 1) if len(world) % size == 0):
        yield True, tp_groups(world, size, True)
        if size < len(world):
            yield False, tp_groups(world, size, False)


def _pairings(cluster: Cluster) -> Iterator[tuple[bool, Groups]]:
    """Senders and receivers: neighbours in a node and over a node's end, then ranks half a node or cluster apart."""
    nodes = _nodes(cluster)
    neighbours = tuple(pair for node in nodes for pair in zip(node[::2], node[1::2], strict=False))
    borders = tuple((left[-1], right[0]) for left, right in zip(nodes[::2], nodes[1::2], strict=False))
    for pairs in (neighbours, borders):
        if pairs:
            yield True, pairs
    world = tuple(range(cluster.num_devices))
    for parts in (nodes, (world,)):
        apart = [(part[i], part[i + len(part) // 2]) for part in parts for i in range(len(part) // 2)]
        if far := tuple((source, target) for source, target in apart if target - source > 1):
            yield False, far


def _nodes(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    node_of_rank = cluster.node_of_rank
    return tuple(
        tuple(rank for rank, other in enumerate(node_of_rank) if other == node) for node in sorted(set(node_of_rank))
    )


def _crosses(cluster: Cluster, groups: Groups) -> bool:
    node_of_rank = cluster.node_of_rank
    return any(len({node_of_rank[rank] for rank in group}) > 1 for group in groups)
