"""The GPUs of `shardwright-search advise --gpus`, by a table of published figures."""

import re
from math import gcd
from typing import NamedTuple

from shardwright_estimate.devices import Device, DeviceTable, device_named
from shardwright_estimate.hardware import NodeRates, node_rates
from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, MAX_DEVICES, Cluster, NodeGroup, NodeType
from shardwright_search.options import AdviseOptions

_SPARE = 0.05
"""Share of a device's memory that is left to the driver and the allocator where no budget is given: an assumption."""
_NETWORKS = {
    "A100-40": (200, "DGX A100 datasheet, NVIDIA, 2020: 8 x 200 Gbit/s InfiniBand for 8 GPUs"),
    "A100-80": (200, "DGX A100 datasheet, NVIDIA, 2020: 8 x 200 Gbit/s InfiniBand for 8 GPUs"),
    "H100-SXM": (400, "DGX H100 datasheet, NVIDIA, 2022: 8 x 400 Gbit/s InfiniBand for 8 GPUs"),
    "H200": (400, "DGX H200 datasheet, NVIDIA, 2024: 8 x 400 Gbit/s InfiniBand for 8 GPUs"),
    "B200": (400, "DGX B200 datasheet, NVIDIA, 2024: 8 x 400 Gbit/s InfiniBand for 8 GPUs"),
}
"""By key in the table of devices: what a node sends for each of its GPUs, in Gbit/s, and who says so."""
_GPUS = re.compile(r"(?:(\d{1,6})x)?(\d{1,6}):([^+]+)")


class Machines(NamedTuple):
    """The nodes that are asked about, and what is assumed of each node type, by its key in the table of devices."""

    cluster: Cluster
    devices: dict[str, Device]
    budgets_gib: dict[str, float]
    networks: dict[str, NodeRates]
    """What a node of each type sends to others; empty where there is one node."""
    assumed: tuple[str, ...]

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes within a node of every type."""
        shared = gcd(*(node.devices_per_node for node in self.cluster.node_types.values()))
        return tuple(size for size in (1, 2, 4, 8) if shared % size == 0)

    def alone(self, node_type: str) -> Cluster:
        """The nodes of one type, and so many at least that one sends to another where some node of the cluster does."""
        groups = self.cluster.nodes
        count = sum(group.count for group in groups if group.node_type == node_type)
        nodes = (NodeGroup(node_type=node_type, count=max(count, 2) if len(self.networks) > 1 else count),)
        return Cluster(name=node_type, nodes=nodes, node_types={node_type: self.cluster.node_types[node_type]})


def machines_of(options: AdviseOptions, table: DeviceTable) -> Machines:
    """Read `--gpus`, and what is said of the GPUs besides; raises BadInput naming the option at fault."""
    groups = tuple(map(_group, options.gpus.split("+")))
    sizes = dict[str, int]()
    for node_type, _, per_node in groups:
        if sizes.setdefault(node_type, per_node) != per_node:
            what = f"nodes of {sizes[node_type]} and of {per_node} {node_type}"
            raise BadInput("--gpus", what, "give the nodes of a type as many GPUs each")
    if sum(nodes * per_node for _, nodes, per_node in groups) > MAX_DEVICES:
        raise BadInput("--gpus", f"{options.gpus} are too many", f"give 1 to {MAX_DEVICES} GPUs")
    if options.price_per_gpu_hour is not None and len(sizes) > 1:
        raise BadInput("--price-per-gpu-hour", "the GPUs are of several types", "leave it out")
    of_types = [_node_type(options, table, key, per_node) for key, per_node in sizes.items()]
    several = sum(nodes for _, nodes, _ in groups) > 1
    networks = {key: _network(options, key, per_node) for key, per_node in sizes.items()} if several else {}
    sent = [f"between nodes{f' of {key}' if len(sizes) > 1 else ''}: {who}" for key, (_, who) in networks.items()]
    return Machines(
        Cluster(
            name=options.gpus,
            nodes=tuple(NodeGroup(node_type=key, count=nodes) for key, nodes, _ in groups),
            node_types={key: of.node_type for key, of in zip(sizes, of_types, strict=True)},
        ),
        {key: of.device for key, of in zip(sizes, of_types, strict=True)},
        {key: of.budget_gib for key, of in zip(sizes, of_types, strict=True)},
        {key: rates for key, (rates, _) in networks.items()},
        (*(line for of in of_types for line in of.assumed), *sent),
    )


def _group(text: str) -> tuple[str, int, int]:
    """Device, nodes, and GPUs of each: `8x8:H100-SXM`, or `8:H100-SXM` for one node."""
    found = _GPUS.fullmatch(text)
    if found is None:
        raise BadInput("--gpus", f"{text!r} is not NODESxGPUS:DEVICE", "write for example 8x8:H100-SXM")
    nodes, per_node = int(found[1] or 1), int(found[2])
    if nodes < 1 or per_node < 1 or nodes * per_node > MAX_DEVICES:
        raise BadInput("--gpus", f"{nodes} nodes of {per_node} GPUs", f"give 1 to {MAX_DEVICES} GPUs")
    return found[3], nodes, per_node


class _OfType(NamedTuple):
    node_type: NodeType
    device: Device
    budget_gib: float
    assumed: tuple[str, ...]


def _node_type(options: AdviseOptions, table: DeviceTable, key: str, per_node: int) -> _OfType:
    name, device = device_named(table, key)
    if device.memory_bytes is None:
        raise BadInput("--gpus", f"the table has no memory of {key}", "choose another device")
    own_gib = device.memory_bytes / GIB
    budget_gib, spare = own_gib * (1 - _SPARE), f"{_SPARE:.0%} of {own_gib:g} GiB left to driver and allocator"
    if options.budget_gib is not None:
        budget_gib, spare = options.budget_gib, f"a budget of {options.budget_gib:g} GiB a GPU (given)"
    if budget_gib > own_gib:
        raise BadInput("--budget-gib", f"{budget_gib:g} is more than a {key} has, {own_gib:g}", "give less")
    price, priced = options.price_per_gpu_hour, "given"
    if price is None:
        price, priced = device.usd_per_hour, str(device.usd_per_hour_source)
    node_type = NodeType(
        device=name,
        devices_per_node=per_node,
        memory_bytes=device.memory_bytes,
        usd_per_hour=None if price is None else price * per_node,
    )
    told = f"price: {priced}" if price is not None else f"no price of {key} is known (--price-per-gpu-hour)"
    return _OfType(node_type, device, budget_gib, (f"{name}: {device.peaks_source}", spare, told))


def _network(options: AdviseOptions, key: str, per_node: int) -> tuple[NodeRates, str]:
    """What a node sends, and who says so."""
    if options.inter_node_gbit_s is not None:
        return node_rates(options.inter_node_gbit_s), f"{options.inter_node_gbit_s} Gbit/s a node (given)"
    if key in _NETWORKS:
        own, source = _NETWORKS[key]
        return node_rates(str(own * per_node)), f"{own * per_node:g} Gbit/s a node (--inter-node-gbit-s); {source}"
    raise BadInput("--inter-node-gbit-s", f"what nodes of {key} send is not known", "give it, in Gbit/s a node")
