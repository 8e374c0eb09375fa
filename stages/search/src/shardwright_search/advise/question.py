"""The question that `shardwright advise` searches, made of its options, shapes and published figures only."""

import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.command import CommandLine
from shardwright.devices.table import Device, DeviceTable, device_named, read_devices
from shardwright.display.units import gib_text
from shardwright.estimate.hardware import NodeRates, node_rates
from shardwright.estimate.machines import Efficiencies, rates_of
from shardwright.estimate.notes import MEMORY_SEEN, SPARE_SHARE
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.runtimes import SHARDWRIGHT, Runtime, attention_of
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, did_you_mean, read_bytes, read_document
from shardwright.models.alike import has_images, is_known, read_config, read_configuration
from shardwright.models.config_keys import without_notes
from shardwright.models.context import recompute_kinds
from shardwright.models.description import USUAL_TOKENS, model_of_config, stated_length
from shardwright.models.mtp import with_mtp
from shardwright.models.registry import FAMILIES, read_presets
from shardwright.models.traits import Config
from shardwright.types import GIB, MAX_DEVICES, MIB, Cluster, Estimate, Model, NodeGroup, NodeType
from shardwright.types.plan import FP8, NARROW_BITS, NVFP4, Attention, Plan, Precision, Schedule
from shardwright.types.strategy import RECOMPUTE_SETS, RECOMPUTE_WHOLE, Offload, Recompute
from shardwright_search.cost_model.expert_load import LoadFile, read_load
from shardwright_search.cost_model.profiles import Profiles, index_profiles, together
from shardwright_search.options import AdviseOptions
from shardwright_search.space.budget import over_bytes
from shardwright_search.space.request import SearchRequest
from shardwright_search.systems.entry import Setting
from shardwright_search.systems.registry import SYSTEMS

