"""Model profiles from the computation and memory files of hetu-galvatron."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.estimate.settings import block_types
from shardwright.io import BadInput, read_document, sha256_of_file, write_document
from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.plan.communication import Message, loss_messages, region_messages
from shardwright.plan.groups import seconds_on
from shardwright.plan.schedules.passes import Pass
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, LayerStrategy, Model, Recompute, SequenceParallel
from shardwright.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright.types.model_profile import LayerFigures, LayerRow, ModelProfile, StateRow
from shardwright_profile.importers import documents
from shardwright_profile.importers.documents import launch_notes
from shardwright_profile.importers.galvatron.keys import Computation, Memory, read_computation, read_memory
from shardwright_profile.importers.galvatron.memory import ModelMemory, model_memory, tables_of
from shardwright_profile.importers.galvatron.times import LayerTimes, Point, completed, layer_times, lengths_of
from shardwright_profile.options import GalvatronOptions

FLAT_FAMILY = "galvatron"
"""The family of the models that are described only by these files."""


class Hardware(NamedTuple):
    """A hardware profile and its file."""

    file: Path
    profile: HardwareProfile


class GalvatronRequest(NamedTuple):
    """An import of Galvatron's profiles, read from the files that the options name."""

    options: GalvatronOptions
    computation: Computation
    memory: Memory | None
    models: tuple[Model, ...]
    """Descriptions of one architecture, one for each length to import."""
    hardware: Hardware | None
    """Hardware profile from which the times of tensor parallelism's collectives are computed."""


_Missing = dict[LayerKey, list[int]]
"""Values of tp_size at which the memory of a layer type under a strategy is unknown, by key without tp_size."""


class _Length(NamedTuple):
    """The times and memory at one sequence length, with the model of that length."""

    request: GalvatronRequest
    model: Model
    times: LayerTimes
    memory: ModelMemory


def write_galvatron(options: GalvatronOptions) -> None:
    """Write the profile of a model that Galvatron measured and, for a model given by its types, its description."""
    times = read_computation(options.computation)
    sizes = None if options.memory is None else read_memory(options.memory)
    if options.sequence_parallel and sizes is None:
        raise BadInput("--sequence-parallel", "chooses among memory tables, and there are none", "pass --memory")
    models = [read_document(path, Model) for path in options.model]
    if bool(options.model) == bool(options.type) or bool(options.type) != bool(options.model_out):
        raise BadInput("--model", "either --model, or --type with --model-out, is needed", "pass one of the two")
    if options.type:
        if sizes is None:
            raise BadInput("--type", "sizes of the layers are needed", "pass --memory")
        types = [documents.parse_type(text) for text in options.type]
        models = [flat_galvatron_model(options.name, times, sizes, types, options.tables)]
    hardware = Hardware(options.hardware, read_hardware_profile(options.hardware)) if options.hardware else None
    profile = import_galvatron(GalvatronRequest(options, times, sizes, tuple(models), hardware))
    if options.model_out:
        write_document(options.model_out, models[0])
    documents.write_imported(options.out, profile)


def import_galvatron(request: GalvatronRequest) -> ModelProfile:
    """Return the profile that the files determine, with every assumption and defect in its notes.

    Raises BadInput if models and files do not belong together, if a point is missing or impossible, and if a tp_size
    above 1 is asked for without a hardware profile for the times of its collectives.
    """
    first = request.models[0]
    if len({model.architecture_sha256 for model in request.models}) > 1:
        raise BadInput("--model", "descriptions of different architectures", "import one model at a time")
    if len({model.sequence_length for model in request.models}) < len(request.models):
        raise BadInput("--model", "two descriptions of one sequence_length", "give one for each length")
    if max(request.options.sizes) > 1 and request.hardware is None:
        problem = f"tp_size {max(request.options.sizes)} has traffic inside its layers, which needs a hardware profile"
        raise BadInput("--tp-sizes", problem, "pass --hardware, or --tp-sizes 1")
    lengths = [_length(request, model) for model in request.models]
    notes = list(_heading(request))
    rows: list[LayerRow] = []
    said_at: dict[str, list[int]] = {}
    for length in lengths:
        length_notes = [*length.times.notes, *length.memory.notes]
        rows += _rows(length, length_notes)
        for note in dict.fromkeys(length_notes):
            said_at.setdefault(note, []).append(length.model.sequence_length)
    for note, where in said_at.items():
        everywhere = len(where) == len(lengths)
        notes.append(note if everywhere else f"At sequence_length {', '.join(map(str, where))}: {note}")
    notes += launch_notes(first, rows)
    versions = "hetu-galvatron 2.4.0 or like it; torch, driver unknown"
    states = list(_states(lengths[0]))
    return documents.imported_profile(request.options, first, request.options.attention, versions, notes, rows, states)


