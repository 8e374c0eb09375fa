"""From the options of `shardwright-search advise` to what a search needs, by shapes and published figures alone."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwright_estimate.devices import Device, device_named, read_devices
from shardwright_estimate.hardware import NodeRates, node_rates
from shardwright_estimate.model_shapes import model_of_config
from shardwright_estimate.presets import read_presets
from shardwright_estimate.profile import hardware_profile, model_profile
from shardwright_estimate.rates import Efficiencies, rates_of
from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import read_object
from shardwright_formats.types.cluster import Cluster, NodeGroup, NodeType
from shardwright_formats.types.limits import MAX_DEVICES
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import Precision
from shardwright_formats.types.strategy import Recompute
from shardwright_search.cost_model.profiles import Profiles, index_profiles
from shardwright_search.options import AdviseOptions
from shardwright_search.space.request import SearchRequest

_GIB = 2**30
_PACKAGE = "shardwright-search"
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
_GPUS = re.compile(r"(?:(\d{1,6})x)?(\d{1,6}):(.+)")


class Question(NamedTuple):
    """A search without files: what is searched, with what it is priced, and what was assumed."""

    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles
    device: Device
    budget_bytes: int
    assumed: tuple[str, ...]


def question_of(options: AdviseOptions) -> Question:
    """Read the model and the devices, and estimate both profiles.

    Raises BadInput naming the option at fault.
    """
    model, source = _model(options)
    nodes, per_node, key = _gpus(options.gpus)
    table = read_devices()
    name, device = device_named(table, key)
    if device.memory_bytes is None:
        raise BadInput("--gpus", f"the table has no memory of {key}", "choose another device")
    own_gib = device.memory_bytes / _GIB
    budget_gib, spare = own_gib * (1 - _SPARE), f"{_SPARE:.0%} of {own_gib:g} GiB left to driver and allocator"
    if options.budget_gib is not None:
        budget_gib, spare = options.budget_gib, f"a budget of {options.budget_gib:g} GiB a GPU (given)"
    if budget_gib > own_gib:
        raise BadInput("--budget-gib", f"{budget_gib:g} is more than a {key} has, {own_gib:g}", "give less")
    price, priced = options.price_per_gpu_hour, "given"
    if price is None:
        price, priced = device.usd_per_hour, str(device.usd_per_hour_source)
    node = NodeType(
        device=name,
        devices_per_node=per_node,
        memory_bytes=device.memory_bytes,
        usd_per_hour=None if price is None else price * per_node,
    )
    cluster = Cluster(name=options.gpus, nodes=(NodeGroup(node_type=key, count=nodes),), node_types={key: node})
    precision = Precision(compute=options.precision)
    across, network = _network(options, key, per_node) if nodes > 1 else (None, "")
    tp_sizes = tuple(size for size in (1, 2, 4, 8) if per_node % size == 0)
    request = SearchRequest(
        name="advise",
        global_batch_size=options.batch,
        memory_gib=budget_gib,
        tp_sizes=tp_sizes,
        recompute=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL),
        fine_grained=not options.uniform,
        precision=precision,
    )
    settings = ProfileSettings(
        tp_sizes=tp_sizes,
        sequence_parallel=request.sequence_parallel,
        recompute=request.recompute,
        micro_batch_sizes=tuple(_doubled(options.batch)),
        precision=precision,
    )
    rates, efficiencies = rates_of(table, key), Efficiencies()
    made = model_profile([(Path(options.model), model)], settings, rates, efficiencies, table.revised, _PACKAGE)
    hardware = hardware_profile(cluster, [rates], efficiencies, across, table.revised, _PACKAGE)
    assumed = [
        f"shapes: {source}",
        f"{name}: {device.peaks_source}",
        spare,
        f"price: {priced}" if price is not None else f"no price of {key} is known (--price-per-gpu-hour)",
    ]
    assumed += [f"between nodes: {network}"] if nodes > 1 else []
    profiles = index_profiles(hardware, Path("--gpus"), made.profile, Path("--model"))
    return Question(request, model, cluster, profiles, device, int(budget_gib * _GIB), tuple(assumed))


def _model(options: AdviseOptions) -> tuple[Model, str]:
    """The description of a preset, a config.json or its folder, and where its shapes come from."""
    presets, path = read_presets(), Path(options.model)
    if options.model in presets:
        preset = presets[options.model]
        length = options.seq or preset.sequence_length
        return model_of_config(preset.config, options.model, length, f"preset {options.model}"), preset.source
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        known = f"give a config.json, or one of {', '.join(presets)}"
        raise BadInput("MODEL", f"{options.model} is no file and no preset", known)
    if options.seq is None:
        raise BadInput("--seq", "a config.json does not say how long samples are", "give it, in tokens")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_of_config(read_object(file), name, options.seq, file), str(file)


def _gpus(text: str) -> tuple[int, int, str]:
    """Nodes, GPUs of each, and the device: `8x8:H100-SXM`, or `8:H100-SXM` for one node."""
    found = _GPUS.fullmatch(text)
    if found is None:
        raise BadInput("--gpus", f"{text!r} is not NODESxGPUS:DEVICE", "write for example 8x8:H100-SXM")
    nodes, per_node = int(found[1] or 1), int(found[2])
    if nodes < 1 or per_node < 1 or nodes * per_node > MAX_DEVICES:
        raise BadInput("--gpus", f"{nodes} nodes of {per_node} GPUs", f"give 1 to {MAX_DEVICES} GPUs")
    return nodes, per_node, found[3]


def _network(options: AdviseOptions, key: str, per_node: int) -> tuple[NodeRates, str]:
    """What a node sends, and who says so."""
    if options.inter_node_gbit_s is not None:
        return node_rates(options.inter_node_gbit_s), f"{options.inter_node_gbit_s} Gbit/s a node (given)"
    if key in _NETWORKS:
        own, source = _NETWORKS[key]
        return node_rates(str(own * per_node)), f"{own * per_node:g} Gbit/s a node (--inter-node-gbit-s); {source}"
    raise BadInput("--inter-node-gbit-s", f"what nodes of {key} send is not known", "give it, in Gbit/s a node")


def _doubled(largest: int) -> Iterator[int]:
    size = 1
    while size <= largest:
        yield size
        size *= 2