_MAX_INTERLEAVED = 2**16
"""The largest batch for which interleaved schedules are searched: with more microbatches bubbles are negligible."""
_CHUNKS = (2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Layer ranges of a stage that are searched: published plans have up to 8 (MLPerf, 405B) and 12 (NVIDIA, GPT-3)."""
_NARROW_ASSUMED = "{}: products with the weights of blocks alone, without their casts; estimated, not trained here"
_HOST_SHARE = 2
"""Host memory of a node over the memory of its GPUs, as systems for training have it or more; an assumption."""
_FORMATS = ("bfloat16", "float16", "float32")
_USUAL_TOKENS = 2**22
"""Tokens of a step: Touvron et al. 2023, Llama 2, table 1, and Grattafiori et al. 2024, section 3.4.1."""
_GPUS = re.compile(r"(?:(\d{1,6})x)?(\d{1,6}):([^+]+)")


class Machines(NamedTuple):
    """The nodes that the user asks about, and the assumptions on each node type by its key in the device table."""

    cluster: Cluster
    devices: dict[str, Device]
    budgets_gib: dict[str, float]
    networks: dict[str, NodeRates]
    """Rates at which a node of each type sends to others; empty if there is one node."""
    assumed: tuple[str, ...]

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Return the tensor-parallel sizes that fit in a node of each type."""
        shared = gcd(*map(self.cluster.domain_size, self.cluster.node_types))
        return tuple(size for size in (1, 2, 4, 8) if shared % size == 0)

    def alone(self, node_type: str) -> Cluster:
        """Return a cluster of the nodes of one type; at least two nodes if the whole cluster has several types."""
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
    budgets: dict[str, int]
    """Bytes of a GPU that a plan may use, by node type."""
    tp_sizes: tuple[int, ...]
    """Tensor-parallel sizes that fit in a node of each type."""
    assumed: tuple[str, ...]
    other: Profiles | None = None
    """The profiles if the runtime runs experts in the other way, plain or tuned; None: there is only one way."""
    is_tuned: bool = False

    @property
    def setting(self) -> Setting:
        """Return the settings that plans of the user's choices have in common with searched plans."""
        request = self.request
        assert isinstance(request.global_batch_size, int)
        settings = request.precision, request.optimizers[0], request.attention, request.compile, request.loss_chunks
        return Setting(self.model, self.cluster, request.global_batch_size, *settings)

    def left_bytes(self, plan: Plan, estimate: Estimate) -> tuple[int, ...]:
        """Return the unused bytes of the budget of a rank of each stage; negative if the plan does not fit."""
        return tuple(-over for over in over_bytes(plan, estimate, self.budgets))

    def fits(self, plan: Plan, estimate: Estimate) -> bool:
        """Return whether each pipeline stage fits the budget."""
        return min(self.left_bytes(plan, estimate)) >= 0

    @property
    def whole(self) -> "Question":
        """The same question about all memory of each GPU."""
        types = self.cluster.node_types
        budgets = {name: types[name].memory_bytes for name in self.budgets}
        request = replace(self.request, memory_gib={name: size / GIB for name, size in budgets.items()})
        return self._replace(request=request, budgets=budgets)

    @property
    def budget_words(self) -> str:
        """Return the memory budget of a GPU in words."""
        if len(self.budgets) == 1:
            return f"{gib_text(next(iter(self.budgets.values())), 1)} a GPU"
        return " and ".join(f"{gib_text(size, 1)} of {name}" for name, size in self.budgets.items())


def question_of(options: AdviseOptions) -> Question:
    """Read the model and the devices, and estimate profiles of both.

    Raises BadInput naming the option at fault.
    """
    model, source = model_of(options)
    table = read_devices()
    machines = machines_of(options, table)
    runtime, other = _runtimes(options, model, machines)
    _, attention = attention_of(runtime, Attention.AUTO)
    _check_precision(options.precision, machines)
    if options.offload != "none" and options.target is not None:
        raise BadInput("--offload", f"plans for {options.target} have none", "leave it out, or leave out --for")
    if options.base is not None and model.trained_count == model.parameter_count:
        raise BadInput("--base", f"{options.base} is for frozen parameters, but all are trained", "give --lora, too")
    if options.precision in NARROW_BITS and attention is Attention.EAGER:
        problem = f"eager attention is not estimated with {options.precision}"
        raise BadInput("--attention", problem, "take flash2 or flash3")
    batch = options.batch or _usual_batch(model, machines.cluster)
    unsaid: tuple[str, ...] = (
        () if options.batch else (f"batch: {batch} samples, about 4 Mi tokens a step as published runs took (--batch)",)
    )
    if options.seq is None and options.model not in read_presets() and _is_text(model):
        unsaid += (f"tokens a sample: {model.sequence_length}, at most {USUAL_TOKENS} and the model's (--seq)",)
    interleaved = (Schedule.INTERLEAVED_1F1B,) if batch <= _MAX_INTERLEAVED else ()
    request = SearchRequest(
        name="advise",
        global_batch_size=batch,
        memory_gib=machines.budgets_gib,
        tp_sizes=machines.tp_sizes,
        cp_sizes=searched_cp_sizes(model, machines.cluster.num_devices),
        ep_sizes=_searched_ep_sizes(model, machines.cluster.num_devices),
        recompute=_recomputed(options, model),
        schedules=(Schedule.ONE_F_ONE_B, *interleaved),
        chunks_per_stage=_CHUNKS,
        fine_grained=not options.uniform,
        precision=options.formats,
        optimizer="any" if "any" in options.optimizer else tuple(o for o in options.optimizer if o != "any"),
        attention=attention,
        compile=options.compile,
        loss_chunks=options.loss_chunks,
        offload=_offloads(options, machines),
    )
    lengths = priced_lengths(model.sequence_length, request.cp_sizes, options.against)
    models = (model, *(model_of(replace(options, seq=length))[0] for length in lengths))
    load = None if options.imbalance is None else read_load(options.imbalance)

    compared = (kind for kind in RECOMPUTE_SETS if any(f"recompute={kind}" in text for text in options.against))
    asked = recompute_kinds(request.recompute, model)
    kinds = tuple(dict.fromkeys((*RECOMPUTE_WHOLE, Recompute.LIGHT, *asked, *compared)))

    def profiles_under(assumed: Runtime) -> Profiles:
        made = (_profiles(request, kinds, models, machines, key, table, assumed) for key in machines.devices)
        return together([each._replace(load=load) for each in made])

    budgets = {key: int(gib * GIB) for key, gib in machines.budgets_gib.items()}
    named_by = "--runtime" if options.runtime is not None or options.target is None else f"--for {options.target}"
    habits = f"{runtime.text}, of {'compiled' if options.compile else 'eager'} blocks ({named_by})"
    sources = (f"{runtime.name}: {source}" for source in runtime.sources)
    formats = tuple(_formats_assumed(options))
    logged = (f"experts get positions as in {load.path} (--imbalance)",) if isinstance(load, LoadFile) else ()
    assumed = (f"shapes: {source}", *unsaid, *machines.assumed, habits, *sources, *formats, *logged, MEMORY_SEEN)
    return Question(
        request,
        model,
        machines.cluster,
        profiles_under(runtime),
        budgets,
        machines.tp_sizes,
        assumed,
        None if other is None else profiles_under(other),
        options.tuned,
    )


def _recomputed(options: AdviseOptions, model: Model) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that layers choose from; plans for another system have that system's kinds."""
    if options.recompute is None:
        return Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL
    if options.target is not None:
        raise BadInput(
            "--recompute parts", f"plans for {options.target} name their own", "leave it out, or leave out --for"
        )
    if options.compile:
        raise BadInput(
            "--recompute parts", "compiled blocks do not free results of their parts", "leave one of them out"
        )
    if model.family not in FAMILIES:
        raise BadInput("--recompute parts", f"parts of {model.family} blocks are not known", "leave it out")
    return recompute_kinds(options.recompute, model)


def _offloads(options: AdviseOptions, machines: Machines) -> tuple[Offload, ...]:
    """Return what layers may offload; hosts update parameters only if their rate is known."""
    if options.offload != "any":
        return tuple(dict.fromkeys((Offload.NONE, Offload(options.offload))))
    known = all(node.host_updates_per_s is not UNSET for node in machines.cluster.node_types.values())
    return tuple(kind for kind in Offload if known or kind is not Offload.UPDATE)


def _is_text(model: Model) -> bool:
    """Return whether samples may have any length, as in text; a traced model, which has no family, counts as text."""
    family = FAMILIES.get(model.family)
    return family is None or family.fixed_positions(family.configured(model.config)) is None


def _runtimes(options: AdviseOptions, model: Model, machines: Machines) -> tuple[Runtime, Runtime | None]:
    """Return the assumed runtime, and its variant that exchanges experts' rows in the other way, if it has one."""
    plain = options.assumed_of(SHARDWRIGHT if options.target is None else SYSTEMS[options.target].runtime)
    mxfp8 = options.precision == FP8 and all(device.mxfp8 for device in machines.devices.values())
    sparse = any(kind.experts is not UNSET for kind in model.types.values())
    tuned = plain.tuned(NVFP4 if options.precision == NVFP4 else "mxfp8" if mxfp8 else None) if sparse else None
    if tuned is not None and options.target is not None:
        # No argument of Megatron-LM, and no field of a recipe with a named precision, asks for it.
        tuned = replace(tuned, fp8_attention=False)
    if tuned is None and options.tuned:
        problem = f"the runtime {plain.name} has no tuned way to run {model.name}"
        raise BadInput("--tuned", problem, "leave it out, or take a runtime that has one, for a model with experts")
    return (tuned, plain) if options.tuned and tuned is not None else (plain, tuned)


def _formats_assumed(options: AdviseOptions) -> Iterator[str]:
    """Yield sentences on the assumed number formats of products, parameters and optimizer states."""
    if options.precision in NARROW_BITS:
        yield _NARROW_ASSUMED.format(options.precision)
    if options.formats.parameters != "float32" and options.parameters is None:
        yield "parameters, gradients and the optimizer's states in bfloat16, as runs of --lora have them (--parameters)"
    if options.base is not None:
        yield (
            f"frozen matrices of blocks in {options.base}: each is brought into the compute format for its product, "
            "whose time is not counted; not trained here (--base)"
        )


def _check_precision(asked: str, machines: Machines) -> None:
    """Raise BadInput for a format without a published rate for some device, with one that has a rate for all."""
    lacking = next((key for key, device in machines.devices.items() if device.peak(asked) is None), None)
    if lacking is not None:
        remedy = next((f"take {each}" for each in _FORMATS if all(d.peak(each) for d in machines.devices.values())), "")
        problem = f"the table has no rate for {asked} products of {lacking}"
        raise BadInput("--precision", problem, remedy or "choose another device")


def _usual_batch(model: Model, cluster: Cluster) -> int:
    """Return a batch of about `_USUAL_TOKENS` tokens that is a multiple of the number of devices."""
    return cluster.num_devices * max(1, round(_USUAL_TOKENS / model.sequence_length / cluster.num_devices))


def _profiles(
    request: SearchRequest,
    kinds: tuple[Recompute, ...],
    models: Sequence[Model],
    machines: Machines,
    node_type: str,
    table: DeviceTable,
    runtime: Runtime,
) -> Profiles:
    """Return estimated profiles for one node type, of a model at its sequence length and at further lengths."""
    batch = request.global_batch_size
    assert isinstance(batch, int)
    settings = ProfileSettings(
        tp_sizes=machines.tp_sizes,
        sequence_parallel=request.sequence_parallel,
        recompute=kinds,
        # Several lengths have curves, which two sizes and lengths determine.
        micro_batch_sizes=tuple(2**power for power in range(max(batch.bit_length(), min(2, len(models))))),
        precision=request.precision or Precision(),
        attention=request.attention,
        compile=request.compile,
    )
    rates, efficiencies, revised = rates_of(table, node_type), Efficiencies(), table.revised
    named = [(Path(f"{each.name}, {each.sequence_length} tokens"), each) for each in models]
    made = model_profile(named, settings, rates, efficiencies, revised, runtime)
    alone, across = machines.alone(node_type), machines.networks.get(node_type)
    hardware = hardware_profile(alone, [rates], efficiencies, across, revised, runtime.overlap)
    return index_profiles(hardware, Path("--gpus"), made.profile, Path(models[0].name))


def model_of(options: AdviseOptions) -> tuple[Model, str]:
    """Return the description of a preset, a config.json or its folder, and where its shapes come from."""
    model, source = _whole_model(options)
    return with_mtp(options.trained(model), options.mtp), source


def _whole_model(options: AdviseOptions) -> tuple[Model, str]:
    presets = read_presets()
    if options.model in presets:
        preset = presets[options.model]
        read = read_config(preset.config, f"preset {options.model}", options.taken_as)
        length = options.seq or preset.sequence_length
        return model_of_config(read.config, read.named(options.model), length, options.model), preset.source
    file = _config_file(Path(options.model))
    if not file.exists():
        known = did_you_mean(options.model, presets, "give a config.json, or one that `shardwright models` lists")
        raise BadInput(options.model, "is neither a file nor a preset", known)
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    config = read_configuration(file)
    if options.taken_as is None and is_traced(config):
        return traced_model(file, config, name, options.seq), f"{file}, traced"
    read = read_config(config, file, options.taken_as)
    return model_of_config(read.config, read.named(name), options.seq, file), str(file)


def _config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def config_notes(options: AdviseOptions) -> tuple[str, ...]:
    """Return notes on how the model's config.json was read, one line each."""
    if options.model in (presets := read_presets()):
        return read_config(presets[options.model].config, options.model, options.taken_as).notes
    file = _config_file(Path(options.model))
    config = read_configuration(file)
    if options.taken_as is None and is_traced(config):
        return (f"{file}: model_type {config['model_type']!r} is described by a trace of its stock class",)
    read = read_config(config, file, options.taken_as)
    _, ignored = without_notes(FAMILIES[read.config["model_type"]], read.config)
    return tuple(f"{file}: {note}" for note in (*read.notes, ignored) if note is not None)


def machines_of(options: AdviseOptions, table: DeviceTable) -> Machines:
    """Read `--gpus` and the options about GPUs; raise BadInput naming the option at fault."""
    texts = options.gpus.split("+")
    groups = tuple(group_of(text, table) for text in texts)
    written = sorted({text.rpartition(":")[2] for text in texts})
    taken = (f"{name}: taken for {key} (--gpus)" for name in written if (key := table.key_of(name)) != name)
    sizes = dict[str, int]()
    for node_type, _, per_node in groups:
        if sizes.setdefault(node_type, per_node) != per_node:
            problem = f"nodes of {sizes[node_type]} and of {per_node} {node_type}"
            raise BadInput("--gpus", problem, "give all nodes of a type the same number of GPUs")
    if sum(nodes * per_node for _, nodes, per_node in groups) > MAX_DEVICES:
        raise BadInput("--gpus", f"{options.gpus} are too many", f"give 1 to {MAX_DEVICES} GPUs")
    if options.price_per_gpu_hour is not None and len(sizes) > 1:
        raise BadInput("--price-per-gpu-hour", "the GPUs are of several types", "leave it out")
    types = {key: _node_type(options, table, key, per_node) for key, per_node in sizes.items()}
    joined = [f"{key}: {types[key].device.domain_devices_source}" for key in types if types[key].device.domain_devices]
    several = sum(nodes for _, nodes, _ in groups) > 1
    networks = {key: _network(options, key, each) for key, each in types.items()} if several else {}
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
        (*taken, *(line for figures in types.values() for line in figures.assumed), *joined, *sent),
    )


