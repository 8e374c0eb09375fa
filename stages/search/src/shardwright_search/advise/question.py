"""The search that `shardwright-search advise` makes of its options, by shapes and published figures alone."""

import re
from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_estimate.accuracy import SPARE_SHARE
from shardwright_estimate.devices import Device, DeviceTable, Efficiencies, device_named, rates_of, read_devices
from shardwright_estimate.hardware import NodeRates, node_rates
from shardwright_estimate.profile import hardware_profile, model_profile
from shardwright_estimate.runtimes import Runtime, attention_of
from shardwright_estimate.settings import ProfileSettings
from shardwright_formats.io import BadInput, did_you_mean, read_object
from shardwright_formats.types import (
    FP8,
    GIB,
    MAX_DEVICES,
    Attention,
    Cluster,
    Estimate,
    Model,
    NodeGroup,
    NodeType,
    Plan,
    Precision,
    Recompute,
    Schedule,
)
from shardwright_models.description import model_of_config
from shardwright_models.presets import read_presets
from shardwright_search.advise.experts import searched_ep_sizes
from shardwright_search.advise.long_context import priced_lengths, searched_cp_sizes
from shardwright_search.cost_model.profiles import Profiles, index_profiles, together
from shardwright_search.interop.limits import Setting
from shardwright_search.options import AdviseOptions
from shardwright_search.space.budget import budgets_of_stages
from shardwright_search.space.request import SearchRequest

_PACKAGE = "shardwright-search"
_MAX_INTERLEAVED = 2**16
"""The largest batch that interleaved schedules are searched for: of more microbatches bubbles are no share."""
_CHUNKS = (2, 4)
"""Layer ranges of a stage of interleaved schedules that are searched."""
_NETWORKS = {
    "A100-40": (200, "DGX A100 datasheet, NVIDIA, 2020: 8 x 200 Gbit/s InfiniBand for 8 GPUs"),
    "A100-80": (200, "DGX A100 datasheet, NVIDIA, 2020: 8 x 200 Gbit/s InfiniBand for 8 GPUs"),
    "H100-SXM": (400, "DGX H100 datasheet, NVIDIA, 2022: 8 x 400 Gbit/s InfiniBand for 8 GPUs"),
    "H200": (400, "DGX H200 datasheet, NVIDIA, 2024: 8 x 400 Gbit/s InfiniBand for 8 GPUs"),
    "B200": (400, "DGX B200 datasheet, NVIDIA, 2024: 8 x 400 Gbit/s InfiniBand for 8 GPUs"),
    "GB200": (400, "DGX GB200 datasheet, NVIDIA, 2024: 72 x 400 Gbit/s InfiniBand for 72 GPUs"),
    "B300": (800, "DGX B300 datasheet, NVIDIA, 2025: 8 x 800 Gbit/s InfiniBand for 8 GPUs"),
    "GB300": (800, "DGX GB300 datasheet, NVIDIA, 2025: 72 x 800 Gbit/s InfiniBand for 72 GPUs"),
}
"""Gbit/s that a node sends for each of its GPUs, and who says so, by key in the table of devices."""
_FP8_ASSUMED = ("fp8: products with the weights of blocks alone, without their casts; estimated, not trained here",)
_SHORT_NAMES = {"H100": "H100-SXM"}
"""Names that people write for one of several devices of the table."""
_USUAL_TOKENS = 2**22
"""Tokens of a step: Touvron et al. 2023, Llama 2, table 1, and Grattafiori et al. 2024, section 3.4.1."""
_GPUS = re.compile(r"(?:(\d{1,6})x)?(\d{1,6}):([^+]+)")


