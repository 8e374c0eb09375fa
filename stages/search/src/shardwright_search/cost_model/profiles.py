"""The profiles a plan is priced with, indexed, and the checks that they belong to its model and machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.table import Row, columns_of
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright_formats.types.model import Model
from shardwright_formats.types.model_profile import (
    FitRow,
    LayerRow,
    ModelProfile,
    ProfileOrigin,
    StateRow,
    read_model_profile,
)
from shardwright_formats.types.plan import Attention, Precision, profiled_as


class LayerKey(NamedTuple):
    """What the points of one curve of the model profile have in common."""

    type: str
    tp_size: int
    sequence_parallel: str
    recompute: str
    sequence_length: int


CurveKey = tuple[str, int, str, str, str]
"""Type, tp_size, sequence_parallel, recompute and quantity."""

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


class Profiles(NamedTuple):
    """A hardware and a model profile of one device, with the names of their files, and those of other devices."""

    hardware: HardwareProfile
    hardware_file: Path
    origin: ProfileOrigin
    model_file: Path
    layers: Mapping[LayerKey, LayerPoints]
    states: Mapping[tuple[str, int], StateRow]
    """By type and tp_size."""
    fits: Mapping[CurveKey, tuple[FitRow, ...]]
    process_bytes: int
    communicator_bytes: int
    """Of each communicator that is no edge."""
    step_overhead_s: float
    sources: Sources
    """Of these three."""
    reference_s: float
    """Of the reference workload on the machine as it was profiled; 0 where none was run."""
    notes: str
    """Of the model profile, one sentence a line."""
    memory_factor: float = 1.0
    """What the memory of a rank is multiplied by, where measured plans taught that."""
    others: tuple["Profiles", ...] = ()
    """Of the other devices of a mixed cluster."""

    @property
    def every(self) -> tuple["Profiles", ...]:
        """Those of each device apart."""
        return self._replace(others=()), *self.others

    def each(self, change: Callable[["Profiles"], "Profiles"]) -> "Profiles":
        """With those of each device changed."""
        return together([change(own) for own in self.every])

    def of_device(self, device: str) -> "Profiles":
        """Those of one device; StopIteration where there are none."""
        return next(own for own in self.every if own.origin.device == device)

    def used(self, cluster: Cluster) -> tuple["Profiles", ...]:
        """Those of each device that a cluster has."""
        return tuple(own for own in self.every if own.origin.device in devices_of(cluster))


def together(every: Sequence[Profiles]) -> Profiles:
    """Profiles of one device each as those of a mixed cluster; BadInput where two are of the same device."""
    _check_distinct([(own.origin.device, own.model_file) for own in every])
    first, *others = every
    return first._replace(others=tuple(others))


def _check_distinct(devices: Iterable[tuple[str, Path]]) -> None:
    """Of each file what was profiled."""
    known: dict[str, Path] = {}
    for device, file in devices:
        if device in known:
            what = f"profiled on {device!r}, as {known[device]} was"
            raise BadInput(file, what, "give one profile for each device")
        known[device] = file


def devices_of(cluster: Cluster) -> tuple[str, ...]:
    """The devices of its nodes, in the order of their names."""
    return tuple(sorted({cluster.node_types[group.node_type].device for group in cluster.nodes}))


def read_profiles(hardware_files: Sequence[Path], model_files: Sequence[Path]) -> Profiles:
    """Read and index the profiles: of hardware that of the whole cluster or one for each device, of models the latter.

    Raises BadInput where two are of one device.
    """
    hardware = [(read_hardware_profile(file), file) for file in hardware_files]
    _check_distinct((own.device, file) for own, file in hardware)
    models = [(read_model_profile(file), file) for file in model_files]
    return together([index_profiles(*_hardware_of(own.origin.device, hardware), own, file) for own, file in models])


def _hardware_of(device: str, every: Sequence[tuple[HardwareProfile, Path]]) -> tuple[HardwareProfile, Path]:
    """A device's own, else that of a cluster that has it, else any, which `check_profiles` refuses."""
    of = sorted(every, key=lambda one: (one[0].device != device, device not in _devices(one[0])))
    return of[0]


def _devices(hardware: HardwareProfile) -> tuple[str, ...]:
    """The devices of the cluster that was profiled."""
    return tuple(hardware.device.split(" + "))


