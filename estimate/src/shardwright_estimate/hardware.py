"""A hardware profile from the table of devices: what messages take by the alpha-beta model, with nothing measured."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from shardwright_estimate.messages import NETWORK_STEP_S, START_S, Link, moved_bytes, steps
from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Source, Table
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


def kind_time_s(kind: CollectiveKind, cluster: Cluster, network: Network, message_bytes: int) -> float:
    """A kind of message that all its groups exchange at once: the slower of a device's link and a node's network.

    A ring crosses the border of a node once each way, and an all_to_all sends from each rank to all ranks of other
    nodes; groups that leave one node share its network.
    """
    key = kind.key
    step_s = NETWORK_STEP_S if key.across_nodes else network.link.step_s
    latency_s = START_S + steps(key.collective, key.group_size) * step_s
    inside_s = moved_bytes(key.collective, key.group_size, message_bytes) / network.link.bytes_per_s
    if not key.across_nodes or network.node_bytes_per_s is None:
        return latency_s + inside_s
    leaving: Counter[int] = Counter()
    for group in kind.groups:
        leaving.update(_leaving_bytes(key.collective, group, cluster.node_of_rank, message_bytes))
    return latency_s + max(inside_s, max(leaving.values()) / network.node_bytes_per_s)


def _leaving_bytes(
    collective: Collective, group: tuple[int, ...], node_of_rank: tuple[int, ...], message_bytes: int
) -> dict[int, int]:
    """Bytes that one group sends out of each node that it has ranks on."""
    members = Counter(node_of_rank[rank] for rank in group)
    if len(members) == 1:
        return {}
    if collective is Collective.P2P:
        return {node_of_rank[group[0]]: message_bytes}
    size = len(group)
    if collective is Collective.ALL_TO_ALL:
        return {node: count * (size - count) * message_bytes // size for node, count in members.items()}
    return dict.fromkeys(members, round(moved_bytes(collective, size, message_bytes)))


def _points(cluster: Cluster, network: Network) -> Iterator[tuple[PointRow, float]]:
    for kind in collective_kinds(cluster):
        for message_bytes in SizeRange(_MIN_BYTES, _MAX_BYTES).all(kind.key.group_size):
            row = PointRow(**kind.key._asdict(), message_bytes=message_bytes, interval=0.0, source=Source.ANALYTIC)
            yield row, kind_time_s(kind, cluster, network, message_bytes)