def group_of(text: str, table: DeviceTable) -> tuple[str, int, int]:
    """Return device, nodes, and GPUs of each node: `8x8:H100-SXM`, or `8:H100-SXM` for one node."""
    match = _GPUS.fullmatch(text)
    if match is None:
        raise BadInput("--gpus", f"{text!r} is not NODESxGPUS:DEVICE", "write for example 8x8:H100-SXM")
    nodes, per_node = int(match[1] or 1), int(match[2])
    if nodes < 1 or per_node < 1 or nodes * per_node > MAX_DEVICES:
        raise BadInput("--gpus", f"{nodes} nodes of {per_node} GPUs", f"give 1 to {MAX_DEVICES} GPUs")
    return table.key_of(match[3]), nodes, per_node


class _TypeFigures(NamedTuple):
    """A node type, and the assumptions on it."""

    node_type: NodeType
    device: Device
    budget_gib: float
    assumed: tuple[str, ...]


def _node_type(options: AdviseOptions, table: DeviceTable, key: str, per_node: int) -> _TypeFigures:
    """Return a node type by its device, with memory budget and price as given or by default."""
    name, device = device_named(table, key, "--gpus")
    if device.memory_bytes is None:
        raise BadInput("--gpus", f"the device table does not give the memory size of {key}", "choose another device")
    memory_gib = device.memory_bytes / GIB
    budget_gib = memory_gib * (1 - SPARE_SHARE)
    spare = f"{SPARE_SHARE:.0%} of {memory_gib:g} GiB left free: one in ten published runs so filled failed"
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
        domain_devices=device.domain_devices or UNSET,
        usd_per_hour=None if price is None else price * per_node,
    )
    hosted: tuple[str, ...] = ()
    if options.offload != "none":
        node_type, hosted = _with_host(options, node_type, key, device)
    source = f"price: {priced}" if price is not None else f"no price of {key} is known (--price-per-gpu-hour)"
    return _TypeFigures(node_type, device, budget_gib, (f"{name}: {device.peaks_source}", spare, source, *hosted))


