"""From the options of `shardwright-profile analytic` to its files."""

import sys
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.json import read_document
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.hardware_profile import HardwareProfile, write_hardware_profile
from shardwright_formats.types.model import Model
from shardwright_formats.types.model_profile import ModelProfile, write_model_profile
from shardwright_profile.analytic.devices import DeviceTable, read_devices
from shardwright_profile.analytic.profile import hardware_profile, model_profile
from shardwright_profile.analytic.rates import Efficiencies, Rates, rates_of
from shardwright_profile.model.settings import ProfileSettings

__all__ = ["AnalyticRequest", "write_analytic"]

_TERA, _GIGA = 1e12, 1e9


class AnalyticRequest(NamedTuple):
    """The options, as given."""

    models: tuple[Path, ...]
    settings: Path | None
    out: Path | None
    device: str | None
    cluster: Path | None
    node_type: str | None
    hardware_out: Path | None
    inter_node_gbit_s: float | None
    efficiencies: Efficiencies
    matrix_tflop_s: float | None
    memory_gbyte_s: float | None
    link_gbyte_s: float | None
    devices: Path | None


def write_analytic(request: AnalyticRequest) -> None:
    """Write the profiles that were asked for, after all of them could be made; BadInput says why one cannot."""
    if request.out is None and request.hardware_out is None:
        raise BadInput("--out", "no profile is asked for", "give --out, --hardware-out or both")
    table = read_devices(request.devices)
    cluster = None if request.cluster is None else read_document(request.cluster, Cluster)
    layers = None if request.out is None else _model_profile(request, table, cluster)
    hardware = None if request.hardware_out is None else _hardware_profile(request, table, cluster)
    if request.out is not None and layers is not None:
        write_model_profile(request.out, layers)
        _tell(request.out, layers.provenance.notes)
    if request.hardware_out is not None and hardware is not None:
        write_hardware_profile(request.hardware_out, hardware)
        _tell(request.hardware_out, hardware.provenance.notes)


def _model_profile(request: AnalyticRequest, table: DeviceTable, cluster: Cluster | None) -> ModelProfile:
    if not request.models or request.settings is None:
        raise BadInput("--out", "a model profile needs --model and --settings", "give both, or --hardware-out alone")
    models = [(path, read_document(path, Model)) for path in request.models]
    settings = read_document(request.settings, ProfileSettings)
    rates = _rates(request, table, _device(request, cluster))
    made = model_profile(models, settings, rates, request.efficiencies, table.revised)
    for sentence in made.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    return made.profile


def _hardware_profile(request: AnalyticRequest, table: DeviceTable, cluster: Cluster | None) -> HardwareProfile:
    if cluster is None:
        raise BadInput("--hardware-out", "a hardware profile needs --cluster", "give it")
    names = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    across = None if request.inter_node_gbit_s is None else request.inter_node_gbit_s * _GIGA / 8
    rates = [_rates(request, table, name) for name in names]
    return hardware_profile(cluster, rates, request.efficiencies, across, table.revised)


def _device(request: AnalyticRequest, cluster: Cluster | None) -> str:
    """The device by its own option, else that of the cluster's node type, of which there may be one only."""
    if request.device is not None:
        return request.device
    if cluster is None:
        raise BadInput("--device", "no device is given", "give --device, or --cluster with --node-type")
    if request.node_type is not None:
        if request.node_type not in cluster.node_types:
            known = ", ".join(sorted(cluster.node_types))
            raise BadInput(
                "--node-type", f"{request.node_type!r} is none of the cluster's node types", f"choose from {known}"
            )
        return cluster.node_types[request.node_type].device
    names = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    if len(names) > 1:
        raise BadInput("--cluster", f"its nodes have devices {', '.join(names)}", "give --node-type or --device")
    return names[0]


def _rates(request: AnalyticRequest, table: DeviceTable, name: str) -> Rates:
    def scaled(value: float | None, unit: float) -> float | None:
        return None if value is None else value * unit

    return rates_of(
        table,
        name,
        scaled(request.matrix_tflop_s, _TERA),
        scaled(request.memory_gbyte_s, _GIGA),
        scaled(request.link_gbyte_s, _GIGA),
    )


def _tell(path: Path, notes: str) -> None:
    print(f"{path}: {notes.splitlines()[0]}", file=sys.stderr)
