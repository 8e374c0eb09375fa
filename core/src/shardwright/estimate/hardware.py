"""An estimated hardware profile from the device table: message times by the alpha-beta model, overlap as given.

A message takes a latency for each step of a ring, plus its bytes divided by a bandwidth (Hockney 1994). In a ring
(Patarasuk and Yuan 2009), all_reduce takes 2 (n-1) steps that move 2 (n-1)/n of the message through every rank's link;
all_gather and reduce_scatter take half of both. The latencies are rounded from NCCL's own cost model
(src/graph/tuning.cc, protocol Simple).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.estimate.overlap import Overlap, Slowdowns
from shardwright.io import BadInput
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Table
from shardwright.plan.communication import Message
from shardwright.plan.groups import ranks_on_nodes
from shardwright.plan.sweep_plan import SizeRange, messages_alike, overlap_keys
from shardwright.types import MAX_DEVICES, Cluster
from shardwright.types.hardware_profile import (
    Collective,
    CollectiveKey,
    HardwareProfile,
    OverlapRow,
    PointRow,
    RateRow,
    RepeatRow,
)

START_S = 10e-6
"""Seconds that any message takes before its first byte."""
NETWORK_STEP_S = 14e-6
"""Latency of one step between two nodes in seconds, according to NCCL's own cost model for a ring over a network."""


class Link(NamedTuple):
    """The link between the ranks of a group."""

    bytes_per_s: float
    """Achieved bandwidth in one direction."""
    step_s: float
    all_reduce: tuple[tuple[float, float], ...] = ()
    """Pairs of the bytes that each rank moves in an all_reduce, ascending, and the published time in seconds; empty if
    none was published."""


def steps(collective: Collective, group_size: int) -> int:
    """Return the number of consecutive messages: a ring's steps, or 1 if each pair of ranks has a separate link."""
    match collective:
        case Collective.ALL_REDUCE:
            return 2 * (group_size - 1)
        case Collective.P2P | Collective.ALL_TO_ALL:
            return 1
        case _:
            return group_size - 1


def moved_bytes(collective: Collective, group_size: int, message_bytes: float) -> float:
    """Return the bytes that each rank sends, for a message size as defined by `Collective`."""
    if collective is Collective.P2P:
        return message_bytes
    parts = 2 * (group_size - 1) if collective is Collective.ALL_REDUCE else group_size - 1
    return parts / group_size * message_bytes


def message_time_s(collective: Collective, group_size: int, message_bytes: float, link: Link) -> float:
    """Return the time of a message in seconds: for an all_reduce, the published time if there is one.

    Otherwise it is the start, a latency for each step, and the bytes that a rank sends divided by the link's bandwidth.
    """
    moved = moved_bytes(collective, group_size, message_bytes)
    if collective is Collective.ALL_REDUCE and link.all_reduce:
        return float(published_times_s(np.array(moved), link))
    return START_S + steps(collective, group_size) * link.step_s + moved / link.bytes_per_s


def published_times_s(moved: NDArray[Any], link: Link) -> NDArray[Any]:
    """Return times in seconds, interpolated between the published times of a link's all_reduce.

    `moved`: bytes that each rank moves. Beyond the published sizes, the largest message's rate applies.
    """
    sizes, times_s = (np.array(column) for column in zip(*link.all_reduce, strict=True))
    inside = np.clip(moved, sizes[0], sizes[-1])
    times: NDArray[Any] = np.interp(inside, sizes, times_s) + (moved - inside) * times_s[-1] / sizes[-1]
    return times


def messages_time_s(messages: Iterable[Message], link: Link) -> float:
    """Return the total time of messages that are sent one after another."""
    return sum(m.times * message_time_s(m.collective, m.group_size, m.bytes, link) for m in messages)


_OPTION = "--inter-node-gbit-s"
_GIGABIT = 1e9 / 8
_MAX_RATE = 1e9 * _GIGABIT
_MIN_BYTES = 1024
_MAX_BYTES = 1024**3


_UpTo = tuple[tuple[int, float], ...]
"""Pairs of a number of nodes, ascending, and the rate of groups that span at most this number."""


