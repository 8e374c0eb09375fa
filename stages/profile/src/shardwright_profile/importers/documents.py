"""Models and profiles that importers write: numbers with their sources; what is unknown is marked absent.

The notes of each profile say what is assumed, and which layers wait for the host to start their kernels.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwright.estimate.curves import fits_table
from shardwright.estimate.parts import block_kernels
from shardwright.estimate.settings import block_types
from shardwright.io import BadInput, sha256_of_file
from shardwright.io.hdf5 import Provenance, write_profile
from shardwright.io.table import Source, Sourced, Table
from shardwright.optimizers.registry import ADAMW
from shardwright.types import EMBEDDING, HEAD, MIB, BoundaryTensor, Heads, LayerType, Model, Parameter, Region
from shardwright.types.hardware_profile import (
    Collective,
    CollectiveKey,
    HardwareProfile,
    OverlapRow,
    PointRow,
    RepeatRow,
)
from shardwright.types.model_profile import LayerRow, ModelProfile, ProcessRow, ProfileOrigin, StateRow
from shardwright_profile.options import ImportModelOptions

ABSENT = Sourced(0.0, Source.ABSENT)

_MAX_NOTES = 150
_MAX_CHARACTERS = 400
"""Maximum number of characters of a note. With _MAX_NOTES it keeps notes within what a profile's reader accepts."""

_WEAKNESS = (Source.MEASURED, Source.DERIVED, Source.ASSUMED, Source.ABSENT)


def state_row(type_name: str, tp_size: int, parameter_bytes: Sourced) -> StateRow:
    """Return a row of states under AdamW with gradients in float32, like the parameters; times are absent."""
    size = round(parameter_bytes.value)
    return StateRow(
        type=type_name,
        tp_size=tp_size,
        parameter_bytes=size,
        gradient_bytes=size,
        optimizer_bytes=ADAMW.state_bytes(size, "float32"),
        bytes_source=parameter_bytes.source,
        optimizer_s=0.0,
        optimizer_source=Source.ABSENT,
        reduction_s=0.0,
        reduction_ranks=1,
        reduction_source=Source.ABSENT,
        scatter_s=0.0,
        gather_s=0.0,
        zero_ranks=1,
        zero_source=Source.ABSENT,
    )


