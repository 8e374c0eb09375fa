"""Model profiles from the computation and memory files of hetu-galvatron."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwright_formats.io import BadInput, sha256_of_file
from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Source, Sourced
from shardwright_formats.key import LayerKey
from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import EMBEDDING, HEAD, ITEMSIZE, LayerStrategy, Model, Recompute, SequenceParallel
from shardwright_formats.types.model_profile import LayerFigures, LayerRow, ModelProfile, ProfileOrigin, StateRow
from shardwright_profile.importers.flat_model import FlatType, flat_model
from shardwright_profile.importers.galvatron.keys import Computation, Memory
from shardwright_profile.importers.galvatron.memory import ModelMemory, model_memory, tables_of
from shardwright_profile.importers.galvatron.times import LayerTimes, Point, completed, layer_times, lengths_of
from shardwright_profile.importers.rows import (
    ABSENT,
    noted,
    profile_of,
    state_row,
    weaker,
)
from shardwright_profile.importers.traffic import Hardware, layer_traffic
from shardwright_profile.options import GalvatronOptions

FLAT_FAMILY = "galvatron"
"""The family of a model that these files alone describe."""


class GalvatronRequest(NamedTuple):
    """An import of Galvatron's profiles, read from the files that the options name."""

    options: GalvatronOptions
    computation: Computation
    memory: Memory | None
    models: tuple[Model, ...]
    """Descriptions of one architecture, one for each length to import."""
    hardware: Hardware | None
    """Hardware profile that prices the traffic of tensor parallelism."""


_Missing = dict[LayerKey, list[int]]
"""Values of tp_size at which the memory of a type under a strategy is unknown, by key without tp_size."""


class _Length(NamedTuple):
    """The times and memory of one length, with its model."""

    request: GalvatronRequest
    model: Model
    times: LayerTimes
    memory: ModelMemory