class NodeRates(NamedTuple):
    """Rates at which a node sends to other nodes, in bytes/s in one direction, by the number of nodes of a group.

    `step_s`: latency of one step from a node to the next.
    """

    up_to: _UpTo
    by_collective: tuple[tuple[Collective, _UpTo], ...] = ()
    """The rates of collectives to which `up_to` does not apply."""
    step_s: float = NETWORK_STEP_S

    def spanning(self, nodes: int, collective: Collective) -> float:
        """Return a collective's rate over a number of nodes: the rate stated for this or the next larger number.

        Raises BadInput if there is none.
        """
        rates = dict(self.by_collective).get(collective, self.up_to)
        for number, rate in rates:
            if nodes <= number:
                return rate
        problem = f"has no rate for groups of more than {rates[-1][0]} nodes, but groups of the cluster span {nodes}"
        raise BadInput(_OPTION, problem, "add the rate for that number of nodes")

    def scaled(self, factor: float) -> "NodeRates":
        """Return the rates multiplied by a factor."""
        by_collective = tuple((collective, _scaled(rates, factor)) for collective, rates in self.by_collective)
        return self._replace(up_to=_scaled(self.up_to, factor), by_collective=by_collective)

    @property
    def text(self) -> str:
        """Return the rates in words, for the notes of a profile."""
        others = (f"{collective} {_rates_text(up_to)}" for collective, up_to in self.by_collective)
        return "; ".join((_rates_text(self.up_to), *others))


def _scaled(up_to: _UpTo, factor: float) -> _UpTo:
    return tuple((nodes, rate * factor) for nodes, rate in up_to)


def _rates_text(up_to: _UpTo) -> str:
    return ", ".join(
        f"{rate:.4g}" + ("" if nodes == MAX_DEVICES else f" of up to {nodes} nodes") for nodes, rate in up_to
    )


def node_rates(text: str, step_s: float = NETWORK_STEP_S) -> NodeRates:
    """Parse `400`, in Gbit/s, or `2:400,4:300,16:150`, for groups that span up to 2, 4 and 16 nodes.

    Different rates of single collectives follow, as in `2:400,4:300+all_gather=2:200,4:150`. Raises BadInput, naming
    the option, if the text has another form.
    """
    first, *others = text.split("+")
    named = [part.partition("=") for part in others]
    names = [name for name, _, _ in named]
    if unknown := [name for name in names if name not in set(Collective) or names.count(name) > 1]:
        problem = f"{unknown[0]!r:.40} is not a collective, or is named twice"
        raise BadInput(_OPTION, problem, f"write 400+all_gather=300, with {', '.join(Collective)}")
    by_collective = tuple((Collective(name), _up_to(rates)) for name, _, rates in named)
    return NodeRates(_up_to(first), by_collective, step_s)


def _up_to(text: str) -> _UpTo:
    pairs = [part.rpartition(":") for part in text.split(",")]
    try:
        rates = [(int(nodes or MAX_DEVICES), float(rate) * _GIGABIT) for nodes, _, rate in pairs]
    except ValueError:
        rates = []
    if not rates or any(not 0 < rate < _MAX_RATE for _, rate in rates) or any(a[0] >= b[0] for a, b in pairwise(rates)):
        raise BadInput(
            _OPTION, f"{text!r:.40} is not a rate", "write 400, or 2:400,4:300 with growing numbers of nodes"
        )
    return tuple(rates)


class Network(NamedTuple):
    """The achievable rates of a cluster's links, inside its nodes and between them."""

    link: Link
    """Link of each device inside a node; the slowest one if nodes differ."""
    between: NodeRates | None
    """Rates between nodes; None if there is only one node."""
    overlap: Overlap | None
    """Slowdowns of overlap; None if they are unknown, so that nothing overlaps."""


def analytic_hardware(
    cluster: Cluster, network: Network, rates: Mapping[str, float], provenance: Provenance
) -> HardwareProfile:
    """Return the profile of all messages that a measurement would time, at growing sizes, with one time for each.

    `rates`: the device's rates by name, with the names of a measured profile. Raises BadInput if the cluster has
    several nodes but no rates between nodes are given.
    """
    if network.between is None and len(set(cluster.domain_of_rank)) > 1:
        raise BadInput(_OPTION, "the cluster has several nodes", "give what one node sends, in Gbit/s")
    points = sorted(_points(cluster, network), key=lambda point: (point[0].key, point[0].message_bytes))
    keys = dict.fromkeys(row.key for row, _ in points)
    devices = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    return HardwareProfile(
        cluster=cluster.name,
        device=" + ".join(devices),
        backend="analytic",
        provenance=provenance,
        points=Table.from_rows(PointRow, (row for row, _ in points)),
        repeats=Table.from_rows(
            RepeatRow, (RepeatRow(point=i, time_s=time_s, outlier=False) for i, (_, time_s) in enumerate(points))
        ),
        overlap=Table.from_rows(OverlapRow, () if network.overlap is None else overlap_rows(keys, network.overlap)),
        rates=Table.from_rows(
            RateRow, (RateRow(name=name, value=value, source=Source.ANALYTIC) for name, value in rates.items())
        ),
    )


