"""All sub-clusters that can be rented, with their prices and how often they are interrupted."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import Cluster, NodeGroup
from shardwright_search.space.request import Offer, Offers

MAX_SUB_CLUSTERS = 100_000


class SubCluster(NamedTuple):
    """Some of the nodes of a cluster, and what they cost."""

    cluster: Cluster
    counts: tuple[int, ...]
    """Of each node type, in the order of `node_types_of` the whole cluster."""
    usd_per_hour: float
    interruptions_per_hour: float
    """Of all nodes together: each that is taken away stops the run."""

    @property
    def name(self) -> str:
        """As 2xp4d+1xg5."""
        return "+".join(f"{group.count}x{group.node_type}" for group in self.cluster.nodes)


def node_types_of(cluster: Cluster) -> tuple[str, ...]:
    """The node types that a cluster has nodes of, in the order of its ranks."""
    return tuple(dict.fromkeys(group.node_type for group in cluster.nodes))


def sub_clusters(cluster: Cluster, offers: Offers, cluster_file: Path, offers_file: Path) -> tuple[SubCluster, ...]:
    """All that can be rented, the smallest first.

    Raises BadInput for a node type without a price, and for offers that the cluster file does not have.
    """
    names = node_types_of(cluster)
    most = {name: sum(group.count for group in cluster.nodes if group.node_type == name) for name in names}
    _check(cluster, offers, most, cluster_file, offers_file)
    every = [offers.node_types.get(name, Offer()) for name in names]
    choices = [
        tuple(range(most[name] + 1)) if offer.counts is None else tuple(sorted(set(offer.counts)))
        for name, offer in zip(names, every, strict=True)
    ]
    found = [
        SubCluster(
            _of_counts(cluster, dict(zip(names, counts, strict=True))),
            counts,
            sum(n * _usd(cluster, name, offer) for n, name, offer in zip(counts, names, every, strict=True)),
            sum(n * offer.interruptions_per_hour for n, offer in zip(counts, every, strict=True)),
        )
        for counts in _counts(choices, offers_file)
    ]
    return tuple(sorted(found, key=lambda one: (one.cluster.num_devices, one.counts)))


def _counts(choices: list[tuple[int, ...]], file: Path) -> Iterator[tuple[int, ...]]:
    total = 1
    for numbers in choices:
        total *= len(numbers)
    if total > MAX_SUB_CLUSTERS:
        raise BadInput(file, f"{total} sub-clusters, more than {MAX_SUB_CLUSTERS}", "list fewer counts")
    found = [counts for counts in product(*choices) if any(counts)]
    if not found:
        raise BadInput(file, "counts: no node can be had", "list a count above 0")
    yield from found


def _of_counts(cluster: Cluster, left: dict[str, int]) -> Cluster:
    """The first nodes of each type, in the order of the whole cluster."""
    nodes = []
    for group in cluster.nodes:
        taken = min(group.count, left[group.node_type])
        left = left | {group.node_type: left[group.node_type] - taken}
        if taken:
            nodes.append(NodeGroup(node_type=group.node_type, count=taken))
    return replace(cluster, nodes=tuple(nodes))


def _usd(cluster: Cluster, name: str, offer: Offer) -> float:
    price = cluster.node_types[name].usd_per_hour if offer.usd_per_hour is None else offer.usd_per_hour
    return 0.0 if price is None else price


def _check(cluster: Cluster, offers: Offers, most: dict[str, int], cluster_file: Path, offers_file: Path) -> None:
    for name, offer in offers.node_types.items():
        if name not in most:
            what = f"node_types names {name!r}, cluster {cluster.name} has {', '.join(most)}"
            raise BadInput(offers_file, what, "name its node types")
        if offer.counts is not None and max(offer.counts) > most[name]:
            what = f"counts of {name}: {max(offer.counts)} nodes, cluster {cluster.name} has {most[name]}"
            raise BadInput(offers_file, what, "list at most that many, or add nodes to the cluster file")
    for name in most:
        if cluster.node_types[name].usd_per_hour is None and offers.node_types.get(name, Offer()).usd_per_hour is None:
            what = f"node type {name} has no usd_per_hour"
            raise BadInput(cluster_file, what, "add it, there or in an offers file")
