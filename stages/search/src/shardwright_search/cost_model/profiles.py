"""The profiles a plan is priced with, indexed, and the checks that they belong to its model and machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import Table
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright_formats.types.model import Model
from shardwright_formats.types.model_profile import FitMode, ModelProfile, ProfileOrigin, read_model_profile
from shardwright_formats.types.plan import Attention, Precision

__all__ = [
    "Curve",
    "LayerKey",
    "LayerPoints",
    "Profiles",
    "Sources",
    "States",
    "check_profiles",
    "index_profiles",
    "read_profiles",
]


class LayerKey(NamedTuple):
    """What the points of one curve of the model profile have in common."""

    type: str
    tp_size: int
    sequence_parallel: str
    recompute: str
    sequence_length: int


Sources = frozenset[tuple[str, str]]
"""Numbers of a profile by name, each with where it comes from: measured, derived, assumed, analytic or absent."""


class LayerPoints(NamedTuple):
    """Measured points of one curve, by ascending micro_batch_size [points]; `values` [points, columns].

    The columns are forward_s, backward_s, activation_bytes and workspace_bytes.
    """

    micro_batch_sizes: NDArray[Any]
    values: NDArray[Any]
    sources: Sources
    """Of the four columns, over all points."""
    errors: NDArray[Any]
    """Standard errors of forward_s and backward_s, as shares of them [points, 2]; 0 where none is known."""


class Curve(NamedTuple):
    """One fitted curve of a quantity."""

    mode: FitMode
    micro_batch_size: int
    """0 where it varies; so is the length."""
    sequence_length: int
    coefficients: tuple[float, float, float]
    """constant, linear, quadratic."""


class States(NamedTuple):
    """What one layer's parameters cost a step on one rank, under plain DDP."""

    tp_size: int
    optimizer_s: float
    reduction_s: float
    """What reducing their gradients over `reduction_ranks` ranks added to the backward pass."""
    reduction_ranks: int
    sources: Sources


class Profiles(NamedTuple):
    """A hardware and a model profile, with the names of their files for messages."""

    hardware: HardwareProfile
    hardware_file: Path
    origin: ProfileOrigin
    model_file: Path
    layers: dict[LayerKey, LayerPoints]
    states: dict[tuple[str, int], States]
    """By (type, tp_size)."""
    fits: dict[tuple[str, int, str, str, str], tuple[Curve, ...]]
    """By type, tp_size, sequence_parallel, recompute and quantity."""
    process_bytes: int
    step_overhead_s: float
    sources: Sources
    """Of these two."""
    notes: str
    """Of the model profile, one sentence a line."""
    memory_factor: float = 1.0
    """What the memory of a rank is multiplied by, where measured plans taught that."""


def read_profiles(hardware_file: Path, model_file: Path) -> Profiles:
    """Read and index both profiles."""
    return index_profiles(
        read_hardware_profile(hardware_file), hardware_file, read_model_profile(model_file), model_file
    )


def index_profiles(
    hardware: HardwareProfile, hardware_file: Path, model_profile: ModelProfile, model_file: Path
) -> Profiles:
    """Index the tables by what they are asked for."""
    states, process = model_profile.states, model_profile.process
    return Profiles(
        hardware,
        hardware_file,
        model_profile.origin,
        model_file,
        _layer_points(model_profile.layers),
        {
            (name.decode(), int(states["tp_size"][row])): States(
                int(states["tp_size"][row]),
                float(states["optimizer_s"][row]),
                float(states["reduction_s"][row]),
                int(states["reduction_ranks"][row]),
                _sources(states, row, _STATE_SOURCES),
            )
            for row, name in enumerate(states["type"])
        },
        _curves(model_profile.fits),
        int(process["process_bytes"][0]),
        float(process["step_overhead_s"][0]),
        _sources(process, 0, _PROCESS_SOURCES),
        model_profile.provenance.notes,
    )