def noted(notes: Iterable[str]) -> str:
    """Return notes as a profile stores them, one sentence a line, each of limited length."""
    lines = [" ".join(note.split()) for note in notes]
    cut = [line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..." for line in lines[:_MAX_NOTES]]
    left = len(lines) - len(cut)
    return "\n".join([*cut, f"{left} further notes are left out."] if left else cut)


def made_from(*files: Path | None) -> Iterator[str]:
    """Yield a sentence with name and hash for each file that a profile is made from; None is skipped."""
    yield from (f"Made from {file.name}, SHA-256 {sha256_of_file(file)}." for file in files if file is not None)


def assumed_backward(options: ImportModelOptions) -> str:
    """Return the sentence that backward times are assumed, since the files have none."""
    return (
        f"Backward is assumed to take {options.backward_ratio:g} times forward, and with full recomputation"
        " one forward more."
    )


def write_imported(out: Path, profile: HardwareProfile | ModelProfile) -> None:
    """Write a profile; print its notes, one per line, and its path on standard error."""
    write_profile(out, profile)
    for line in profile.provenance.notes.splitlines():
        print(f"note: {line}", file=sys.stderr)
    print(f"{out} is written", file=sys.stderr)


def weaker(first: Source, second: Source) -> Source:
    """Return the less reliable of two sources."""
    return max(first, second, key=_WEAKNESS.index)


def imported_profile(
    options: ImportModelOptions,
    model: Model,
    attention: str,
    versions: str,
    notes: Iterable[str],
    layers: Iterable[LayerRow],
    states: Iterable[StateRow],
) -> ModelProfile:
    """Return the profile of a model that another system measured with NCCL, on an unknown date."""
    origin = ProfileOrigin(
        model=model.name,
        architecture_sha256=model.architecture_sha256,
        device=options.device,
        backend="nccl",
        precision=options.precision,
        attention=attention,
    )
    return profile_of(origin, Provenance(date="unknown", versions=versions, notes=noted(notes)), layers, states)


def profile_of(
    origin: ProfileOrigin, provenance: Provenance, layers: Iterable[LayerRow], states: Iterable[StateRow]
) -> ModelProfile:
    """Return the profile with these rows; the process and the step overhead are absent.

    Curves are fitted only to rows with measured forward times: points computed from a line would make the fit look
    better than it is.
    """
    ordered = sorted(layers, key=lambda row: row.key)
    process = ProcessRow(
        process_bytes=0,
        process_source=Source.ABSENT,
        communicator_bytes=0,
        communicator_source=Source.ABSENT,
        resident_bytes=0,
        resident_source=Source.ABSENT,
        step_overhead_s=0.0,
        step_overhead_source=Source.ABSENT,
        reference_s=0.0,
        reference_source=Source.ABSENT,
    )
    return ModelProfile(
        origin=origin,
        provenance=provenance,
        layers=Table.from_rows(LayerRow, ordered),
        states=Table.from_rows(StateRow, sorted(states, key=lambda row: (row.type, row.tp_size))),
        process=Table.from_rows(ProcessRow, [process]),
        fits=fits_table(row for row in ordered if row.forward_source is Source.MEASURED),
    )


# Hardware profiles: times by bandwidth.

_SIZES = (1024, MIB, 1024 * MIB)
"""Message sizes in bytes at which a bandwidth is turned into times; times between them lie on a straight line."""


class HardwarePoint(NamedTuple):
    """The time of one kind of collective at one size."""

    key: CollectiveKey
    message_bytes: int
    time_s: float
    source: Source


def link_points(
    key: CollectiveKey, bytes_per_s: float, source: Source, sizes: Sequence[int] = _SIZES
) -> Iterator[HardwarePoint]:
    """Yield times from a bandwidth, without latency.

    `bytes_per_s`: the bandwidth of the link for p2p, the bus bandwidth as nccl-tests defines it for collectives. Among
    n ranks an all-reduce moves 2(n-1)/n of its message, the other collectives (n-1)/n.
    """
    n = key.group_size
    shares = {Collective.ALL_REDUCE: 2 * (n - 1) / n, Collective.P2P: 1.0}
    for size in sizes:
        yield HardwarePoint(key, size, shares.get(key.collective, (n - 1) / n) * size / bytes_per_s, source)


def halves(reduce: HardwarePoint) -> Iterator[HardwarePoint]:
    """Yield the all-gather and the reduce-scatter of which an all-reduce consists on a ring (Patarasuk & Yuan 2009)."""
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        key = CollectiveKey.from_fields(reduce.key, collective=collective)
        yield HardwarePoint(key, reduce.message_bytes, reduce.time_s / 2, Source.DERIVED)


def hardware_profile(
    cluster: str, device: str, notes: Sequence[str], points: Sequence[HardwarePoint], overlap: OverlapRow | None = None
) -> HardwareProfile:
    """Return the hardware profile with these points, one time each, and one overlap."""
    ordered = sorted(points)
    return HardwareProfile(
        cluster=cluster,
        device=device,
        backend="nccl",
        provenance=Provenance(date="unknown", versions="nccl, driver unknown", notes=noted(notes)),
        points=Table.from_rows(
            PointRow,
            (PointRow(**p.key.columns, message_bytes=p.message_bytes, interval=0.0, source=p.source) for p in ordered),
        ),
        repeats=Table.from_rows(
            RepeatRow, (RepeatRow(point=i, time_s=p.time_s, outlier=False) for i, p in enumerate(ordered))
        ),
        overlap=Table.from_rows(OverlapRow, [] if overlap is None else [overlap]),
    )


# Models whose layers are known only by type.

_STATES = "hidden_states"
_ELEMENT_BYTES = 4


class FlatType(NamedTuple):
    """A layer type as given on the command line."""

    name: str
    layers: int
    positions: int
    """Number of positions of a sample."""
    features: int
    """Number of features of a position."""
    heads: int
    """Number of attention heads, which tp_size must divide."""


def parse_type(text: str) -> FlatType:
    """Return the type that NAME,LAYERS,POSITIONS,FEATURES,HEADS describes; raise BadInput for text of another form."""
    name, *numbers = text.split(",")
    good = len(numbers) == 4 and all(len(n) < 9 and n.isascii() and n.isdigit() and int(n) for n in numbers)
    if not good or not name.isidentifier() or name in (EMBEDDING, HEAD):
        raise BadInput("--type", f"{text!r} is not a type", "write NAME,LAYERS,POSITIONS,FEATURES,HEADS")
    return FlatType(name, *map(int, numbers))


def flat_model(
    name: str,
    family: str,
    types: Sequence[FlatType],
    parameters_bytes: Mapping[str, float],
    config: Mapping[str, object],
) -> Model:
    """Return the model with layers of these types, in order; each type has one flat float32 parameter.

    `parameters_bytes`: the bytes of the parameters of one layer, for each type, the embedding and the head. A layer
    counts as 2 operations per parameter and position, without attention scores; embedding and head as 2 per parameter.
    Each layer communicates as Megatron's attention and MLP do (Shoeybi et al. 2019); tensor parallelism splits the
    vocabulary of embedding and head.
    """
    if len({kind.name for kind in types}) < len(types):
        raise BadInput("--type", "two types have the same name", "give each another name")
    first, last = types[0], types[-1]
    made = {EMBEDDING: _end(parameters_bytes[EMBEDDING], EMBEDDING, first)}
    made |= {kind.name: _block(parameters_bytes[kind.name], kind) for kind in types}
    made[HEAD] = _end(parameters_bytes[HEAD], HEAD, last)
    return Model(
        name=name,
        family=family,
        config=dict(config),
        sequence_length=first.positions,
        layers=tuple(kind.name for kind in types for _ in range(kind.layers)),
        types=made,
    )


def _block(parameters_bytes: float, kind: FlatType) -> LayerType:
    heads = Heads(
        queries=_STATES,
        keys=_STATES,
        heads=kind.heads,
        kv_heads=kind.heads,
        head_features=max(1, kind.features // kind.heads),
    )
    numel = _numel(parameters_bytes)
    return LayerType(
        parameters=(_parameter(numel),),
        forward_flops_per_sample=2 * numel * kind.positions,
        tp_must_divide={"heads": kind.heads},
        ulysses_must_divide={"heads": kind.heads},
        outputs=(_states(kind),),
        regions=(
            Region(name="attention", enters=(_STATES,), leaves=_STATES, attention=heads),
            Region(name="mlp", enters=(_STATES,), leaves=_STATES),
        ),
    )


def _end(parameters_bytes: float, name: str, neighbour: FlatType) -> LayerType:
    numel = _numel(parameters_bytes)
    inner = {EMBEDDING: Region(name="lookup", leaves=_STATES), HEAD: Region(name="logits", enters=(_STATES,))}
    return LayerType(
        parameters=(_parameter(numel, f"{name}.flat"),),
        forward_flops_per_sample=2 * numel,
        outputs=(_states(neighbour),) if name == EMBEDDING else (),
        regions=(inner[name],),
    )


def _states(kind: FlatType) -> BoundaryTensor:
    return BoundaryTensor(name=_STATES, sequence_length=kind.positions, features=kind.features)


def _parameter(numel: int, name: str = "flat") -> Parameter:
    return Parameter(name=name, shape=(numel,), tp_dim=0)


def _numel(parameters_bytes: float) -> int:
    return max(1, round(parameters_bytes / _ELEMENT_BYTES))


# Layers whose time is bound by kernel launches on the host: sharding them further does not make them faster.


LAUNCH_BOUND = "launch-bound"
"""First word of the note on a layer whose time is bound by kernel launches; predictions repeat it."""
_STARTING_S = 60e-6
"""Seconds per kernel up to which a layer is taken to wait for its host.

Galvatron's blocks of BERT take 50 to 59 us for each of 35 kernels at every length from 128 to 2,048 tokens, and
FASOP's layers 33 to 59 us at every tp_size, however much there is to compute.
"""


def launch_notes(model: Model, rows: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each layer type that is bound by kernel launches and was scaled to sizes not measured."""
    known = list(rows)
    for name in block_types(model):
        kernels, alike = block_kernels(model.types[name]), [row for row in known if row.type == name]
        timed = [row for row in alike if row.forward_source is Source.MEASURED]
        bound = [row for row in timed if row.forward_s <= kernels * _STARTING_S]
        if not bound or len(timed) == len(alike):
            continue
        times_us = [row.forward_s * 1e6 / kernels for row in bound]
        divided = {row.tp_size for row in alike} - {row.tp_size for row in timed}
        yield (
            f"{LAUNCH_BOUND}: {name} takes {_span(times_us)} us for each of about {kernels} kernels ({_where(bound)}), "
            "about what a host takes to start one. In proportion to it, larger micro-batches are too slow"
            + (" and larger tp_sizes too fast." if divided else ".")
        )


def _span(values: Iterable[float]) -> str:
    """Return the smallest and the largest value in words, rounded."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.0f}" for value in (ordered[0], ordered[-1])))


def _where(rows: Iterable[LayerRow]) -> str:
    """Return, in words, the ranges of micro-batch size, tp_size and length of these rows."""
    known, columns = list(rows), ("micro_batch_size", "tp_size", "sequence_length")
    return ", ".join(f"{name} {_span(getattr(row, name) for row in known)}" for name in columns)