def flat_galvatron_model(
    name: str,
    computation: Computation,
    memory: Memory,
    types: Sequence[documents.FlatType],
    sequence_parallel: SequenceParallel | None,
) -> Model:
    """Return a minimal model from the files: with flat parameters, and the hashes of the files as its config."""
    lengths = lengths_of(computation, types[0].positions)
    names = (*(kind.name for kind in types), EMBEDDING, HEAD)
    known = model_memory(memory, lengths, names[:-2], tables_of(memory, sequence_parallel))
    sizes = {name: known.parameters(name, 1) for name in names}
    if documents.ABSENT in sizes.values():
        raise BadInput(memory.file, "does not give the sizes of some types", "pass --model instead of --type")
    config = {"computation_sha256": sha256_of_file(computation.file), "memory_sha256": sha256_of_file(memory.file)}
    return documents.flat_model(name, FLAT_FAMILY, types, {name: size.value for name, size in sizes.items()}, config)


def _length(request: GalvatronRequest, model: Model) -> _Length:
    lengths = lengths_of(request.computation, model.sequence_length)
    times = layer_times(request.computation, lengths, request.options.repair)
    types = block_types(model)
    if len(times.layers) != len(types):
        problem = f"times of {len(times.layers)} types of layers, but model {model.name!r} has {len(types)}"
        raise BadInput(request.computation.file, problem, "pass the description of that file's model")
    if request.memory is None:
        memory = ModelMemory(False, {}, {}, frozenset(), ("No memory file: memory is absent.",))
    else:
        known = {forward for *_, forward in request.memory.layers} | {e for _, e in request.memory.ends}
        of_memory = lengths if lengths or () in known else (model.sequence_length,)
        sequence = tables_of(request.memory, request.options.tables)
        memory = model_memory(request.memory, of_memory, types, sequence)
    return _Length(request, model, times, memory)


def _heading(request: GalvatronRequest) -> Iterator[str]:
    yield from documents.made_from(request.computation.file, request.memory and request.memory.file)
    yield "Forward times are differences of times of whole models, a layer and microbatch; their errors are not known."
    yield documents.assumed_backward(request.options)
    yield "Embedding and head were measured together, by subtraction: each is given half (derived)."
    yield "Optimizer, reduction, process and step overhead are not in the files: absent."
    yield "A recomputed layer holds for a moment what it holds without recomputation (workspace, derived)."
    if request.models[0].family == FLAT_FAMILY:
        yield "The model's parameters are flat: their number is the memory file's, their shapes are not known."
    if max(request.options.sizes) > 1:
        yield (
            "Beyond tp_size 1 nothing was timed: computation is assumed to divide evenly, and the traffic is of"
            f" {request.hardware.file.name if request.hardware else ''}."
        )
    if request.options.micro_batches:
        yield "Micro-batches that were asked for but not measured are off a line through those measured (derived)."
    if all(not forward.lengths for forward in request.computation.forwards):
        yield "The file of times does not state its sequence_length: the model's is assumed."
    asked = {lengths_of(request.computation, model.sequence_length) for model in request.models}
    if others := sorted({forward.lengths for forward in request.computation.forwards} - asked):
        yield f"Times of {len(others)} further lengths are in the file and were not asked for."
    unknown = (*request.computation.unknown, *(request.memory.unknown if request.memory else ()))
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        yield f"Unknown keys were ignored: {', '.join(unknown[:5])}{more}."


def _rows(length: _Length, notes: list[str]) -> Iterator[LayerRow]:
    times, asked = length.times, length.request.options.micro_batches
    layers = [completed(points, asked) for points in times.layers]
    sizes = sorted({point.micro_batch_size for points in layers for point in points})
    rest = completed(times.rest, sizes) or tuple(Point(size, 0.0, Source.ABSENT) for size in sizes)
    half = [point._replace(time_s=point.time_s / 2) for point in rest]
    missing: _Missing = {}
    for name, points in zip((*block_types(length.model), EMBEDDING, HEAD), (*layers, half, half), strict=True):
        for strategy in _strategies(length, name, notes):
            tp_size, recomputes = strategy.tp_size, strategy.recompute is Recompute.FULL
            resident = length.memory.activation(name, tp_size, recompute=recomputes)
            if resident == documents.ABSENT and tp_size > 1:
                missing.setdefault(LayerKey.from_fields(strategy).without("tp_size"), []).append(tp_size)
                continue
            workspace = length.memory.activation(name, tp_size, recompute=False) if recomputes else documents.ABSENT
            yield from (_row(length, strategy, point, resident, workspace) for point in points)
    notes += _left_out(missing)


