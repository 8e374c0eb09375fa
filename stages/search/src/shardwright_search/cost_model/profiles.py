"""The profiles that plans are priced with: indexed, checked against model and machine, and optionally scaled.

Corrections and what-ifs are made of scaled profiles.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import ArrayLike, NDArray

from shardwright.devices.table import shipped_devices
from shardwright.estimate.curves import fits_table
from shardwright.estimate.held import OURS, Held
from shardwright.estimate.runtimes import RUNTIMES, Runtime, RuntimeName
from shardwright.io import BadInput
from shardwright.io.table import Row, Source, columns_of
from shardwright.key import ExpertKey, HostKey, LayerKey, rows_by_key
from shardwright.types import Attention, Cluster, DType, Model, NodeType, Precision, profiled_as
from shardwright.types.hardware_profile import HardwareProfile, read_hardware_profile
from shardwright.types.model_profile import (
    ContextRow,
    ExchangeRow,
    ExpertRow,
    FitRow,
    LayerFigures,
    LayerRow,
    ModelProfile,
    ProfileOrigin,
    Quantity,
    StateRow,
    read_model_profile,
)
from shardwright_search.cost_model.expert_load import Load

Sources = frozenset[tuple[str, str]]
"""The source of each number of a profile, by name: measured, derived, assumed, analytic or absent."""


Passes = tuple[float, float]
"""Seconds of a forward and of a backward pass."""


class LayerPoints(NamedTuple):
    """Measured points of one curve, by ascending micro_batch_size, or by the rows of experts [points]."""

    micro_batch_sizes: NDArray[Any]
    values: NDArray[Any]
    """The `LayerFigures` of each point [points, figures]."""
    sources: Sources
    """The sources of these figures, over all points."""
    errors: NDArray[Any]
    """Standard errors of the two times, as shares of them [points, 2]; 0 if unknown."""


MADE_FROM = "Made from "
"""Beginning of the notes of an imported profile, which name its files."""


class Profiles(NamedTuple):
    """A hardware and a model profile of one device, the names of their files, and the profiles of other devices."""

    hardware: HardwareProfile
    hardware_file: Path
    origin: ProfileOrigin
    model_file: Path
    layers: Mapping[LayerKey, LayerPoints]
    """The points of each curve, by keys without micro_batch_size."""
    states: Mapping[LayerKey, StateRow]
    """The costs of parameters, by keys of type and tp_size."""
    fits: Mapping[LayerKey, Sequence[FitRow]]
    """The fitted curves, by keys without micro_batch_size and sequence_length."""
    process_bytes: int
    communicator_bytes: int
    """Bytes of each communicator that is not a pipeline edge."""
    step_overhead_s: float
    sources: Sources
    """The sources of the three numbers above."""
    reference_s: float
    """The time of the reference workload on the machine as it was profiled; 0 if none was run."""
    notes: str
    """The notes of the model profile, one sentence per line."""
    memory_factor: float = 1.0
    """The factor of a rank's memory: what the runtime's allocator reserves, and what measured plans taught."""
    held: Held = OURS
    """How the memory that the runtime holds differs from this project's runtime."""
    gathers_alone: bool = False
    """Whether the runtime gathers ZeRO-2's parameters without overlap with computation."""
    in_mxfp8: bool = False
    """Whether FP8 matrix products scale blocks of 32, so that a matrix is rounded separately for each of two orders."""
    others: tuple["Profiles", ...] = ()
    """The profiles of the other devices of a mixed cluster."""
    rests: Mapping[LayerKey, LayerPoints] = MappingProxyType({})
    """The points of layers without their experts, for expert parallelism, by the keys of `layers`."""
    rest_fits: Mapping[LayerKey, Sequence[FitRow]] = MappingProxyType({})
    """The curves through them, by the keys of `fits`."""
    experts: Mapping[ExpertKey, LayerPoints] = MappingProxyType({})
    """The points of experts, by keys without rows."""
    context: tuple[ContextRow, ...] = ()
    """Ratios of measured to derived times of layers whose positions are split over ranks."""
    exchange: ExchangeRow | None = None
    """How rows are exchanged between experts; None: all-to-all without overlap."""
    host: Mapping[HostKey, Passes] = MappingProxyType({})
    """The least times of passes, by what the host starts for them."""
    load: Load | None = None
    """The load of experts; None: all experts of a layer get the same number of positions."""

    @property
    def is_imported(self) -> bool:
        """Return whether the model profile was made from others' measurements, which cannot be repeated."""
        return self.notes.startswith(MADE_FROM)

    @property
    def beside_experts(self) -> "Profiles":
        """Return the profiles of layers without their experts."""
        return self._replace(layers=self.rests, fits=self.rest_fits, context=())

    @property
    def per_device(self) -> tuple["Profiles", ...]:
        """Return a tuple with the profiles of each device by itself."""
        return self._replace(others=()), *self.others

    def each(self, change: Callable[["Profiles"], "Profiles"]) -> "Profiles":
        """Return these profiles with `change` applied to each device's profiles."""
        return together([change(profiles) for profiles in self.per_device])

    def of_device(self, device: str) -> "Profiles":
        """Return the profiles of one device; StopIteration if there are none."""
        return next(profiles for profiles in self.per_device if profiles.origin.device == device)

    def used(self, cluster: Cluster) -> tuple["Profiles", ...]:
        """Return the profiles of each device that a cluster has."""
        return tuple(profiles for profiles in self.per_device if profiles.origin.device in devices_of(cluster))

    def of_any_length(self, key: LayerKey) -> dict[LayerKey, LayerPoints]:
        """Return the points whose keys differ from a key only in sequence_length."""
        alike = key.without("sequence_length")
        return {other: points for other, points in self.layers.items() if other.without("sequence_length") == alike}