def _with_host(
    options: AdviseOptions, node_type: NodeType, key: str, device: Device
) -> tuple[NodeType, tuple[str, ...]]:
    """Return a node type with its host's memory and rate, and where these come from."""
    rate, source = device.host_bytes_per_s, device.host_bytes_per_s_source
    if rate is None:
        rate, source = device.pcie_bytes_per_s, device.pcie_bytes_per_s_source
    if rate is None:
        raise BadInput("--offload", f"the table has no rate between {key} and its host", "choose another device")
    gib, given = options.host_memory_gib, "given"
    if gib is None:
        gib = _HOST_SHARE * node_type.memory_bytes * node_type.devices_per_node / GIB
        given = "assumed: twice its GPUs' (--host-memory-gib)"
    share, published = Efficiencies().link, rate
    rate = share * published
    copied = f"offload: {rate / 1e9:g} GB/s each way, an estimate: {share:g} of the published rate; {source}"
    words = [copied, f"host memory of a node of {key}: {gib:g} GiB, {given}"]
    if (updates := device.host_updates_per_s) is not None:
        words.append(f"offload update: {updates:g} parameters/s for each GPU; {device.host_updates_per_s_source}")
    elif options.offload == "update":
        raise BadInput("--offload", f"the table has no update rate for hosts of {key}", "choose --offload optimizer")
    given_rates = {"host_bytes_per_s": rate, "host_updates_per_s": UNSET if updates is None else updates}
    return replace(node_type, host_memory_gib=gib, **given_rates), tuple(words)