class Machines(NamedTuple):
    """The nodes that the user asks about, and assumptions on each node type, by its key in the table of devices."""

    cluster: Cluster
    devices: dict[str, Device]
    budgets_gib: dict[str, float]
    networks: dict[str, NodeRates]
    """Rates at which a node of each type sends to others; empty where there is one node."""
    assumed: tuple[str, ...]

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Return the tensor-parallel sizes that fit in a node of each type."""
        shared = gcd(*(node.devices_per_node for node in self.cluster.node_types.values()))
        return tuple(size for size in (1, 2, 4, 8) if shared % size == 0)

    def alone(self, node_type: str) -> Cluster:
        """Return the nodes of one type, and at least two where the cluster has several nodes of several types."""
        groups = self.cluster.nodes
        count = sum(group.count for group in groups if group.node_type == node_type)
        nodes = (NodeGroup(node_type=node_type, count=max(count, 2) if len(self.networks) > 1 else count),)
        return Cluster(name=node_type, nodes=nodes, node_types={node_type: self.cluster.node_types[node_type]})


class Question(NamedTuple):
    """A search without files: the request, estimated profiles, and the assumptions."""

    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles
    devices: dict[str, Device]
    """Published figures of the device of each node type."""
    budgets: dict[str, int]
    """Bytes of a GPU that a plan may use, by node type."""
    tp_sizes: tuple[int, ...]
    """Tensor-parallel sizes that fit in a node of each type."""
    assumed: tuple[str, ...]

    @property
    def setting(self) -> Setting:
        """Return what plans of the user's choices share with those that are searched."""
        request = self.request
        assert isinstance(request.global_batch_size, int)
        settings = request.precision, request.attention, request.compile
        return Setting(self.model, self.cluster, request.global_batch_size, *settings)

    def left_bytes(self, plan: Plan, estimate: Estimate) -> tuple[int, ...]:
        """Return the bytes that a plan leaves of the budget of a rank of each stage; negative where it does not fit."""
        budgets = budgets_of_stages(plan, self.budgets)
        return tuple(budget - stage.memory_bytes for budget, stage in zip(budgets, estimate.stages, strict=True))

    def fits(self, plan: Plan, estimate: Estimate) -> bool:
        """Return whether each pipeline stage fits the budget."""
        return min(self.left_bytes(plan, estimate)) >= 0

    @property
    def budget_words(self) -> str:
        """Return the budget of a GPU in words."""
        if len(self.budgets) == 1:
            return f"{next(iter(self.budgets.values())) / GIB:.1f} GiB a GPU"
        return " and ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in self.budgets.items())


def question_of(options: AdviseOptions) -> Question:
    """Read the model and the devices, and estimate profiles of both.

    Raises BadInput naming the option at fault.
    """
    model, source = model_of(options)
    table = read_devices()
    machines = machines_of(options, table)
    runtime = options.assumed
    _, attention = attention_of(runtime, Attention.AUTO)
    if options.precision == FP8 and attention is Attention.EAGER:
        raise BadInput("--attention", "eager is not estimated beside fp8", "take flash2 or flash3")
    batch = options.batch or _usual_batch(model, machines.cluster)
    unsaid = (
        () if options.batch else (f"batch: {batch} samples, about 4 Mi tokens a step as published runs took (--batch)",)
    )
    interleaved = (Schedule.INTERLEAVED_1F1B,) if batch <= _MAX_INTERLEAVED else ()
    request = SearchRequest(
        name="advise",
        global_batch_size=batch,
        memory_gib=machines.budgets_gib,
        tp_sizes=machines.tp_sizes,
        cp_sizes=searched_cp_sizes(model, machines.cluster.num_devices),
        ep_sizes=searched_ep_sizes(model, machines.cluster.num_devices),
        recompute=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL),
        schedules=(Schedule.ONE_F_ONE_B, *interleaved),
        chunks_per_stage=_CHUNKS,
        fine_grained=not options.uniform,
        precision=Precision(compute=options.precision),
        attention=attention,
        compile=options.compile,
    )
    lengths = priced_lengths(model.sequence_length, request.cp_sizes, options.against)
    models = (model, *(model_of(replace(options, seq=length))[0] for length in lengths))
    profiles = together([_profiles(request, models, machines, key, table, runtime) for key in machines.devices])
    budgets = {key: int(gib * GIB) for key, gib in machines.budgets_gib.items()}
    habits = f"{runtime.text}, of {'compiled' if options.compile else 'eager'} blocks (--runtime)"
    sources = (f"{runtime.name}: {source}" for source in runtime.sources)
    in_fp8 = _FP8_ASSUMED if options.precision == FP8 else ()
    assumed = (f"shapes: {source}", *unsaid, *machines.assumed, habits, *sources, *in_fp8)
    return Question(request, model, machines.cluster, profiles, machines.devices, budgets, machines.tp_sizes, assumed)


