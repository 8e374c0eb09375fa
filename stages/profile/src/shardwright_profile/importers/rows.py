"""The profile that importers write: numbers with their sources, everything else absent."""

from collections.abc import Iterable
from typing import NamedTuple

from shardwright_estimate.curves import fits_table
from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Source, Table
from shardwright_formats.types.model_profile import LayerRow, ModelProfile, ProcessRow, ProfileOrigin, StateRow
from shardwright_formats.types.strategy import Recompute, SequenceParallel


class Sourced(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: Source


ABSENT = Sourced(0.0, Source.ABSENT)

_MAX_NOTES = 150
_MAX_CHARACTERS = 400
"""Together they stay within what a profile's reader accepts."""

_WEAKNESS = (Source.MEASURED, Source.DERIVED, Source.ASSUMED, Source.ABSENT)


class LayerKey(NamedTuple):
    """A type of layer under a strategy."""

    type: str
    tp_size: int
    sequence_parallel: SequenceParallel = SequenceParallel.NONE
    recompute: Recompute = Recompute.NONE


def layer_row(
    key: LayerKey,
    micro_batch_size: int,
    sequence_length: int,
    *,
    forward_s: Sourced,
    backward_s: Sourced,
    activation_bytes: Sourced = ABSENT,
    workspace_bytes: Sourced = ABSENT,
) -> LayerRow:
    """A row whose errors of times are not known."""
    return LayerRow(
        **key._asdict(),
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        forward_s=forward_s.value,
        forward_source=forward_s.source,
        backward_s=backward_s.value,
        backward_source=backward_s.source,
        activation_bytes=round(activation_bytes.value),
        activation_source=activation_bytes.source,
        workspace_bytes=round(workspace_bytes.value),
        workspace_source=workspace_bytes.source,
    )


def state_row(type_name: str, tp_size: int, parameter_bytes: Sourced) -> StateRow:
    """Gradients are as large as parameters, Adam's moments twice that; optimizer and reduction are absent."""
    size = round(parameter_bytes.value)
    return StateRow(
        type=type_name,
        tp_size=tp_size,
        parameter_bytes=size,
        gradient_bytes=size,
        optimizer_bytes=2 * size,
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
    """The notes as a profile keeps them, one sentence a line; a file of defects is not repeated whole."""
    lines = [" ".join(note.split()) for note in notes]
    cut = [line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..." for line in lines[:_MAX_NOTES]]
    left = len(lines) - len(cut)
    return "\n".join([*cut, f"{left} further notes are left out."] if left else cut)


def weaker(first: Source, second: Source) -> Source:
    """Of two sources the one that promises less."""
    return max(first, second, key=_WEAKNESS.index)


def profile_of(
    origin: ProfileOrigin, provenance: Provenance, layers: Iterable[LayerRow], states: Iterable[StateRow]
) -> ModelProfile:
    """The profile of these rows; process and overhead are absent.

    Curves go through what was measured only: points off a line would make it look better than it is.
    """
    ordered = sorted(layers, key=lambda row: row.place)
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
        layers=Table.of(LayerRow, ordered),
        states=Table.of(StateRow, sorted(states, key=lambda row: (row.type, row.tp_size))),
        process=Table.of(ProcessRow, [process]),
        fits=fits_table(row for row in ordered if row.forward_source is Source.MEASURED),
    )