def host_rate(node_type: NodeType, profiles: Profiles, name: str) -> float | None:
    """Return a rate of a node type's host as the cluster gives it, else as it was measured."""
    given: float | UnsetType = getattr(node_type, name)
    return profiles.hardware.host_rate(name) if given is UNSET else given


def together(per_device: Sequence[Profiles]) -> Profiles:
    """Return the profiles of several devices as one, for a mixed cluster; BadInput if two have the same device."""
    _check_distinct([(profiles.origin.device, profiles.model_file) for profiles in per_device])
    first, *others = per_device
    return first._replace(others=tuple(others))


def _check_distinct(devices: Iterable[tuple[str, Path]]) -> None:
    """Raise BadInput if two files belong to the same device."""
    known: dict[str, Path] = {}
    for device, file in devices:
        if device in known:
            problem = f"profiled on {device!r}, as {known[device]} was"
            raise BadInput(file, problem, "give one profile for each device")
        known[device] = file


def devices_of(cluster: Cluster) -> tuple[str, ...]:
    """Return the devices of a cluster's nodes, in the order of their names."""
    return tuple(sorted({cluster.node_types[group.node_type].device for group in cluster.nodes}))


def read_profiles(hardware_files: Sequence[Path], model_files: Sequence[Path]) -> Profiles:
    """Read and index the profiles: hardware profiles of the cluster or each device, model profiles of each device.

    Raises BadInput if two profiles of a kind belong to the same device.
    """
    hardware = [(read_hardware_profile(file), file) for file in hardware_files]
    _check_distinct((profile.device, file) for profile, file in hardware)
    models = [(read_model_profile(file), file) for file in model_files]
    return together([index_profiles(*_hardware_of(one.origin.device, hardware), one, file) for one, file in models])


def _hardware_of(device: str, hardware: Sequence[tuple[HardwareProfile, Path]]) -> tuple[HardwareProfile, Path]:
    """Return the profile of only this device, else of a cluster with it, else any, which `check_profiles` refuses."""
    return min(hardware, key=lambda one: (one[0].device != device, device not in _devices(one[0])))


def _devices(hardware: HardwareProfile) -> tuple[str, ...]:
    """Return the devices of the cluster that was profiled."""
    return tuple(hardware.device.split(" + "))