def _network(options: AdviseOptions, key: str, figures: _TypeFigures) -> tuple[NodeRates, str]:
    """Return the rates at which a node sends, and their source."""
    if options.inter_node_gbit_s is not None:
        return node_rates(options.inter_node_gbit_s), f"{options.inter_node_gbit_s} Gbit/s a node (given)"
    device, per_node = figures.device, figures.node_type.devices_per_node
    if device.network_bytes_per_s is not None:
        rate, source = device.network_bytes_per_s * per_node * 8 / 1e9, device.network_bytes_per_s_source
        return node_rates(str(rate)), f"{rate:g} Gbit/s a node (--inter-node-gbit-s); {source}"
    raise BadInput("--inter-node-gbit-s", f"what nodes of {key} send is not known", "give it, in Gbit/s a node")


def _searched_ep_sizes(model: Model, devices: int) -> tuple[int, ...]:
    """Return the powers of two up to the devices that divide all layers' experts; empty if the model has no experts."""
    numbers = {kind.experts.number for name in model.layers if (kind := model.types[name]).experts is not UNSET}
    powers = (1 << power for power in range(devices.bit_length())) if numbers else ()
    return tuple(size for size in powers if size <= devices and all(number % size == 0 for number in numbers))


# Models without facts: described by a trace of their class if the train stage is installed.


