"""How long the layers of a model take on a device, and how much memory they need."""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import (
    SOURCES,
    Column,
    Provenance,
    Table,
    open_profile,
    read_attribute,
    read_table,
    write_profile,
    write_table,
)
from shardwright_formats.types.strategy import Recompute, SequenceParallel

__all__ = [
    "FITS",
    "FORMAT",
    "LAYERS",
    "PROCESS",
    "STATES",
    "TABLES",
    "VERSION",
    "FitMode",
    "ModelProfile",
    "ProfileOrigin",
    "read_model_profile",
    "write_model_profile",
]

FORMAT = "shardwright.model_profile"
VERSION = 3

_SOURCE = Column("S8", "name", among=SOURCES)


def _sourced(dtype: str, unit: str, by: str) -> Column:
    return Column(dtype, unit, sourced_by=by)


class FitMode(StrEnum):
    """How a quantity depends on the micro-batch size b and the sequence length s; Galvatron's three modes and one."""

    STATIC = "static"
    """linear * b, at one length."""
    BATCH = "batch"
    """constant + linear * b, at one length."""
    SEQUENCE = "sequence"
    """constant + linear * s + quadratic * s^2, at one micro-batch size."""
    JOINT = "joint"
    """constant + linear * b s + quadratic * b s^2, over all points."""


LAYERS = {
    "type": Column("S32", "name"),
    "tp_size": Column("int64", "ranks", positive=True),
    "sequence_parallel": Column("S8", "name", among=tuple(SequenceParallel)),
    "recompute": Column("S9", "name", among=tuple(Recompute)),
    "micro_batch_size": Column("int64", "samples of one tensor-parallel group", positive=True),
    "sequence_length": Column("int64", "tokens", positive=True),
    "forward_s": _sourced("float64", "s a microbatch", "forward_source"),
    "forward_error_s": _sourced("float64", "s, standard error of forward_s", "forward_source"),
    "forward_source": _SOURCE,
    "backward_s": _sourced("float64", "s a microbatch", "backward_source"),
    "backward_error_s": _sourced("float64", "s, standard error of backward_s", "backward_source"),
    "backward_source": _SOURCE,
    "activation_bytes": _sourced("int64", "bytes held from forward to backward, a microbatch", "activation_source"),
    "activation_source": _SOURCE,
    "workspace_bytes": _sourced(
        "int64", "most further bytes held for a moment in forward or backward", "workspace_source"
    ),
    "workspace_source": _SOURCE,
}
STATES = {
    "type": Column("S32", "name"),
    "tp_size": Column("int64", "ranks", positive=True),
    "parameter_bytes": _sourced("int64", "bytes", "bytes_source"),
    "gradient_bytes": _sourced("int64", "bytes", "bytes_source"),
    "optimizer_bytes": _sourced("int64", "bytes", "bytes_source"),
    "bytes_source": _SOURCE,
    "optimizer_s": _sourced("float64", "s a step, unsharded, clipping included", "optimizer_source"),
    "optimizer_source": _SOURCE,
    "reduction_s": _sourced("float64", "s a step that reducing the gradients under plain ddp adds", "reduction_source"),
    "reduction_ranks": Column("int64", "data-parallel ranks of that reduction", positive=True),
    "reduction_source": _SOURCE,
}
PROCESS = {
    "process_bytes": _sourced("int64", "bytes of device memory outside the tensors", "process_source"),
    "process_source": _SOURCE,
    "resident_bytes": _sourced("int64", "bytes of host memory", "resident_source"),
    "resident_source": _SOURCE,
    "step_overhead_s": _sourced("float64", "s a step", "step_overhead_source"),
    "step_overhead_source": _SOURCE,
}
_POINT = ("type", "tp_size", "sequence_parallel", "recompute", "sequence_length", "micro_batch_size")
FITS = {
    "type": Column("S32", "name"),
    "tp_size": Column("int64", "ranks", positive=True),
    "sequence_parallel": Column("S8", "name", among=tuple(SequenceParallel)),
    "recompute": Column("S9", "name", among=tuple(Recompute)),
    "quantity": Column("S16", "name", among=("forward_s", "backward_s", "activation_bytes")),
    "mode": Column("S8", "name", among=tuple(FitMode)),
    "micro_batch_size": Column("int64", "samples of one tensor-parallel group; 0 where it varies"),
    "sequence_length": Column("int64", "tokens; 0 where it varies"),
    "constant": Column("float64", "s or bytes", signed=True),
    "linear": Column("float64", "s or bytes per unit of the mode", signed=True),
    "quadratic": Column("float64", "s or bytes per squared unit of the mode", signed=True),
    "points": Column("int64", "points fitted", positive=True),
    "typical_residual": Column("float64", "median of |fit - point| / point"),
    "worst_residual": Column("float64", "largest |fit - point| / point"),
    "left_out_points": Column("int64", "points that were left out in turn and predicted by the others"),
    "left_out_error": Column("float64", "median of |prediction - point| / point over them; 0 without any"),
}
TABLES = {"layers": LAYERS, "states": STATES, "process": PROCESS, "fits": FITS}
"""The tables of the file and their columns."""