def _row(length: _Length, strategy: LayerStrategy, point: Point, activation: Sourced, workspace: Sourced) -> LayerRow:
    """Return a row: computation divided by tp_size, plus communication; `activation`, `workspace`: per sample."""
    request, size = length.request, point.micro_batch_size
    traffic: Mapping[Pass | None, float] = dict.fromkeys(Pass, 0.0)
    if strategy.tp_size > 1 and request.hardware is not None:
        itemsize = ITEMSIZE[request.options.precision.split("/")[1]]
        traffic = _traffic_s(request.hardware, length.model, strategy, size, itemsize)
    alone_s = point.time_s / strategy.tp_size
    passes = request.options.backward_ratio + (strategy.recompute is Recompute.FULL)
    forward_source, backward_source = point.source, documents.weaker(Source.ASSUMED, point.source)
    if strategy.tp_size > 1:
        forward_source = backward_source = Source.ASSUMED
    figures = LayerFigures(
        _time(alone_s + traffic[Pass.FORWARD], forward_source),
        _time(passes * alone_s + traffic[Pass.BACKWARD], backward_source),
        activation._replace(value=activation.value * size),
        workspace._replace(value=workspace.value * size),
    )
    key = LayerKey.from_fields(strategy, micro_batch_size=size, sequence_length=length.model.sequence_length)
    return LayerRow.from_figures(key, figures)


def _time(time_s: float, source: Source) -> Sourced:
    return Sourced(time_s, source) if source is not Source.ABSENT else documents.ABSENT


def _strategies(length: _Length, name: str, notes: list[str]) -> Iterator[LayerStrategy]:
    """Yield the strategies to write rows for; embedding and head are never recomputed."""
    for tp_size in length.request.options.sizes:
        if odd := [text for text, size in length.model.types[name].tp_must_divide.items() if size % tp_size]:
            notes.append(f"{name} at tp_size {tp_size} is left out: it does not divide {odd[0]}.")
            continue
        split = tp_size > 1 and length.memory.sequence
        sequence_parallel = SequenceParallel.MEGATRON if split else SequenceParallel.NONE
        for recompute in (Recompute.NONE, Recompute.FULL)[: 1 if name in (EMBEDDING, HEAD) else 2]:
            yield LayerStrategy(
                type=name, tp_size=tp_size, dp_size=1, sequence_parallel=sequence_parallel, recompute=recompute
            )


def _left_out(missing: _Missing) -> Iterator[str]:
    """Yield a sentence for each strategy and list of tp_size, with all types that are left out there."""
    names: dict[tuple[LayerKey, tuple[int, ...]], list[str]] = {}
    for key, tp_sizes in missing.items():
        names.setdefault((key.without("type"), tuple(tp_sizes)), []).append(key.type)
    for (key, sizes), types in names.items():
        yield (
            f"Left out at tp_size {', '.join(map(str, sizes))} with sequence_parallel {key.sequence_parallel},"
            f" recompute {key.recompute}, because their memory is in no table: {', '.join(types)}."
        )


def _states(length: _Length) -> Iterator[StateRow]:
    """Yield a row for each tp_size and layer type with the float32 bytes of its parameters on a rank."""
    for tp_size in length.request.options.sizes:
        for name in (*block_types(length.model), EMBEDDING, HEAD):
            yield documents.state_row(name, tp_size, length.memory.parameters(name, tp_size))


def _traffic_s(
    hardware: Hardware, model: Model, strategy: LayerStrategy, samples: int, itemsize: int
) -> dict[Pass | None, float]:
    """Return the seconds of one layer's collectives for a micro-batch of `samples` samples, by pass.

    All of them are inside the layer's tensor-parallel group and run one after another.
    """
    messages = list(region_messages(model, strategy.type, strategy, samples, itemsize, 1))
    if strategy.type == HEAD:
        messages += loss_messages(model.types[HEAD], strategy, samples, itemsize, 1)
    times_s: dict[Pass | None, float] = dict.fromkeys(Pass, 0.0)
    for message in messages:
        times_s[message.during] += _time_s(hardware, message) * message.times
    return times_s


def _time_s(hardware: Hardware, message: Message) -> float:
    """Return the seconds of a collective among neighbouring ranks, inside a node if the group fits into one."""
    neighbours = (message.collective, message.group_size, True)
    curves = hardware.profile.curves
    alike = (key for key in curves if (key.collective, key.group_size, key.consecutive) == neighbours)
    if (key := max(alike, key=lambda key: key.ranks_per_node, default=None)) is None:
        problem = f"no {message.collective} among {message.group_size} neighbouring ranks"
        raise BadInput(hardware.file, problem, "leave that size out of --tp-sizes, or give another profile")
    return seconds_on(hardware.profile, key, message.bytes)
