"""The machines a plan is made for."""

from functools import cached_property
from typing import Annotated

from msgspec import Meta

from shardwright_formats.io.json import Document, Value
from shardwright_formats.types.limits import MAX_DEVICES, Name, NonNegativeNumber, PositiveBytes, Ranks


class NodeType(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of node: its devices, their memory and its price."""

    device: Annotated[str, Meta(min_length=1)]
    """The device's name as its driver gives it, or `cpu`."""
    devices_per_node: Ranks
    """Number of devices, and so of ranks, of one node."""
    memory_bytes: PositiveBytes
    """Memory of one device."""
    usd_per_hour: NonNegativeNumber | None = None
    """Price of one node, where it has one."""


class NodeGroup(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some equal nodes that follow one another in rank order."""

    node_type: str
    """A key of the cluster's `node_types`."""
    count: Ranks
    """Number of nodes."""


class Cluster(Document, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Ordered nodes: ranks are numbered through them, so a rank's node type follows from its number."""

    FORMAT = "shardwright.cluster"

    name: Name
    """What the user calls it; profiles of its hardware carry it."""
    nodes: Annotated[tuple[NodeGroup, ...], Meta(min_length=1)]
    """The nodes in rank order."""
    node_types: dict[str, NodeType]
    """By name; a type that no node is of may be among them."""

    def __post_init__(self) -> None:
        for group in self.nodes:
            if group.node_type not in self.node_types:
                raise ValueError(f"node type {group.node_type!r} is not among node_types")
        if self.num_devices > MAX_DEVICES:
            raise ValueError(f"{self.num_devices} devices are more than {MAX_DEVICES}")

    @cached_property
    def num_devices(self) -> int:
        """Number of devices, which is the number of ranks of a plan for this cluster."""
        return sum(g.count * self.node_types[g.node_type].devices_per_node for g in self.nodes)

    @cached_property
    def node_of_rank(self) -> tuple[int, ...]:
        """The node each rank runs on, counted from 0 in the order of `nodes`."""
        sizes = [self.node_types[g.node_type].devices_per_node for g in self.nodes for _ in range(g.count)]
        return tuple(node for node, size in enumerate(sizes) for _ in range(size))

    @cached_property
    def node_type_of_rank(self) -> tuple[str, ...]:
        """The node type each rank runs on."""
        return tuple(
            g.node_type for g in self.nodes for _ in range(g.count * self.node_types[g.node_type].devices_per_node)
        )
