"""Profiles from FASOP's inputs: one forward time per kind of layer at micro-batch size 1, and bandwidths."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from shardwright.estimate.layers import estimate_memory
from shardwright.estimate.settings import block_types
from shardwright.io import BadInput, Value, read_bytes, read_document, read_object
from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.types import EMBEDDING, HEAD, Attention, LayerStrategy, Model, Recompute
from shardwright.types.hardware_profile import Collective, CollectiveKey, HardwareProfile
from shardwright.types.model_profile import LayerFigures, LayerRow, ModelProfile
from shardwright_profile.importers import documents
from shardwright_profile.importers.documents import launch_notes
from shardwright_profile.options import FasopHardwareOptions, FasopOptions

_COLUMNS = ["model", "gpu", "tp_size", "kind", "layers", "forward_s"]
_MAX_BYTES = 1024**2
_MAX_S = 1000.0
_MAX_RANKS = 1024
_BITS = 8

Positive = Annotated[float, Meta(gt=0, le=1e15)]

Factors = Annotated[dict[Annotated[int, Meta(ge=1, le=2**20)], Positive], Meta(min_length=1)]
"""Factors by micro-batch size."""

Kinds = Mapping[tuple[int, str], float]
"""Seconds by tp_size and kind of layer."""


FasopTimes = Mapping[tuple[str, str], Kinds]
"""Seconds of layers by model and GPU."""


class _Links(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inter_node: Positive
    intra_node: Positive


class FasopConstants(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants in FASOP's source; settings are `default` and `pareto`."""

    citation: str
    sequence_lengths: dict[str, Annotated[int, Meta(ge=1)]]
    bandwidth_bits_per_s: dict[str, dict[str, _Links]]
    """Bandwidths in bits per second by setting and GPU, as on the data sheet."""
    bandwidth_divisors: _Links
    """Divisors of the bandwidths: FASOP's cost model uses the bandwidths divided by these."""
    gpus_per_node: dict[str, Annotated[int, Meta(ge=1, le=64)]]
    usable_memory_gib: dict[str, Positive]
    usd_per_node_hour: dict[str, dict[str, Positive]]
    backward_over_forward: Positive

    def __post_init__(self) -> None:
        if missing := sorted(set(self.bandwidth_bits_per_s) - set(self.gpus_per_node)):
            raise ValueError(f"no gpus_per_node of {missing[0]!r}")