def index_profiles(
    hardware: HardwareProfile, hardware_file: Path, model_profile: ModelProfile, model_file: Path
) -> Profiles:
    """Return the profiles with their tables indexed by key."""
    (process,) = model_profile.process.rows
    runtime = _runtime_of(model_profile.origin.runtime, model_file)
    held = runtime.held
    counted = ("process_bytes", "step_overhead_s", *(("communicator_bytes",) if process.communicator_bytes else ()))
    return Profiles(
        hardware=hardware,
        hardware_file=hardware_file,
        origin=model_profile.origin,
        model_file=model_file,
        layers=_layer_points(model_profile.curves),
        rests=_layer_points(model_profile.rest_curves),
        rest_fits=rows_by_key(fits_table(model_profile.rests.rows).rows, "micro_batch_size", "sequence_length"),
        experts={key: _points(rows, [row.rows for row in rows]) for key, rows in model_profile.expert_curves.items()},
        context=model_profile.context.rows,
        exchange=next(iter(model_profile.exchange.rows), None),
        host={row.key: (row.forward_s, row.backward_s) for row in model_profile.host.rows},
        states={row.key: row for row in model_profile.states.rows},
        fits=rows_by_key(model_profile.fits.rows, "micro_batch_size", "sequence_length"),
        process_bytes=process.process_bytes,
        communicator_bytes=process.communicator_bytes,
        step_overhead_s=process.step_overhead_s,
        sources=sources_of(process, *counted),
        reference_s=process.reference_s,
        notes=model_profile.provenance.notes,
        memory_factor=held.reserved,
        held=held,
        gathers_alone=runtime.gathers_alone,
        in_mxfp8=(device := shipped_devices().get(model_profile.origin.device)) is not None and device.mxfp8,
    )


def _runtime_of(runtime: str, file: Path) -> Runtime:
    if runtime not in RUNTIMES:
        raise BadInput(file, f"is of runtime {runtime!r}, which is not known", f"make one of {', '.join(RUNTIMES)}")
    return RUNTIMES[RuntimeName(runtime)]


def sources_of(row: Row, *names: str) -> Sources:
    """Return the sources of these numbers of a row."""
    columns = columns_of(type(row))
    return frozenset((name, str(getattr(row, columns[name].source))) for name in names)


def check_profiles(
    profiles: Profiles, model: Model, cluster: Cluster, precision: Precision, attention: Attention, compile: bool
) -> None:
    """Raise BadInput if a profile was made for another model, device, precision or kernels, or one is missing."""
    if profiles.load is not None:
        profiles.load.check(model)
    for one in profiles.per_device:
        _check_origin(one, model, precision, attention, compile)
    for device in devices_of(cluster):
        one = next((one for one in profiles.per_device if one.origin.device == device), profiles)
        for file, profiled in ((one.model_file, (one.origin.device,)), (one.hardware_file, _devices(one.hardware))):
            if device not in profiled:
                problem = f"profiled on {' + '.join(profiled)!r}, cluster {cluster.name!r} has {device!r}"
                raise BadInput(file, problem, "profile that device" if not profiles.others else "add its profile")


def _check_origin(profiles: Profiles, model: Model, precision: Precision, attention: Attention, compile: bool) -> None:
    """Raise BadInput if a profile was made for another model, precision or kernels."""
    origin = profiles.origin
    if origin.architecture_sha256 != model.architecture_sha256:
        problem = f"profiled layers of {origin.model!r} that are not those of model {model.name!r}"
        raise BadInput(profiles.model_file, problem, "profile this model")
    wanted = profiled_as(precision, compile)
    if origin.precision != wanted and origin.precision not in _timed_alike(profiles, precision, compile):
        raise BadInput(profiles.model_file, f"profiled in {origin.precision}, not {wanted}", "profile that precision")
    if attention is not Attention.AUTO and origin.attention not in (attention, Attention.AUTO):
        problem = f"profiled with attention {origin.attention}, not {attention}"
        raise BadInput(profiles.model_file, problem, "profile that kernel")