def _usual_batch(model: Model, cluster: Cluster) -> int:
    """Return the samples of about `_USUAL_TOKENS` tokens that all devices divide: one or more for each of them."""
    return cluster.num_devices * max(1, round(_USUAL_TOKENS / model.sequence_length / cluster.num_devices))


def _profiles(
    request: SearchRequest,
    models: Sequence[Model],
    machines: Machines,
    node_type: str,
    table: DeviceTable,
    runtime: Runtime,
) -> Profiles:
    """Return profiles that are estimated for the nodes of one type, of a model at its length and at further ones."""
    batch = request.global_batch_size
    assert isinstance(batch, int)
    settings = ProfileSettings(
        tp_sizes=machines.tp_sizes,
        sequence_parallel=request.sequence_parallel,
        recompute=tuple(Recompute),
        # Several lengths have curves, which two sizes and lengths determine.
        micro_batch_sizes=tuple(2**power for power in range(max(batch.bit_length(), min(2, len(models))))),
        precision=request.precision or Precision(),
        attention=request.attention,
        compile=request.compile,
    )
    rates, efficiencies, revised = rates_of(table, node_type), Efficiencies(), table.revised
    if settings.precision.compute == FP8 and FP8 not in map(str, machines.devices[node_type].peaks):
        raise BadInput("--precision", f"the table has no rate for fp8 products of {node_type}", "take bfloat16")
    named = [(Path(f"{each.name}, {each.sequence_length} tokens"), each) for each in models]
    made = model_profile(named, settings, rates, efficiencies, revised, _PACKAGE, runtime)
    alone, across = machines.alone(node_type), machines.networks.get(node_type)
    hardware = hardware_profile(alone, [rates], efficiencies, across, revised, _PACKAGE, runtime.overlap)
    return index_profiles(hardware, Path("--gpus"), made.profile, Path(models[0].name))


def model_of(options: AdviseOptions) -> tuple[Model, str]:
    """Return the description of a preset, a config.json or its folder, and where its shapes come from."""
    model, source = _whole_model(options)
    return options.trained(model), source


def _whole_model(options: AdviseOptions) -> tuple[Model, str]:
    presets, path = read_presets(), Path(options.model)
    if options.model in presets:
        preset = presets[options.model]
        length = options.seq or preset.sequence_length
        return model_of_config(preset.config, options.model, length, f"preset {options.model}"), preset.source
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        known = did_you_mean(options.model, presets, f"give a config.json, or one of {', '.join(presets)}")
        raise BadInput(options.model, "is no file and no preset", known)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_of_config(read_object(file), name, options.seq, file), str(file)


def machines_of(options: AdviseOptions, table: DeviceTable) -> Machines:
    """Read `--gpus`, and what is said of the GPUs besides; raises BadInput naming the option at fault."""
    groups = tuple(map(group_of, options.gpus.split("+")))
    short = {name for text in options.gpus.split("+") if (name := text.rpartition(":")[2]) in _SHORT_NAMES}
    taken = (f"{name}: taken for {_SHORT_NAMES[name]} (--gpus)" for name in sorted(short))
    sizes = dict[str, int]()
    for node_type, _, per_node in groups:
        if sizes.setdefault(node_type, per_node) != per_node:
            problem = f"nodes of {sizes[node_type]} and of {per_node} {node_type}"
            raise BadInput("--gpus", problem, "give the nodes of a type as many GPUs each")
    if sum(nodes * per_node for _, nodes, per_node in groups) > MAX_DEVICES:
        raise BadInput("--gpus", f"{options.gpus} are too many", f"give 1 to {MAX_DEVICES} GPUs")
    if options.price_per_gpu_hour is not None and len(sizes) > 1:
        raise BadInput("--price-per-gpu-hour", "the GPUs are of several types", "leave it out")
    types = {key: _node_type(options, table, key, per_node) for key, per_node in sizes.items()}
    several = sum(nodes for _, nodes, _ in groups) > 1
    networks = {key: _network(options, key, per_node) for key, per_node in sizes.items()} if several else {}
    sent = [f"between nodes{f' of {key}' if len(sizes) > 1 else ''}: {who}" for key, (_, who) in networks.items()]
    return Machines(
        Cluster(
            name=options.gpus,
            nodes=tuple(NodeGroup(node_type=key, count=nodes) for key, nodes, _ in groups),
            node_types={key: figures.node_type for key, figures in types.items()},
        ),
        {key: figures.device for key, figures in types.items()},
        {key: figures.budget_gib for key, figures in types.items()},
        {key: rates for key, (rates, _) in networks.items()},
        (*taken, *(line for figures in types.values() for line in figures.assumed), *sent),
    )