def import_galvatron(request: GalvatronRequest) -> ModelProfile:
    """Return the profile that the files determine, with every assumption and defect in its notes.

    Raises BadInput where models and files do not belong together, where a point is missing or impossible, and where
    tensor parallelism is asked for without hardware to price its traffic.
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
    origin = ProfileOrigin(
        model=first.name,
        architecture_sha256=first.architecture_sha256,
        device=request.options.device,
        backend="nccl",
        precision=request.options.precision,
        attention=request.options.attention,
    )
    provenance = Provenance(
        date="unknown", versions="hetu-galvatron 2.4.0 or like it; torch, driver unknown", notes=noted(notes)
    )
    return profile_of(origin, provenance, rows, list(_states(lengths[0])))


def flat_galvatron_model(
    name: str,
    computation: Computation,
    memory: Memory,
    types: Sequence[FlatType],
    sequence_parallel: SequenceParallel | None,
) -> Model:
    """Return a minimal model from the files: flat parameters, and an identity made of the files."""
    lengths = lengths_of(computation, types[0].positions)
    names = (*(kind.name for kind in types), EMBEDDING, HEAD)
    known = model_memory(memory, lengths, names[:-2], tables_of(memory, sequence_parallel))
    sizes = {name: known.parameters(name, 1) for name in names}
    if ABSENT in sizes.values():
        raise BadInput(memory.file, "lacks the sizes of some types", "pass --model in place of --type")
    config = {"computation_sha256": sha256_of_file(computation.file), "memory_sha256": sha256_of_file(memory.file)}
    return flat_model(name, FLAT_FAMILY, types, {name: size.value for name, size in sizes.items()}, config)


def _length(request: GalvatronRequest, model: Model) -> _Length:
    lengths = lengths_of(request.computation, model.sequence_length)
    times = layer_times(request.computation, lengths, request.options.repair)
    types = _block_types(model)
    if len(times.layers) != len(types):
        problem = f"times of {len(times.layers)} types of layers, where model {model.name!r} has {len(types)}"
        raise BadInput(request.computation.file, problem, "pass the description of that file's model")
    if request.memory is None:
        memory = ModelMemory(False, {}, {}, frozenset(), ("No memory file: memory is absent.",))
    else:
        known = {forward for *_, forward in request.memory.layers} | {e for _, e in request.memory.ends}
        of_memory = lengths if lengths or () in known else (model.sequence_length,)
        sequence = tables_of(request.memory, request.options.tables)
        memory = model_memory(request.memory, of_memory, types, sequence)
    return _Length(request, model, times, memory)


def _block_types(model: Model) -> tuple[str, ...]:
    return tuple(dict.fromkeys(model.layers))


def _heading(request: GalvatronRequest) -> Iterator[str]:
    files = [request.computation.file] + ([request.memory.file] if request.memory else [])
    for file in files:
        yield f"Made from {file.name}, SHA-256 {sha256_of_file(file)}."
    yield "Forward times are differences of times of whole models, a layer and microbatch; their errors are not known."
    yield (
        f"Backward is assumed to take {request.options.backward_ratio:g} times forward, and with full recomputation"
        " one forward more."
    )
    yield "Embedding and head were measured together, by subtraction: each is given half (derived)."
    yield "Optimizer, reduction, process and step overhead are not in the files: absent."
    yield "A recomputed layer holds for a moment what it holds without recomputation (workspace, derived)."
    if request.models[0].family == FLAT_FAMILY:
        yield "The model's parameters are flat: as many as the memory file says, of shapes that are not known."
    if max(request.options.sizes) > 1:
        yield (
            "Beyond tp_size 1 nothing was timed: computation is assumed to divide evenly, and the traffic is of"
            f" {request.hardware.file.name if request.hardware else ''}."
        )
    if request.options.micro_batches:
        yield "Micro-batches that were asked for but not measured are off a line through those measured (derived)."
    if all(not forward.lengths for forward in request.computation.forwards):
        yield "The file of times does not say its sequence_length: the model's is taken on trust."
    asked = {lengths_of(request.computation, model.sequence_length) for model in request.models}
    if others := sorted({forward.lengths for forward in request.computation.forwards} - asked):
        yield f"Times of {len(others)} further lengths are in the file and were not asked for."
    unknown = (*request.computation.unknown, *(request.memory.unknown if request.memory else ()))
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        yield f"Keys that are not understood were passed over: {', '.join(unknown[:5])}{more}."


def _rows(length: _Length, notes: list[str]) -> Iterator[LayerRow]:
    times, asked = length.times, length.request.options.micro_batches
    layers = [completed(points, asked) for points in times.layers]
    sizes = sorted({point.micro_batch_size for points in layers for point in points})
    rest = completed(times.rest, sizes) or tuple(Point(size, 0.0, Source.ABSENT) for size in sizes)
    half = [point._replace(time_s=point.time_s / 2) for point in rest]
    missing: _Missing = {}
    for name, points in zip((*_block_types(length.model), EMBEDDING, HEAD), (*layers, half, half), strict=True):
        for strategy in _strategies(length, name, notes):
            tp_size, recomputes = strategy.tp_size, strategy.recompute is Recompute.FULL
            resident = length.memory.activation(name, tp_size, recompute=recomputes)
            if resident == ABSENT and tp_size > 1:
                missing.setdefault(LayerKey.from_fields(strategy).without("tp_size"), []).append(tp_size)
                continue
            workspace = length.memory.activation(name, tp_size, recompute=False) if recomputes else ABSENT
            yield from (_row(length, strategy, point, resident, workspace) for point in points)
    notes += _left_out(missing)


def _row(length: _Length, strategy: LayerStrategy, point: Point, activation: Sourced, workspace: Sourced) -> LayerRow:
    """Return a row: computation divided by tp_size, and the traffic added; bytes are given for a sample."""
    request, size = length.request, point.micro_batch_size
    traffic: Mapping[Pass | None, float] = dict.fromkeys(Pass, 0.0)
    if strategy.tp_size > 1 and request.hardware is not None:
        itemsize = ITEMSIZE[request.options.precision.split("/")[1]]
        traffic = layer_traffic(request.hardware, length.model, strategy, size, itemsize)
    alone_s = point.time_s / strategy.tp_size
    passes = request.options.backward_ratio + (strategy.recompute is Recompute.FULL)
    forward_source, backward_source = point.source, weaker(Source.ASSUMED, point.source)
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
    return Sourced(time_s, source) if source is not Source.ABSENT else ABSENT


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
    """Yield a sentence for all types that are left out at the same values of tp_size under the same strategy."""
    names: dict[tuple[LayerKey, tuple[int, ...]], list[str]] = {}
    for key, tp_sizes in missing.items():
        names.setdefault((key.without("type"), tuple(tp_sizes)), []).append(key.type)
    for (key, sizes), types in names.items():
        yield (
            f"Left out at tp_size {', '.join(map(str, sizes))} with sequence_parallel {key.sequence_parallel},"
            f" recompute {key.recompute}, because their memory is in no table: {', '.join(types)}."
        )


def _states(length: _Length) -> Iterator[StateRow]:
    """Yield rows of the float32 bytes of each type's parameters on a rank."""
    for tp_size in length.request.options.sizes:
        for name in (*_block_types(length.model), EMBEDDING, HEAD):
            yield state_row(name, tp_size, length.memory.parameters(name, tp_size))