def check_profiles(
    profiles: Profiles, model: Model, cluster: Cluster, precision: Precision, attention: Attention
) -> None:
    """Raise BadInput where a profile was made for another model, device, precision or attention kernel."""
    origin = profiles.origin
    if origin.architecture_sha256 != model.architecture_sha256:
        raise BadInput(
            profiles.model_file,
            f"profiled layers of {origin.model!r} that are not those of model {model.name!r}",
            "profile this model",
        )
    wanted = f"{precision.parameters}/{precision.compute}/{precision.reduce}"
    if origin.precision != wanted:
        raise BadInput(profiles.model_file, f"profiled in {origin.precision}, not {wanted}", "profile that precision")
    if attention is not Attention.AUTO and origin.attention not in (attention, Attention.AUTO):
        raise BadInput(
            profiles.model_file, f"profiled with attention {origin.attention}, not {attention}", "profile that kernel"
        )
    used = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    if len(used) > 1:
        raise BadInput(f"cluster {cluster.name}", f"mixes devices {used}, not planned yet", "use one device type")
    for file, device in (
        (profiles.model_file, origin.device),
        (profiles.hardware_file, profiles.hardware.device),
    ):
        if device != used[0]:
            raise BadInput(
                file, f"profiled on {device!r}, cluster {cluster.name!r} has {used[0]!r}", "profile that device"
            )


_LAYER_SOURCES = {
    "forward_s": "forward_source",
    "backward_s": "backward_source",
    "activation_bytes": "activation_source",
    "workspace_bytes": "workspace_source",
}
_LAYER_ERRORS = {"forward_error_s": "forward_s", "backward_error_s": "backward_s"}
_STATE_SOURCES = {"optimizer_s": "optimizer_source", "reduction_s": "reduction_source"}
_PROCESS_SOURCES = {"process_bytes": "process_source", "step_overhead_s": "step_overhead_source"}


def _sources(table: Table, row: int, columns: Mapping[str, str]) -> Sources:
    return frozenset((name, table[source][row].decode()) for name, source in columns.items())


def _layer_points(table: Table) -> dict[LayerKey, LayerPoints]:
    rows: dict[LayerKey, dict[int, int]] = {}
    for i in range(len(table["type"])):
        key = LayerKey(
            table["type"][i].decode(),
            int(table["tp_size"][i]),
            table["sequence_parallel"][i].decode(),
            table["recompute"][i].decode(),
            int(table["sequence_length"][i]),
        )
        rows.setdefault(key, {})[int(table["micro_batch_size"][i])] = i
    columns = [table[name] for name in _LAYER_SOURCES]
    with np.errstate(invalid="ignore"):  # absent times are 0
        errors = [table[name] / table[of] for name, of in _LAYER_ERRORS.items()]
    return {
        key: LayerPoints(
            np.array(sorted(found)),
            np.stack([column[[found[size] for size in sorted(found)]] for column in columns], 1).astype(float),
            frozenset().union(*(_sources(table, row, _LAYER_SOURCES) for row in found.values())),
            np.stack([column[[found[size] for size in sorted(found)]] for column in errors], 1),
        )
        for key, found in rows.items()
    }


def _curves(table: Table) -> dict[tuple[str, int, str, str, str], tuple[Curve, ...]]:
    found: dict[tuple[str, int, str, str, str], list[Curve]] = {}
    for i in range(len(table["type"])):
        names = (table[name][i].decode() for name in ("sequence_parallel", "recompute", "quantity"))
        key = (table["type"][i].decode(), int(table["tp_size"][i]), *names)
        curve = Curve(
            FitMode(table["mode"][i].decode()),
            int(table["micro_batch_size"][i]),
            int(table["sequence_length"][i]),
            (float(table["constant"][i]), float(table["linear"][i]), float(table["quadratic"][i])),
        )
        found.setdefault(key, []).append(curve)
    return {key: tuple(curves) for key, curves in found.items()}