def message_times_s(key: CollectiveKey, leaving: float, network: Network, message_bytes: NDArray[Any]) -> NDArray[Any]:
    """Return times in seconds if all groups send at once, limited by a device's link and by a node's network.

    A ring crosses the border of a node once in each direction; an all_to_all sends from each rank to all ranks of other
    nodes at once. Groups that leave the same node share its network; `leaving`: the bytes that they send out of it,
    relative to the message's bytes. As in NCCL's cost model, a ring crosses borders in as many steps as a ring with one
    rank per node would take.
    """
    collective, size = key.collective, key.group_size
    if collective is Collective.ALL_REDUCE and network.link.all_reduce and not key.group.across_nodes:
        return published_times_s(moved_bytes(collective, size, 1) * message_bytes, network.link)
    moved = moved_bytes(collective, size, 1) / network.link.bytes_per_s
    inside, crossing, step_s = steps(collective, size), 0, 0.0
    if key.group.across_nodes and network.between is not None:
        nodes, step_s = key.group.nodes, network.between.step_s
        moved = max(moved, leaving / network.between.spanning(nodes, collective))
        crossing = steps(collective, nodes)
    return START_S + (inside - crossing) * network.link.step_s + crossing * step_s + moved * message_bytes


def _leaving_shares(collectives: Iterable[Collective], groups: NDArray[Any], nodes: NDArray[Any]) -> Iterator[float]:
    """Yield, for each collective, the bytes that all groups send out of the busiest node, over a message's bytes."""
    size = groups.shape[1]
    _, node, ranks = ranks_on_nodes(groups, nodes)
    for collective in collectives:
        if collective is Collective.P2P:
            leaving, sending = np.ones(len(groups)), nodes[groups[:, 0]]
        elif collective is Collective.ALL_TO_ALL:
            leaving, sending = ranks * (size - ranks) / size, node
        else:
            leaving, sending = np.full(len(ranks), moved_bytes(collective, size, 1)), node
        yield float(np.bincount(sending, leaving).max())


def _points(cluster: Cluster, network: Network) -> Iterator[tuple[PointRow, float]]:
    nodes = np.array(cluster.domain_of_rank)
    # An NVLink domain of several nodes has the network of all of them.
    joined = min(cluster.nodes_in_domain(group.node_type) for group in cluster.nodes)
    network = network._replace(between=network.between and network.between.scaled(joined))
    for keys, groups in messages_alike(cluster):
        shares = _leaving_shares([key.collective for key in keys], groups, nodes)
        for key, leaving in zip(keys, shares, strict=True):
            sizes = SizeRange(_MIN_BYTES, _MAX_BYTES).all(key.group_size)
            times_s = message_times_s(key, leaving, network, np.array(sizes)).tolist()
            for message_bytes, time_s in zip(sizes, times_s, strict=True):
                row = PointRow(**key.columns, message_bytes=message_bytes, interval=0.0, source=Source.ANALYTIC)
                yield row, time_s


def overlap_rows(keys: Iterable[CollectiveKey], overlap: Overlap) -> Iterator[OverlapRow]:
    """Yield overlap slowdowns of each collective that a hardware sweep would measure, for any message size."""
    for key in overlap_keys(keys):
        slowdowns = overlap.across if key.group.across_nodes else overlap.inside
        yield unsized_overlap(key, slowdowns, Source.ASSUMED)


def unsized_overlap(key: CollectiveKey, slowdowns: Slowdowns, source: Source) -> OverlapRow:
    """Return the row of a collective overlapped with a computation, both of unknown size."""
    return OverlapRow(
        collective=key.collective,
        group_size=key.group_size,
        ranks_per_node=key.ranks_per_node,
        collective_bytes=0,
        compute_s=0.0,
        collective_s=0.0,
        compute_slowdown=slowdowns.compute,
        collective_slowdown=slowdowns.collective,
        source=source,
    )