_GROUP, _STAGE = "shardwright.commands", "train"
_NEEDED = ("torch", "transformers")


def is_traced(config: Config) -> bool:
    """Return whether a config.json's model_type has no facts and the train stage, which traces it, is installed."""
    installed = entry_points(group=_GROUP, name=_STAGE) and all(map(find_spec, _NEEDED))
    unknown = isinstance(config.get("model_type"), str) and not is_known(config)
    return unknown and not has_images(config) and bool(installed)


def traced_model(file: Path, config: Config, name: str, sequence_length: int | None) -> Model:
    """Return the description of a config.json by the train stage; raise BadInput as that does, or without a length."""
    if file.name != "config.json":
        raise BadInput(file, "has a model_type without facts, of which a trace reads a folder", "name it config.json")
    sequence_length = sequence_length or stated_length(config)
    if sequence_length is None:
        raise BadInput("--seq", f"{file} does not state the sample length", "give it, in tokens")
    (stage,) = entry_points(group=_GROUP, name=_STAGE)
    app: CommandLine = stage.load()
    with TemporaryDirectory() as folder:
        out = Path(folder) / "model.json"
        given = "--name", name, "--sequence-length", str(sequence_length), "--out", str(out)
        app.call(["describe", str(file.parent), *given])
        return read_document(out, Model)


# Context parallelism in `advise`: the degrees that are searched for long samples, and the lengths to estimate.


MIN_SHARE = 8192
"""The least positions of a sample that each rank has in searched plans: shorter samples are not split."""
_CP_SIZE = re.compile(r"(?:^|,)cp=([1-9]\d{0,6})(?:,|$)")
_IN_FILES = re.compile(
    r"(?:context[-_]parallel[-_](?:size|degree)|\b(?:cp_size|cp_sizes_enc|vcp))[\"']?[\s=:]+[\"']?([\d,]{1,65536})"
)
"""Pattern of context-parallel degrees under the names that other systems have for them."""
_MAX_BYTES, _MAX_DIGITS = MIB, 7


def searched_cp_sizes(model: Model, devices: int) -> tuple[int, ...]:
    """Return 1 and the powers of two that leave ranks `MIN_SHARE` positions each, in chunks of equal length."""
    length, sizes = model.sequence_length, [1]
    while (size := 2 * sizes[-1]) * MIN_SHARE <= length and size <= devices and length % (2 * size) == 0:
        sizes.append(size)
    return tuple(sizes)


def priced_lengths(length: int, searched: Iterable[int], choices: Iterable[str]) -> tuple[int, ...]:
    """Return the lengths of a rank's part of a sample, for searched degrees and for choices such as `tp=8,cp=2`.

    A choice may be another system's file, or its arguments.
    """
    asked = (size for text in choices for size in _asked_sizes(text))
    return tuple(sorted({length // size for size in (*searched, *asked) if length % size == 0} - {length}))


def _asked_sizes(choice: str) -> Iterator[int]:
    """Yield the context-parallel degrees in a choice, or in the file that it names."""
    if (match := _CP_SIZE.search(choice)) is not None:
        yield int(match[1])
        return
    path = Path(choice)
    is_file = not choice.startswith("--") and path.is_file()
    text = read_bytes(path, _MAX_BYTES).decode(errors="replace") if is_file else choice
    for match in _IN_FILES.finditer(text):
        yield from (int(size) for size in match[1].split(",") if 0 < len(size) <= _MAX_DIGITS and int(size))