class FasopGrowth(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors, hard-coded in FASOP's source, of a layer's time relative to its time at micro-batch size 1."""

    citation: str
    factors: dict[str, dict[str, dict[str, Factors]]]
    """Factors by model, GPU and kind of layer; without factors, times are proportional to the micro-batch size."""


_Figures = TypeVar("_Figures", FasopConstants, FasopGrowth)


class FasopRequest(NamedTuple):
    """An import of FASOP's times, read from the files that the options name."""

    options: FasopOptions
    times: FasopTimes
    constants: FasopConstants
    model: Model
    growth: FasopGrowth | None = None

    @property
    def factors(self) -> Mapping[str, Factors]:
        """Return the model's factors on the GPU by kind of layer; empty if there are none: times are proportional."""
        known = {} if self.growth is None else self.growth.factors
        return known.get(self.options.model_name, {}).get(self.options.gpu, {})


def read_fasop_times(file: Path) -> FasopTimes:
    """Return the layer times of a CSV file, in which `#` begins a comment; raise BadInput naming a wrong line."""
    try:
        lines = read_bytes(file, _MAX_BYTES).decode("ascii").splitlines()
    except UnicodeDecodeError:
        raise BadInput(file, "holds more than ASCII text", "pass a table of layer times") from None
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not numbered or numbered[0][1].split(",") != _COLUMNS:
        raise BadInput(file, f"its columns are not {','.join(_COLUMNS)}", "pass a table of layer times")
    tables: dict[tuple[str, str], dict[tuple[int, str], float]] = {}
    for i, line in numbered[1:]:
        model, gpu, tp_size, kind, time_s = _cells(file, i, next(csv.reader([line])))
        kinds = tables.setdefault((model, gpu), {})
        if (tp_size, kind) in kinds:
            raise BadInput(file, f"line {i} repeats {kind} at tp_size {tp_size}", "leave one of them")
        kinds[(tp_size, kind)] = time_s
    return tables


def import_fasop(request: FasopRequest) -> ModelProfile:
    """Return the profile of one model on one GPU; optimizer and overheads are absent, memory is estimated.

    Raises BadInput if the table does not have the model, the GPU or a kind of layer, and if the model description has
    another sequence length or another number of layer types.
    """
    options = request.options
    table = request.times.get((options.model_name, options.gpu))
    if table is None:
        known = ", ".join(sorted(f"{model} on {gpu}" for model, gpu in request.times))
        problem = f"no times of {options.model_name} on {options.gpu}, only of {known}"
        raise BadInput(options.times, problem, "ask for one of these")
    length = request.constants.sequence_lengths.get(options.model_name)
    if length != request.model.sequence_length:
        problem = f"{options.model_name} was timed at sequence_length {length}, not {request.model.sequence_length}"
        raise BadInput(options.constants, problem, "describe the model at that length")
    tp_sizes = sorted({tp_size for tp_size, _ in table})
    by_type = {tp_size: _times_by_type(request, table, tp_size) for tp_size in tp_sizes}
    rows = [row for tp_size in tp_sizes for row in _rows(request, tp_size, by_type[tp_size])]
    states = [documents.state_row(name, tp_size, documents.ABSENT) for tp_size in tp_sizes for name in by_type[tp_size]]
    # The factors say how launch-bound layers grow.
    launches = () if request.factors else launch_notes(request.model, rows)
    notes = [*_notes(request, by_type), *launches]
    return documents.imported_profile(options, request.model, "auto", "not published", notes, rows, states)


def _cells(file: Path, line: int, cells: Sequence[str]) -> tuple[str, str, int, str, float]:
    try:
        model, gpu, tp_size, kind, layers, forward_s = cells
        size, count, time_s = int(tp_size[:9]), int(layers[:9]), float(forward_s)
    except ValueError:
        raise BadInput(file, f"line {line} is not a row of {','.join(_COLUMNS)}", "correct it") from None
    if size < 1 or count < 1 or not (math.isfinite(time_s) and 0 < time_s < _MAX_S):
        raise BadInput(file, f"line {line} has an impossible number", "correct it")
    return model, gpu, size, kind, time_s


def _times_by_type(request: FasopRequest, table: Kinds, tp_size: int) -> dict[str, Sourced]:
    """Return the forward seconds of each layer type, from FASOP's kinds of layer.

    For a model of encoder and decoder, the embedding is the sum of both embeddings, and the head is what the kinds
    `..._plus_post` add to a plain block.
    """
    options = request.options

    def time_of(kind: str) -> float:
        if (tp_size, kind) not in table:
            problem = f"no {kind} of {options.model_name} on {options.gpu} at tp_size {tp_size}"
            raise BadInput(options.times, problem, "add that row")
        return table[(tp_size, kind)]

    types, kinds = block_types(request.model), _block_kinds(table)
    if len(kinds) == 1:
        embedding = Sourced(time_of("embedding"), Source.MEASURED)
        head = Sourced(time_of("post_process"), Source.MEASURED)
    else:
        both_s = time_of("embedding") + time_of("decoder_embedding")
        embedding = Sourced(both_s, Source.DERIVED)
        head = Sourced(sum(time_of(f"{kind}_plus_post") - time_of(kind) for kind in kinds), Source.DERIVED)
    if len(types) != len(kinds):
        problem = f"{options.model_name} has {len(kinds)} types of layers, model {request.model.name!r} {len(types)}"
        raise BadInput(options.times, problem, "pass the description of that model")
    if head.value <= 0:
        raise BadInput(options.times, f"the head takes {head.value:g} s at tp_size {tp_size}", "measure it again")
    blocks = {name: Sourced(time_of(kind), Source.MEASURED) for name, kind in zip(types, kinds, strict=True)}
    return {EMBEDDING: embedding, **blocks, HEAD: head}


def _block_kinds(table: Kinds) -> tuple[str, ...]:
    """Return FASOP's kinds of the model's blocks, in the order of the model's types."""
    return ("transformer",) if (1, "transformer") in table else ("encoder", "decoder")


def grown(factors: Mapping[int, float], size: int) -> float:
    """Return the time of a micro-batch size relative to micro-batch size 1, as in FASOP's source.

    `factors`: the known ratios by size. A size below the smallest known one takes as long as one sample; any other
    grows in proportion from the largest known size that does not exceed it.
    """
    below = [known for known in factors if known <= size]
    return factors[max(below)] * size / max(below) if below else 1.0


def _rows(request: FasopRequest, tp_size: int, times: Mapping[str, Sourced]) -> Iterator[LayerRow]:
    options, length = request.options, request.model.sequence_length
    kinds = (EMBEDDING, *_block_kinds(request.times[options.model_name, options.gpu]), HEAD)
    for (name, forward), kind in zip(times.items(), kinds, strict=True):
        factors = request.factors.get(kind, {1: 1.0})
        for recompute in (Recompute.NONE, Recompute.FULL) if name not in (EMBEDDING, HEAD) else (Recompute.NONE,):
            passes = options.backward_ratio + (recompute is Recompute.FULL)
            strategy = LayerStrategy(type=name, tp_size=tp_size, dp_size=1, recompute=recompute)
            for size in sorted({1, *options.micro_batches}):
                key = LayerKey.from_fields(strategy, micro_batch_size=size, sequence_length=length)
                time_s = grown(factors, size) * forward.value
                forward_s = Sourced(time_s, forward.source if size == 1 else Source.ASSUMED)
                backward_s = Sourced(passes * time_s, Source.ASSUMED)
                yield LayerRow.from_figures(key, LayerFigures(forward_s, backward_s, *_memory(request, strategy, size)))


def _memory(request: FasopRequest, strategy: LayerStrategy, size: int) -> Iterator[Sourced]:
    """Yield the bytes of activations and workspace, estimated from the model's shapes; FASOP has a formula for them."""
    precision = request.options.formats
    for value in estimate_memory(request.model, strategy.type, strategy, size, precision, Attention.EAGER):
        yield Sourced(value, Source.ANALYTIC)


def _notes(request: FasopRequest, by_type: Mapping[int, Mapping[str, Sourced]]) -> Iterator[str]:
    options = request.options
    yield from documents.made_from(options.times, options.constants, options.growth)
    yield f"Figures of {request.constants.citation}."
    yield "One forward time a kind of layer at micro-batch 1, tensor-parallel traffic inside; no spread is published."
    yield documents.assumed_backward(options)
    if options.micro_batches and request.growth is not None and request.factors:
        kinds, citation = ", ".join(request.factors), request.growth.citation
        yield f"Times of {kinds} at larger micro-batches are assumed to grow by factors of {citation}."
    elif options.micro_batches:
        yield "Times at larger micro-batches are assumed to grow in proportion."
    yield (
        "analytic: activations and workspace are derived from the model's shapes as Korthikanti et al. (2022) do, with "
        "fused norms and attention scores kept, as FASOP's own memory formula has them."
    )
    yield "Optimizer, reduction, process and step overhead are not published: absent."
    tp_sizes = sorted(by_type)
    for small, large in pairwise(tp_sizes):
        for name, time in by_type[large].items():
            before = by_type[small][name].value
            if name not in (EMBEDDING, HEAD) and time.value > before:
                yield (
                    f"{name} takes {before * 1000:.4g} ms at tp_size {small} and {time.value * 1000:.4g} ms at"
                    f" {large}: kept as published."
                )


def read_fasop(file: Path, kind: type[_Figures]) -> _Figures:
    """Return FASOP's constants or growth factors from a file; raise BadInput if the file is not valid."""
    try:
        return msgspec.convert(read_object(file, _MAX_BYTES), kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise BadInput(file, str(error), "correct the file") from None


def write_fasop(options: FasopOptions) -> None:
    """Write the model profile from FASOP's layer times."""
    times, constants = read_fasop_times(options.times), read_fasop(options.constants, FasopConstants)
    growth = None if options.growth is None else read_fasop(options.growth, FasopGrowth)
    request = FasopRequest(options, times, constants, read_document(options.model, Model), growth)
    documents.write_imported(options.out, import_fasop(request))


def write_fasop_hardware(options: FasopHardwareOptions) -> None:
    """Write the hardware profile from FASOP's bandwidths."""
    documents.write_imported(options.out, fasop_hardware(read_fasop(options.constants, FasopConstants), options))


def fasop_hardware(constants: FasopConstants, options: FasopHardwareOptions) -> HardwareProfile:
    """Return a hardware profile from FASOP's bandwidths only; all its times are derived.

    Raises BadInput if the constants do not have the GPU or the setting.
    """
    file, setting, gpu = options.constants, options.setting, options.gpu
    links = constants.bandwidth_bits_per_s.get(setting, {}).get(gpu)
    if links is None:
        known = ", ".join(sorted(f"{s} {g}" for s, gpus in constants.bandwidth_bits_per_s.items() for g in gpus))
        raise BadInput(file, f"no bandwidth of {setting} {gpu}, only of {known}", "ask for one of these")
    a_node, by = constants.gpus_per_node[setting], constants.bandwidth_divisors
    if options.nodes * a_node > _MAX_RANKS:
        raise BadInput("--nodes", f"more than {_MAX_RANKS} GPUs", "ask for fewer nodes")
    notes = [
        *documents.made_from(file),
        f"Figures of {constants.citation}.",
        f"Bandwidths of setting {setting!r} over FASOP's divisors; nothing here was timed, and latency is left out.",
        "That between nodes is a node's: all groups that leave it share it.",
    ]
    points = [
        *_inside(a_node, links.intra_node / _BITS / by.intra_node),
        *_between(options.nodes, a_node, links.inter_node / _BITS / by.inter_node),
    ]
    return documents.hardware_profile(options.cluster, options.device, notes, points)


def _inside(a_node: int, bytes_per_s: float) -> Iterator[documents.HardwarePoint]:
    """Yield the points of groups in a node of `a_node` GPUs."""
    for ranks, consecutive, collective in product(range(2, a_node + 1), (False, True), Collective):
        if collective is not Collective.P2P or ranks == 2:
            yield from documents.link_points(
                CollectiveKey(collective, ranks, ranks, consecutive), bytes_per_s, Source.DERIVED
            )


def _between(nodes: int, a_node: int, bytes_per_s: float) -> Iterator[documents.HardwarePoint]:
    """Yield the points of groups across nodes, with equally many ranks on each; all groups share a node's network."""
    even = (size for size in range(1, a_node + 1) if a_node % size == 0)
    for on_a_node, on_nodes, collective in product(even, range(2, nodes + 1), Collective):
        if collective is not Collective.P2P:
            key = CollectiveKey(collective, on_a_node * on_nodes, on_a_node, on_a_node == a_node)
            yield from documents.link_points(key, bytes_per_s / _sharing(key, a_node), Source.DERIVED)
    if nodes > 1:
        for consecutive in (False, True):
            key = CollectiveKey(Collective.P2P, 2, 1, consecutive)
            yield from documents.link_points(key, bytes_per_s / (1 if consecutive else a_node), Source.DERIVED)


def _sharing(key: CollectiveKey, a_node: int) -> float:
    """Return the bytes that leave a node divided by the bytes that one rank sends; an all-to-all is partly local."""
    if key.collective is Collective.ALL_TO_ALL:
        return a_node * (key.group_size - key.ranks_per_node) / (key.group_size - 1)
    return a_node / key.ranks_per_node
