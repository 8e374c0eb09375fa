"""How long the layers of a model take on a device, and how much memory they need."""

from pathlib import Path
from typing import NamedTuple

from shardwright_formats.errors import BadInput
from shardwright_formats.strategy import Recompute, SequenceParallel
from shardwright_formats.tables import (
    SOURCES,
    Column,
    Table,
    open_profile,
    read_attribute,
    read_table,
    write_profile,
    write_table,
)

__all__ = [
    "FORMAT",
    "LAYERS",
    "PROCESS",
    "STATES",
    "TABLES",
    "VERSION",
    "ModelProfile",
    "ProfileOrigin",
    "read_model_profile",
    "write_model_profile",
]

FORMAT = "shardwright.model_profile"
VERSION = 1

_SOURCE = Column("S8", ", ".join(SOURCES[:-1]) + f" or {SOURCES[-1]}", among=SOURCES)

LAYERS = {
    "type": Column("S32", "name"),
    "tp_size": Column("int64", "ranks", positive=True),
    "sequence_parallel": Column("S8", "name", among=tuple(SequenceParallel)),
    "recompute": Column("S9", "name", among=tuple(Recompute)),
    "micro_batch_size": Column("int64", "samples of one tensor-parallel group", positive=True),
    "sequence_length": Column("int64", "tokens", positive=True),
    "forward_s": Column("float64", "s a microbatch"),
    "backward_s": Column("float64", "s a microbatch"),
    "activation_bytes": Column("int64", "bytes held from forward to backward, a microbatch"),
    "transient_bytes": Column("int64", "most further bytes held for a moment in forward or backward"),
    "source": _SOURCE,
}
STATES = {
    "type": Column("S32", "name"),
    "tp_size": Column("int64", "ranks", positive=True),
    "parameter_bytes": Column("int64", "bytes"),
    "gradient_bytes": Column("int64", "bytes"),
    "optimizer_bytes": Column("int64", "bytes"),
    "optimizer_s": Column("float64", "s a step, unsharded, clipping included"),
    "reduction_s": Column("float64", "s a step that reducing the gradients under plain ddp adds"),
    "reduction_ranks": Column("int64", "data-parallel ranks of that reduction", positive=True),
    "source": _SOURCE,
}
PROCESS = {
    "process_bytes": Column("int64", "bytes of device memory outside the tensors"),
    "resident_bytes": Column("int64", "bytes of host memory"),
    "step_overhead_s": Column("float64", "s a step"),
    "source": _SOURCE,
}
TABLES = {"layers": LAYERS, "states": STATES, "process": PROCESS}
"""The tables of the file and their columns."""


class ProfileOrigin(NamedTuple):
    """What was profiled, on what and how."""

    model: str
    types_sha256: str
    """`Model.types_sha256`: the profile serves models of these layer types, of any number of layers."""
    device: str
    backend: str
    precision: str
    """`parameters/compute/reduce`, such as `float32/bfloat16/float32`."""
    attention: str


class ModelProfile(NamedTuple):
    """The tables of a model profile, one per model and device type.

    `layers`: time and memory of one layer of each type (embedding and head too) by strategy and micro-batch, with the
    traffic of tensor and sequence parallelism inside, without gradient reduction. `states`: bytes and optimizer time of
    one layer's parameters under plain DDP. `process`: what is there once a process or a step, in one row.
    """

    origin: ProfileOrigin
    layers: Table
    states: Table
    process: Table


def write_model_profile(path: Path, profile: ModelProfile) -> None:
    """Write the profile; the same measurements give the same bytes."""
    with write_profile(path, FORMAT, VERSION, profile.origin._asdict()) as file:
        write_table(file, "layers", LAYERS, profile.layers)
        write_table(file, "states", STATES, profile.states)
        write_table(file, "process", PROCESS, profile.process)


def read_model_profile(path: Path) -> ModelProfile:
    """Read a model profile; BadInput names whatever cannot be right in it."""
    with open_profile(path, FORMAT, VERSION) as file:
        origin = ProfileOrigin(**{name: read_attribute(path, file, name) for name in ProfileOrigin._fields})
        layers = read_table(path, file, "layers", LAYERS)
        states = read_table(path, file, "states", STATES)
        process = read_table(path, file, "process", PROCESS)
    if len(process["source"]) != 1:
        raise BadInput(path, f"table process has {len(process['source'])} rows, not 1", "write the profile again")
    return ModelProfile(origin, layers, states, process)