def _timed_alike(profiles: Profiles, precision: Precision, compile: bool) -> Iterator[str]:
    """Yield precisions that differ only in the format of reduced gradients, if the profile has no times of reductions.

    Imported profiles have none: passes do not depend on that format, and messages are priced by the hardware profile.
    """
    if all(row.reduction_source is Source.ABSENT for row in profiles.states.values()):
        for reduce in get_args(DType):
            yield profiled_as(msgspec.structs.replace(precision, reduce=reduce), compile)


def _layer_points(curves: Mapping[LayerKey, Sequence[LayerRow]]) -> dict[LayerKey, LayerPoints]:
    return {key: _points(rows, [row.micro_batch_size for row in rows]) for key, rows in curves.items()}


def _points(rows: Sequence[LayerRow] | Sequence[ExpertRow], sizes: Sequence[int]) -> LayerPoints:
    """Return the points of one curve, whose sizes ascend."""
    points = [row.figures for row in rows]
    values = np.array([[figure.value for figure in figures] for figures in points], float)
    times, errors = values[:, :2], np.array([(f.forward_s.error, f.backward_s.error) for f in points])
    return LayerPoints(
        micro_batch_sizes=np.array(sizes),
        values=values,
        sources=frozenset().union(*(sources_of(row, *LayerFigures._fields) for row in rows)),
        errors=np.divide(errors, times, out=np.zeros_like(errors), where=times > 0),  # absent times are 0
    )


class Scaling(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The factors that kinds of numbers are multiplied by."""

    forward: float = 1.0
    backward: float = 1.0
    reduction: float = 1.0
    """The factor of the time that reducing gradients was measured to add."""
    optimizer: float = 1.0
    step_overhead: float = 1.0
    memory: float = 1.0
    """Correction factor of a rank's memory."""
    collectives: ArrayLike = 1.0
    """The factors of the points of the hardware profile [points], or one for all."""


def scaled(profiles: Profiles, by: Scaling) -> Profiles:
    """Return the profiles with every number multiplied by the factor of its kind."""
    repeats = profiles.hardware.repeats
    by_point = np.broadcast_to(by.collectives, len(profiles.hardware.points))
    repeats = repeats.replace(time_s=repeats["time_s"] * by_point[repeats["point"]])
    return profiles._replace(
        hardware=replace(profiles.hardware, repeats=repeats),
        layers={key: _scaled_points(points, by) for key, points in profiles.layers.items()},
        rests={key: _scaled_points(points, by) for key, points in profiles.rests.items()},
        experts={key: _scaled_points(points, by) for key, points in profiles.experts.items()},
        host={key: (there * by.forward, back * by.backward) for key, (there, back) in profiles.host.items()},
        fits={key: tuple(_scaled_curve(curve, by) for curve in curves) for key, curves in profiles.fits.items()},
        states={key: _scaled_states(states, by) for key, states in profiles.states.items()},
        step_overhead_s=profiles.step_overhead_s * by.step_overhead,
        memory_factor=profiles.memory_factor * by.memory,
    )


def _scaled_points(points: LayerPoints, by: Scaling) -> LayerPoints:
    """Return the points with their times multiplied."""
    values = points.values.copy()
    values[:, :2] *= by.forward, by.backward
    return points._replace(values=values)


def _scaled_states(states: StateRow, by: Scaling) -> StateRow:
    """Return the times of parameters, multiplied by factors."""
    reductions = {name: getattr(states, name) * by.reduction for name in ("reduction_s", "scatter_s")}
    return msgspec.structs.replace(states, optimizer_s=states.optimizer_s * by.optimizer, **reductions)


def _scaled_curve(curve: FitRow, by: Scaling) -> FitRow:
    """Return a curve of times multiplied by a factor; curves of bytes are unchanged."""
    times = (Quantity.FORWARD_S, Quantity.BACKWARD_S)
    if curve.quantity not in times:
        return curve
    factor = (by.forward, by.backward)[times.index(curve.quantity)]
    terms = {name: getattr(curve, name) * factor for name in ("constant", "linear", "quadratic")}
    return msgspec.structs.replace(curve, **terms)
