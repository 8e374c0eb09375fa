"""The command `shardwright profile analytic`: estimated profiles, without measuring."""

import sys
from pathlib import Path

from shardwright.devices.table import DeviceTable, read_devices
from shardwright.estimate.hardware import NETWORK_STEP_S, node_rates
from shardwright.estimate.machines import Efficiencies, Rates, rates_of
from shardwright.estimate.notes import Process
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.runtimes import attention_of
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput, read_document
from shardwright.io.hdf5 import write_profile
from shardwright.types import MIB, Cluster, Model
from shardwright.types.hardware_profile import HardwareProfile
from shardwright.types.model_profile import ModelProfile
from shardwright_profile.options import AnalyticOptions

_TERA, _GIGA, _MICRO = 1e12, 1e9, 1e6


def write_analytic(options: AnalyticOptions) -> None:
    """Write the requested profiles after all of them have been made; raise BadInput if one cannot be made."""
    if options.out is None and options.hardware_out is None:
        raise BadInput("--out", "no profile is requested", "give --out, --hardware-out or both")
    table = read_devices(options.devices)
    cluster = None if options.cluster is None else read_document(options.cluster, Cluster)
    profiles: list[tuple[Path, ModelProfile | HardwareProfile]] = []
    if options.out is not None:
        profiles.append((options.out, _model_profile(options, table, cluster)))
    if options.hardware_out is not None:
        profiles.append((options.hardware_out, _hardware_profile(options, table, cluster)))
    for path, profile in profiles:
        write_profile(path, profile)
        print(f"{path}: {profile.provenance.notes.splitlines()[0]}", file=sys.stderr)


def _model_profile(options: AnalyticOptions, table: DeviceTable, cluster: Cluster | None) -> ModelProfile:
    if not options.model or options.settings is None:
        raise BadInput("--out", "a model profile needs --model and --settings", "give both, or only --hardware-out")
    models = [(path, read_document(path, Model)) for path in options.model]
    settings = read_document(options.settings, ProfileSettings)
    if options.attention not in (None, attention_of(options.assumed, settings.attention)[0]):
        problem = f"is {options.attention}, but the settings have attention {settings.attention}"
        raise BadInput("--attention", problem, "leave one of them out")
    rates = _rates(options, table, _device(options, cluster))
    given = options.context_mib, options.communicator_mib, options.allocator_slack_mib
    process = Process(*(None if mib is None else mib * MIB for mib in given))
    efficiencies = _efficiencies(options)
    made = model_profile(
        models,
        settings,
        rates,
        efficiencies,
        table.revised,
        runtime=options.assumed,
        process=process,
    )
    for sentence in made.left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    return made.profile


def _hardware_profile(options: AnalyticOptions, table: DeviceTable, cluster: Cluster | None) -> HardwareProfile:
    if cluster is None:
        raise BadInput("--hardware-out", "a hardware profile needs --cluster", "give it")
    names = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    if options.network_step_us is not None and options.inter_node_gbit_s is None:
        raise BadInput(
            "--network-step-us", "applies to links between nodes, whose rate is not given", "give --inter-node-gbit-s"
        )
    step_s = NETWORK_STEP_S if options.network_step_us is None else options.network_step_us / _MICRO
    between = None if options.inter_node_gbit_s is None else node_rates(options.inter_node_gbit_s, step_s)
    rates = [_rates(options, table, name) for name in names]
    return hardware_profile(
        cluster, rates, _efficiencies(options), between, table.revised, overlap=options.assumed.overlap
    )


def _efficiencies(options: AnalyticOptions) -> Efficiencies:
    return Efficiencies(options.matrix_efficiency, options.memory_efficiency, options.link_efficiency)


def _device(options: AnalyticOptions, cluster: Cluster | None) -> str:
    """Return the device of --device, else of --node-type, else the one that all nodes of the cluster have in common."""
    if options.device is not None:
        return options.device
    if cluster is None:
        raise BadInput("--device", "no device is given", "give --device, or --cluster with --node-type")
    if options.node_type is not None:
        if options.node_type not in cluster.node_types:
            known = ", ".join(sorted(cluster.node_types))
            problem = f"{options.node_type!r} is not one of the cluster's node types"
            raise BadInput("--node-type", problem, f"choose from {known}")
        return cluster.node_types[options.node_type].device
    names = sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})
    if len(names) > 1:
        raise BadInput("--cluster", f"its nodes have devices {', '.join(names)}", "give --node-type or --device")
    return names[0]


def _rates(options: AnalyticOptions, table: DeviceTable, name: str) -> Rates:
    given = (options.matrix_tflop_s, _TERA), (options.memory_gbyte_s, _GIGA), (options.link_gbyte_s, _GIGA)
    return rates_of(table, name, *(None if rate is None else rate * unit for rate, unit in given))