def index_profiles(
    hardware: HardwareProfile, hardware_file: Path, model_profile: ModelProfile, model_file: Path
) -> Profiles:
    """Index the tables by what they are asked for."""
    (process,) = model_profile.process.rows
    told = ("process_bytes", "step_overhead_s", *(("communicator_bytes",) if process.communicator_bytes else ()))
    fits: dict[CurveKey, list[FitRow]] = {}
    for fit in model_profile.fits.rows:
        key = fit.type, fit.tp_size, fit.sequence_parallel, fit.recompute, fit.quantity
        fits.setdefault(key, []).append(fit)
    return Profiles(
        hardware=hardware,
        hardware_file=hardware_file,
        origin=model_profile.origin,
        model_file=model_file,
        layers=_layer_points(model_profile.layers.rows),
        states={(row.type, row.tp_size): row for row in model_profile.states.rows},
        fits={key: tuple(curves) for key, curves in fits.items()},
        process_bytes=process.process_bytes,
        communicator_bytes=process.communicator_bytes,
        step_overhead_s=process.step_overhead_s,
        sources=sources_of(process, *told),
        reference_s=process.reference_s,
        notes=model_profile.provenance.notes,
    )


def sources_of(row: Row, *names: str) -> Sources:
    """Where these numbers of a row come from."""
    columns = columns_of(type(row))
    return frozenset((name, str(getattr(row, columns[name].source))) for name in names)


def check_profiles(
    profiles: Profiles, model: Model, cluster: Cluster, precision: Precision, attention: Attention, compile: bool
) -> None:
    """Raise BadInput where a profile was made for another model, device, precision or kernels, or one is missing."""
    for own in profiles.every:
        _check_origin(own, model, precision, attention, compile)
    for device in devices_of(cluster):
        of = next((own for own in profiles.every if own.origin.device == device), profiles)
        for file, profiled in ((of.model_file, (of.origin.device,)), (of.hardware_file, _devices(of.hardware))):
            if device not in profiled:
                what = f"profiled on {' + '.join(profiled)!r}, cluster {cluster.name!r} has {device!r}"
                raise BadInput(file, what, "profile that device" if not profiles.others else "add its profile")


def _check_origin(profiles: Profiles, model: Model, precision: Precision, attention: Attention, compile: bool) -> None:
    origin = profiles.origin
    if origin.architecture_sha256 != model.architecture_sha256:
        raise BadInput(
            profiles.model_file,
            f"profiled layers of {origin.model!r} that are not those of model {model.name!r}",
            "profile this model",
        )
    if origin.precision != (wanted := profiled_as(precision, compile)):
        raise BadInput(profiles.model_file, f"profiled in {origin.precision}, not {wanted}", "profile that precision")
    if attention is not Attention.AUTO and origin.attention not in (attention, Attention.AUTO):
        raise BadInput(
            profiles.model_file, f"profiled with attention {origin.attention}, not {attention}", "profile that kernel"
        )


_COLUMNS = ("forward_s", "backward_s", "activation_bytes", "workspace_bytes")


def _layer_points(rows: Iterable[LayerRow]) -> dict[LayerKey, LayerPoints]:
    found: dict[LayerKey, list[LayerRow]] = {}
    for row in rows:
        key = LayerKey(row.type, row.tp_size, row.sequence_parallel, row.recompute, row.sequence_length)
        found.setdefault(key, []).append(row)
    return {key: _points(sorted(of, key=lambda row: row.micro_batch_size)) for key, of in found.items()}


def _points(rows: Iterable[LayerRow]) -> LayerPoints:
    rows = list(rows)
    times = np.array([(row.forward_s, row.backward_s) for row in rows])
    errors = np.array([(row.forward_error_s, row.backward_error_s) for row in rows])
    return LayerPoints(
        micro_batch_sizes=np.array([row.micro_batch_size for row in rows]),
        values=np.array([[getattr(row, name) for name in _COLUMNS] for row in rows], float),
        sources=frozenset().union(*(sources_of(row, *_COLUMNS) for row in rows)),
        errors=np.divide(errors, times, out=np.zeros_like(errors), where=times > 0),  # absent times are 0
    )
