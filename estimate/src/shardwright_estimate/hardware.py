"""A hardware profile from the table of devices: what messages take by the alpha-beta model, with nothing measured."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_estimate.messages import NETWORK_STEP_S, START_S, Link, moved_bytes, steps
from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Source, Table
from shardwright_formats.semantics.groups import ranks_on_nodes
from shardwright_formats.semantics.sweep_plan import CollectiveKind, SizeRange, collective_kinds
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.hardware_profile import Collective, HardwareProfile, PointRow, RateRow, RepeatRow

_MIN_BYTES = 1024
_MAX_BYTES = 1024**3


class Network(NamedTuple):
    """What the nodes of a cluster are joined by, inside and between them, as reached."""

    link: Link
    """Of each device, inside a node; the slowest node's."""
    node_bytes_per_s: float | None
    """What one node sends to others, in one direction; None where there is one node."""


def analytic_hardware(
    cluster: Cluster, network: Network, rates: Mapping[str, float], provenance: Provenance
) -> HardwareProfile:
    """Every kind of message that a sweep would time, at growing sizes, each point with one time.

    `rates` are the device's by name, as a sweep has them. Raises BadInput where the cluster has several nodes and
    nothing says how fast they are joined.
    """
    if network.node_bytes_per_s is None and len(set(cluster.node_of_rank)) > 1:
        raise BadInput("--inter-node-gbit-s", "the cluster has several nodes", "give what one node sends, in Gbit/s")
    points = list(_points(cluster, network))
    devices = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    return HardwareProfile(
        cluster=cluster.name,
        device=" + ".join(devices),
        backend="analytic",
        provenance=provenance,
        points=Table.of(PointRow, (row for row, _ in points)),
        repeats=Table.of(
            RepeatRow, (RepeatRow(point=i, time_s=time_s, outlier=False) for i, (_, time_s) in enumerate(points))
        ),
        rates=Table.of(
            RateRow, (RateRow(name=name, value=value, source=Source.ANALYTIC) for name, value in rates.items())
        ),
    )


def kind_times_s(kind: CollectiveKind, cluster: Cluster, network: Network, message_bytes: NDArray[Any]) -> NDArray[Any]:
    """A kind of message that all its groups exchange at once: the slower of a device's link and a node's network.

    A ring crosses the border of a node once each way, and an all_to_all sends from each rank to all ranks of other
    nodes; groups that leave one node share its network.
    """
    collective, size, across = kind.key.collective, kind.key.group_size, kind.key.group.across_nodes
    step_s = NETWORK_STEP_S if across else network.link.step_s
    moved = moved_bytes(collective, size, 1) / network.link.bytes_per_s
    if across and network.node_bytes_per_s is not None:
        moved = max(moved, _leaving_share(kind, cluster) / network.node_bytes_per_s)
    return START_S + steps(collective, size) * step_s + moved * message_bytes


def _leaving_share(kind: CollectiveKind, cluster: Cluster) -> float:
    """Bytes that all groups send out of the node that sends most, over those of a message."""
    collective, groups, nodes = kind.key.collective, np.array(kind.groups), np.array(cluster.node_of_rank)
    if collective is Collective.P2P:
        return float(np.bincount(nodes[groups[:, 0]]).max())
    size = groups.shape[1]
    _, node, ranks = ranks_on_nodes(groups, nodes)
    ring = np.full(len(ranks), moved_bytes(collective, size, 1))
    leaving = ranks * (size - ranks) / size if collective is Collective.ALL_TO_ALL else ring
    return float(np.bincount(node, leaving).max())


def _points(cluster: Cluster, network: Network) -> Iterator[tuple[PointRow, float]]:
    for kind in collective_kinds(cluster):
        sizes = SizeRange(_MIN_BYTES, _MAX_BYTES).all(kind.key.group_size)
        times_s = kind_times_s(kind, cluster, network, np.array(sizes)).tolist()
        for message_bytes, time_s in zip(sizes, times_s, strict=True):
            row = PointRow(**kind.key._asdict(), message_bytes=message_bytes, interval=0.0, source=Source.ANALYTIC)
            yield row, time_s
