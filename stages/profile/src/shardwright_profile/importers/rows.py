"""The model profile that importers write: numbers with their sources, everything else absent."""

from collections.abc import Iterable

from shardwright_estimate.curves import fits_table
from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Source, Sourced, Table
from shardwright_formats.types.model_profile import LayerRow, ModelProfile, ProcessRow, ProfileOrigin, StateRow

ABSENT = Sourced(0.0, Source.ABSENT)

_MAX_NOTES = 150
_MAX_CHARACTERS = 400
"""Maximum characters of a note: with _MAX_NOTES, notes stay within what a profile's reader accepts."""

_WEAKNESS = (Source.MEASURED, Source.DERIVED, Source.ASSUMED, Source.ABSENT)


def state_row(type_name: str, tp_size: int, parameter_bytes: Sourced) -> StateRow:
    """Return a row whose gradients are as large as the parameters and Adam's moments twice that; times are absent."""
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
    """Return the notes as a profile keeps them, one sentence a line; a file of defects is not repeated whole."""
    lines = [" ".join(note.split()) for note in notes]
    cut = [line if len(line) <= _MAX_CHARACTERS else f"{line[:_MAX_CHARACTERS]}..." for line in lines[:_MAX_NOTES]]
    left = len(lines) - len(cut)
    return "\n".join([*cut, f"{left} further notes are left out."] if left else cut)


def weaker(first: Source, second: Source) -> Source:
    """Return the one of two sources that promises less."""
    return max(first, second, key=_WEAKNESS.index)


def profile_of(
    origin: ProfileOrigin, provenance: Provenance, layers: Iterable[LayerRow], states: Iterable[StateRow]
) -> ModelProfile:
    """Return the profile of these rows; process and overhead are absent.

    Curves go through what was measured only: points off a line would make it look better than it is.
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
