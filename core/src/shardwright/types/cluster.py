"""Clusters: the machines that a plan is made for."""

import re
from functools import cached_property
from math import gcd
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from shardwright.io import Document, Value
from shardwright.types.limits import GIB, MAX_DEVICES, Gib, Name, NonNegativeNumber, PositiveBytes, Ranks, Rate

_CPU = re.compile(r"cpu(?:/([2-9]|[1-9][0-9]))?")


class NodeType(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of node: its devices, their memory and its price."""

    device: Annotated[str, Meta(min_length=1)]
    """The device's name as its driver gives it, or `cpu`; or `cpu/2` to `cpu/99`, a CPU slowed by that factor, to try
    plans for several node types on one machine."""
    devices_per_node: Ranks
    """Number of devices, and so of ranks, of one node."""
    memory_bytes: PositiveBytes
    """Memory of one device."""
    domain_devices: Ranks | UnsetType = UNSET
    """The largest number of devices in one NVLink domain, which may span nodes: 72 for GB200 NVL72; by default
    `devices_per_node`."""
    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node, if known."""
    host_memory_gib: Gib | UnsetType = UNSET
    """Host memory of one node that its ranks share equally for what their layers offload, in GiB; needed to offload."""
    host_bytes_per_s: Rate | UnsetType = UNSET
    """Rate at which one device copies to or from host memory, in one direction, while all devices of the node copy;
    needed to offload, unless it was measured."""
    host_updates_per_s: Rate | UnsetType = UNSET
    """Parameters per second that the host updates for one rank while it updates for all ranks of the node; needed for
    `offload: update`, unless it was measured."""

    def __post_init__(self) -> None:
        if self.device.startswith("cpu/") and not self.on_cpu:
            raise ValueError(f"device {self.device!r}: a slowed CPU is cpu/2 to cpu/99")

    @property
    def host_bytes(self) -> int:
        """Return one rank's share of the host memory in bytes; 0 if `host_memory_gib` is not given."""
        return 0 if self.host_memory_gib is UNSET else int(self.host_memory_gib * GIB) // self.devices_per_node

    @property
    def domain_nodes(self) -> int:
        """Return the largest number of nodes in one NVLink domain; 1 if a domain does not span nodes."""
        return max(1, (0 if self.domain_devices is UNSET else self.domain_devices) // self.devices_per_node)

    @property
    def on_cpu(self) -> bool:
        """Return whether the node type's ranks compute on the CPU."""
        return _CPU.fullmatch(self.device) is not None

    @property
    def slowdown(self) -> int:
        """Return the factor by which the node type's ranks are slowed; 1 except for a slowed CPU."""
        match = _CPU.fullmatch(self.device)
        return int(match[1]) if match and match[1] else 1


class NodeGroup(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of equal nodes that are neighbours in rank order."""

    node_type: str
    """A key of the cluster's `node_types`."""
    count: Ranks
    """Number of nodes."""


class Cluster(Document, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A cluster of ordered nodes; ranks are numbered through them, so a rank's number determines its node type."""

    FORMAT = "shardwright.cluster"

    name: Name
    """Name that the user gives it; hardware profiles of the cluster carry it."""
    nodes: Annotated[tuple[NodeGroup, ...], Meta(min_length=1)]
    """The nodes in rank order."""
    node_types: dict[str, NodeType]
    """Node types by name; it may contain types that no node has."""

    def __post_init__(self) -> None:
        for group in self.nodes:
            if group.node_type not in self.node_types:
                raise ValueError(f"node type {group.node_type!r} is not among node_types")
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices} devices are more than {MAX_DEVICES}")

    @cached_property
    def num_devices(self) -> int:
        """Return the number of devices, which is the number of ranks of a plan for this cluster."""
        return sum(g.count * self.node_types[g.node_type].devices_per_node for g in self.nodes)

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """Return the node of each rank, counted from 0 in the order of `nodes`."""
        sizes = [self.node_types[g.node_type].devices_per_node for g in self.nodes for _ in range(g.count)]
        return tuple(node for node, size in enumerate(sizes) for _ in range(size))

    def nodes_in_domain(self, node_type: str) -> int:
        """Return the number of neighbouring nodes of a type in one NVLink domain: all of them if they fit into one.

        If they need several domains, each has the largest power of two of nodes that fits and divides the number of
        nodes in each group, as schedulers allocate them (16 of the 18 nodes of a rack), so that groups of ranks do not
        cross domains.
        """
        counts, most = (
            [g.count for g in self.nodes if g.node_type == node_type],
            self.node_types[node_type].domain_nodes,
        )
        if len(counts) == 1 and counts[0] <= most:
            return counts[0]
        return max(1 << power for power in range(most.bit_length()) if not gcd(*counts) % (1 << power))

    def domain_size(self, node_type: str) -> int:
        """Return the number of devices of each NVLink domain of a node type; one node's devices if none spans nodes."""
        return self.node_types[node_type].devices_per_node * self.nodes_in_domain(node_type)

    @cached_property
    def domain_of_rank(self) -> tuple[int, ...]:
        """Return the NVLink domain of each rank, counted from 0; without such domains, the rank's node."""
        sizes = []
        for group in self.nodes:
            sizes += [self.domain_size(group.node_type)] * (group.count // self.nodes_in_domain(group.node_type))
        return tuple(domain for domain, size in enumerate(sizes) for _ in range(size))

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return sum(group.count for group in self.nodes)

    @property
    def obstacle(self) -> str | None:
        """Return why plans for the cluster can be made but not run, or None if they can be run."""
        on_cpu = {self.node_types[group.node_type].on_cpu for group in self.nodes}
        return "cpu and other devices in one cluster exchange no collectives" if len(on_cpu) > 1 else None

    def of_rank(self, rank: int) -> NodeType:
        """Return the node type of a rank."""
        return self.node_types[self.node_type_of_rank[rank]]

    @cached_property
    def node_type_of_rank(self) -> tuple[str, ...]:
        """Return the node type of each rank."""
        return tuple(
            g.node_type for g in self.nodes for _ in range(g.count * self.node_types[g.node_type].devices_per_node)
        )