class ProfileOrigin(NamedTuple):
    """What was profiled, on what and how."""

    model: str
    architecture_sha256: str
    """`Model.architecture_sha256`: the profile serves models of these layers, of any number of them."""
    device: str
    backend: str
    precision: str
    """`parameters/compute/reduce`, such as `float32/bfloat16/float32`."""
    attention: str


class ModelProfile(NamedTuple):
    """The tables of a model profile, one per model and device type.

    `layers`: time and memory of one layer of each type (embedding and head too) by strategy and micro-batch, with the
    traffic of tensor and sequence parallelism inside, without gradient reduction. `states`: bytes and optimizer time of
    one layer's parameters under plain DDP. `process`: what is there once a process or a step, in one row. `fits`:
    curves through the points of `layers`, with what they leave unexplained.
    """

    origin: ProfileOrigin
    provenance: Provenance
    layers: Table
    states: Table
    process: Table
    fits: Table


def write_model_profile(path: Path, profile: ModelProfile) -> None:
    """Write the profile; the same measurements give the same bytes."""
    with write_profile(path, FORMAT, VERSION, profile.origin._asdict() | profile.provenance._asdict()) as file:
        for name, columns in TABLES.items():
            write_table(file, name, columns, getattr(profile, name))


def read_model_profile(path: Path) -> ModelProfile:
    """Read a model profile; BadInput names whatever cannot be right in it."""
    with open_profile(path, FORMAT, VERSION) as file:
        origin = ProfileOrigin(**{name: read_attribute(path, file, name) for name in ProfileOrigin._fields})
        provenance = Provenance(**{name: read_attribute(path, file, name) for name in Provenance._fields})
        tables = {name: read_table(path, file, name, columns) for name, columns in TABLES.items()}
    if (rows := len(tables["process"]["process_bytes"])) != 1:
        raise BadInput(path, f"table process has {rows} rows, not 1", "write the profile again")
    _check_points(path, tables["layers"])
    return ModelProfile(origin, provenance, **tables)


def _check_points(path: Path, layers: Table) -> None:
    """Refuse a point that is there twice, and activations that shrink as the micro-batch grows."""
    held: dict[tuple[object, ...], int] = {}
    rows = sorted(range(len(layers["type"])), key=lambda row: tuple(layers[name][row] for name in _POINT))
    for row in rows:
        *curve, size = (layers[name][row] for name in _POINT)
        where = f"table layers: {', '.join(v.decode() if isinstance(v, bytes) else str(v) for v in (*curve, size))}"
        if (*curve, size) in held:
            raise BadInput(path, f"{where} is there twice", "write the profile again")
        held[*curve, size] = row
        before = held.get((*curve, None))
        if before is not None and layers["activation_source"][row] != b"absent":
            less, more = (int(layers["activation_bytes"][i]) for i in (before, row))
            if more < less:
                what = f"{where}: activation_bytes fall from {less} to {more} as the micro-batch grows"
                raise BadInput(path, what, "measure these points again")
        held[*curve, None] = row
