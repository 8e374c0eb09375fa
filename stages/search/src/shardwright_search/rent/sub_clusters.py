"""All sub-clusters that can be rented, with their prices."""

from itertools import product
from math import prod
from operator import mul
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import Cluster, NodeGroup
from shardwright_search.space.request import Offer, Offers

MAX_SUB_CLUSTERS = 100_000


class SubCluster(NamedTuple):
    """A subset of a cluster's nodes, and its price."""

    cluster: Cluster
    counts: tuple[int, ...]
    """Nodes of each type, in the order of `node_types_of` the whole cluster."""
    usd_per_hour: float

    @property
    def name(self) -> str:
        """Return the sub-cluster's nodes in words, such as 2xp4d+1xg5."""
        return "+".join(f"{group.count}x{group.node_type}" for group in self.cluster.nodes)


def node_types_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the node types that a cluster has nodes of, in the order of its ranks."""
    return tuple(dict.fromkeys(group.node_type for group in cluster.nodes))


def sub_clusters(cluster: Cluster, offers: Offers, cluster_file: Path, offers_file: Path) -> tuple[SubCluster, ...]:
    """Return all that can be rented, the smallest first.

    Raises BadInput for a node type without a price, for a name that leads out of the folder of plans, and for offers
    that the cluster file does not have.
    """
    names = node_types_of(cluster)
    most = {name: sum(group.count for group in cluster.nodes if group.node_type == name) for name in names}
    _check(cluster, offers, most, cluster_file, offers_file)
    by_type = [offers.node_types.get(name, Offer()) for name in names]
    prices = [_usd_per_hour(cluster, name, offer) or 0.0 for name, offer in zip(names, by_type, strict=True)]
    possible = [
        range(most[name] + 1) if offer.counts is None else sorted(set(offer.counts))
        for name, offer in zip(names, by_type, strict=True)
    ]
    if (total := prod(map(len, possible))) > MAX_SUB_CLUSTERS:
        raise BadInput(offers_file, f"{total} sub-clusters, more than {MAX_SUB_CLUSTERS}", "list fewer counts")
    if not any(map(any, possible)):
        raise BadInput(offers_file, "counts: there are no nodes", "list a count above 0")
    offered = (
        SubCluster(
            _of_counts(cluster, dict(zip(names, counts, strict=True))),
            counts,
            sum(map(mul, counts, prices)),
        )
        for counts in product(*possible)
        if any(counts)
    )
    return tuple(sorted(offered, key=lambda each: (each.cluster.num_devices, each.counts)))


def _of_counts(cluster: Cluster, left: dict[str, int]) -> Cluster:
    """Return the first nodes of each type, in the order of the whole cluster."""
    nodes = []
    for group in cluster.nodes:
        taken = min(group.count, left[group.node_type])
        left = left | {group.node_type: left[group.node_type] - taken}
        if taken:
            nodes.append(NodeGroup(node_type=group.node_type, count=taken))
    return replace(cluster, nodes=tuple(nodes))


def _usd_per_hour(cluster: Cluster, name: str, offer: Offer) -> float | None:
    return cluster.node_types[name].usd_per_hour if offer.usd_per_hour is None else offer.usd_per_hour


def _check(cluster: Cluster, offers: Offers, most: dict[str, int], cluster_file: Path, offers_file: Path) -> None:
    for name, offer in offers.node_types.items():
        if name not in most:
            problem = f"node_types names {name!r}, cluster {cluster.name} has {', '.join(most)}"
            raise BadInput(offers_file, problem, "name its node types")
        if offer.counts is not None and max(offer.counts) > most[name]:
            problem = f"counts of {name}: {max(offer.counts)} nodes, cluster {cluster.name} has {most[name]}"
            raise BadInput(offers_file, problem, "list at most that many, or add nodes to the cluster file")
    for name in most:
        if "/" in name:
            problem = f"node type {name!r} holds a '/', and files of plans are named after their nodes"
            raise BadInput(cluster_file, problem, "choose another name")
        if _usd_per_hour(cluster, name, offers.node_types.get(name, Offer())) is None:
            problem = f"node type {name} has no usd_per_hour"
            raise BadInput(cluster_file, problem, "add it, there or in an offers file")
