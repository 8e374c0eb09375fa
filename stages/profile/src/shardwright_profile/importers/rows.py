"""The rows of a model profile that importers write: numbers with their sources, everything else absent."""

from collections.abc import Iterable
from typing import NamedTuple

from shardwright_formats.io.hdf5 import Provenance, table_of
from shardwright_formats.types.model_profile import LAYERS, PROCESS, STATES, ModelProfile, ProfileOrigin
from shardwright_formats.types.strategy import Recompute, SequenceParallel
from shardwright_profile.model.curves import fits_table

__all__ = ["ABSENT", "LayerRow", "Sourced", "StateRow", "noted", "profile_of", "weaker"]


class Sourced(NamedTuple):
    """A number and where it comes from."""

    value: float
    source: str


ABSENT = Sourced(0.0, "absent")

_MOST_NOTES = 150
_MOST_CHARACTERS = 400
"""Together they stay within what a profile's reader accepts."""

_WEAKNESS = ("measured", "derived", "assumed", "absent")


class LayerRow(NamedTuple):
    """One row of the profile's table `layers`."""

    type: str
    tp_size: int
    sequence_parallel: SequenceParallel
    recompute: Recompute
    micro_batch_size: int
    sequence_length: int
    forward_s: Sourced
    backward_s: Sourced
    activation_bytes: Sourced
    workspace_bytes: Sourced


class StateRow(NamedTuple):
    """One row of the profile's table `states`; gradients are as large as parameters, Adam's moments twice that."""

    type: str
    tp_size: int
    parameter_bytes: Sourced


def noted(notes: Iterable[str]) -> str:
    """The notes as a profile keeps them, one sentence a line; a file of defects is not retold whole."""
    lines = [" ".join(note.split()) for note in notes]
    cut = [line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..." for line in lines[:_MOST_NOTES]]
    left = len(lines) - len(cut)
    return "\n".join([*cut, f"{left} further notes are left out."] if left else cut)


def weaker(first: str, second: str) -> str:
    """Of two sources the one that promises less."""
    return max(first, second, key=_WEAKNESS.index)


def profile_of(
    origin: ProfileOrigin, provenance: Provenance, layers: list[LayerRow], states: list[StateRow]
) -> ModelProfile:
    """The profile of these rows; process, overhead, optimizer and reduction are absent, errors of times are 0.

    Curves go through what was measured only: points off a line would make it look better than it is.
    """
    ordered = sorted(layers)
    known = table_of(LAYERS, map(_layer, (row for row in ordered if row.forward_s.source == "measured")))
    process: dict[str, object] = dict.fromkeys(("process_bytes", "resident_bytes"), 0)
    process |= {"step_overhead_s": 0.0}
    process |= dict.fromkeys(("process_source", "resident_source", "step_overhead_source"), "absent")
    return ModelProfile(
        origin=origin,
        provenance=provenance,
        layers=table_of(LAYERS, map(_layer, ordered)),
        states=table_of(STATES, map(_state, sorted(states))),
        process=table_of(PROCESS, [process]),
        fits=fits_table(known),
    )


def _layer(row: LayerRow) -> dict[str, object]:
    key = {name: getattr(row, name) for name in ("type", "tp_size", "micro_batch_size", "sequence_length")}
    return key | {
        "sequence_parallel": row.sequence_parallel.value,
        "recompute": row.recompute.value,
        "forward_s": row.forward_s.value,
        "forward_error_s": 0.0,
        "forward_source": row.forward_s.source,
        "backward_s": row.backward_s.value,
        "backward_error_s": 0.0,
        "backward_source": row.backward_s.source,
        "activation_bytes": round(row.activation_bytes.value),
        "activation_source": row.activation_bytes.source,
        "workspace_bytes": round(row.workspace_bytes.value),
        "workspace_source": row.workspace_bytes.source,
    }


def _state(row: StateRow) -> dict[str, object]:
    size = round(row.parameter_bytes.value)
    return {
        "type": row.type,
        "tp_size": row.tp_size,
        "parameter_bytes": size,
        "gradient_bytes": size,
        "optimizer_bytes": 2 * size,
        "bytes_source": row.parameter_bytes.source,
        "optimizer_s": 0.0,
        "optimizer_source": "absent",
        "reduction_s": 0.0,
        "reduction_ranks": 1,
        "reduction_source": "absent",
    }