def group_of(text: str) -> tuple[str, int, int]:
    """Return device, nodes, and GPUs of each node: `8x8:H100-SXM`, or `8:H100-SXM` for one node."""
    match = _GPUS.fullmatch(text)
    if match is None:
        raise BadInput("--gpus", f"{text!r} is not NODESxGPUS:DEVICE", "write for example 8x8:H100-SXM")
    nodes, per_node = int(match[1] or 1), int(match[2])
    if nodes < 1 or per_node < 1 or nodes * per_node > MAX_DEVICES:
        raise BadInput("--gpus", f"{nodes} nodes of {per_node} GPUs", f"give 1 to {MAX_DEVICES} GPUs")
    return _SHORT_NAMES.get(match[3], match[3]), nodes, per_node


class _TypeFigures(NamedTuple):
    """A node type, and the assumptions on it."""

    node_type: NodeType
    device: Device
    budget_gib: float
    assumed: tuple[str, ...]


def _node_type(options: AdviseOptions, table: DeviceTable, key: str, per_node: int) -> _TypeFigures:
    """Return a node type by its device, with budget and price as given or by default."""
    name, device = device_named(table, key, "--gpus")
    if device.memory_bytes is None:
        raise BadInput("--gpus", f"the table has no memory of {key}", "choose another device")
    memory_gib = device.memory_bytes / GIB
    budget_gib = memory_gib * (1 - SPARE_SHARE)
    spare = f"{SPARE_SHARE:.0%} of {memory_gib:g} GiB left free, as published runs left it (docs/accuracy.md)"
    if options.budget_gib is not None:
        budget_gib, spare = options.budget_gib, f"a budget of {options.budget_gib:g} GiB a GPU (given)"
    if budget_gib > memory_gib:
        raise BadInput("--budget-gib", f"{budget_gib:g} is more than a {key} has, {memory_gib:g}", "give less")
    price, priced = options.price_per_gpu_hour, "given"
    if price is None:
        price, priced = device.usd_per_hour, str(device.usd_per_hour_source)
    node_type = NodeType(
        device=name,
        devices_per_node=per_node,
        memory_bytes=device.memory_bytes,
        usd_per_hour=None if price is None else price * per_node,
    )
    source = f"price: {priced}" if price is not None else f"no price of {key} is known (--price-per-gpu-hour)"
    return _TypeFigures(node_type, device, budget_gib, (f"{name}: {device.peaks_source}", spare, source))


def _network(options: AdviseOptions, key: str, per_node: int) -> tuple[NodeRates, str]:
    """Return the rates at which a node sends, and who says so."""
    if options.inter_node_gbit_s is not None:
        return node_rates(options.inter_node_gbit_s), f"{options.inter_node_gbit_s} Gbit/s a node (given)"
    if key in _NETWORKS:
        per_gpu, source = _NETWORKS[key]
        rate = per_gpu * per_node
        return node_rates(str(rate)), f"{rate:g} Gbit/s a node (--inter-node-gbit-s); {source}"
    raise BadInput("--inter-node-gbit-s", f"what nodes of {key} send is not known", "give it, in Gbit/s a node")
