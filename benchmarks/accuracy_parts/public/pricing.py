"""Published runs priced: time and memory by this project's analytic profiles and cost model, in one process."""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from accuracy_parts.public.runs import Machine, Run
from msgspec import UNSET
from msgspec.structs import replace

from shardwright.devices.table import DeviceTable, read_devices
from shardwright.estimate.hardware import NETWORK_STEP_S, NodeRates
from shardwright.estimate.machines import Efficiencies, Rates, rates_of
from shardwright.estimate.profile import hardware_profile, model_profile
from shardwright.estimate.runtimes import RUNTIMES as KNOWN
from shardwright.estimate.runtimes import SHARDWRIGHT, Runtime, RuntimeName
from shardwright.estimate.settings import ProfileSettings
from shardwright.io import BadInput
from shardwright.models.description import model_of_config
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.model import Model
from shardwright.types.plan import PipelineStage, Plan, Precision, Schedule
from shardwright.types.prediction import Estimate
from shardwright.types.strategy import ContextParallel, DataParallel, ExpertStrategy, LayerStrategy, Recompute
from shardwright_search.cost_model.plan import cost_model_of, evaluate, kept_bytes
from shardwright_search.cost_model.profiles import Profiles, Scaling, index_profiles, scaled
from shardwright_search.options import System, UniformRequest
from shardwright_search.systems.registry import SYSTEMS
from shardwright_search.uniform_plan import uniform_plan

_NOWHERE = Path("published")
_COMMUNICATORS = 3
"""Communicators of a rank in another runtime: data parallelism or all ranks, tensor parallelism, the pipeline."""


class Factors(NamedTuple):
    """Factors from an analytic profile to a measured one: of forward and backward times, and of memory."""

    time: float = 1.0
    memory: float = 1.0


class Priced(NamedTuple):
    """A run and its prediction."""

    run: Run
    time_s: float
    memory_bytes: int
    """Predicted memory of the fullest rank."""
    read_bytes: int
    """Predicted memory of the rank whose memory was measured."""
    limit_bytes: int
    """Memory of one device."""

    @property
    def time_error(self) -> float:
        """Return the signed relative error of the time."""
        assert self.run.measured_s
        return self.time_s / self.run.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Return the signed relative error of the memory."""
        assert self.run.measured_bytes
        return self.read_bytes / self.run.measured_bytes - 1


class Unpriced(NamedTuple):
    """A run that no plan of this project can express or that it cannot price."""

    run: Run
    reason: str


def priced(runs: Sequence[Run], factors: Factors) -> Iterator[Priced | Unpriced]:
    """Yield the prediction of every run; runs of one model and machine follow one another."""
    table = read_devices()
    for _, own in groupby(sorted(runs, key=_setting), key=_setting):
        yield from _of_one_setting(list(own), table, factors)


def _setting(run: Run) -> tuple[str, ...]:
    own = (
        run.uncounted,
        run.runtime,
        run.compiled,
        run.launch_us,
        run.compute,
        run.reduce,
        run.modules,
        run.habits,
        run.habits_left_out,
    )
    return tuple(map(repr, (run.config, run.sequence_length, run.machine, *own)))


def _of_one_setting(runs: Sequence[Run], table: DeviceTable, factors: Factors) -> Iterator[Priced | Unpriced]:
    first = runs[0]
    model = model_of_config(dict(first.config), "published", first.sequence_length, first.name)
    machine = first.machine
    rates = rates_of(table, machine.device, memory_bytes_per_s=_bytes_per_s(machine.memory_gbyte_s))
    shares = sorted({first.sequence_length // run.cp_size for run in runs} - {first.sequence_length})
    settings = ProfileSettings(
        tp_sizes=tuple(sorted({run.tp_size for run in runs})),
        sequence_parallel=tuple(sorted({run.sequence_parallel for run in runs})),
        recompute=tuple(sorted({Recompute.NONE, *(run.recompute for run in runs)})),
        micro_batch_sizes=tuple(sorted({run.micro_batch_size for run in runs} | ({1, 2} if shares else set()))),
        precision=_precision(first),
        compile=first.compiled,
    )
    runtime = _assumed(first)
    shorter = (model_of_config(dict(first.config), "published", length, first.name) for length in shares)
    models = [(_NOWHERE, each) for each in (model, *shorter)]
    made = model_profile(models, settings, rates, Efficiencies(), table.revised, runtime=runtime).profile
    limit = machine.memory_bytes or rates.device.memory_bytes or 0
    for devices, own in groupby(sorted(runs, key=lambda run: run.devices), key=lambda run: run.devices):
        cluster = _cluster(machine, rates, devices, limit)
        hardware = hardware_profile(
            cluster, [rates], Efficiencies(), _between(machine), table.revised, overlap=runtime.overlap
        )
        profiles = index_profiles(hardware, _NOWHERE, made, _NOWHERE)
        profiles = profiles._replace(
            held=runtime.held,
            memory_factor=runtime.held.reserved,
            gathers_alone=runtime.gathers_alone,
        )
        by = Scaling(forward=factors.time, backward=factors.time, memory=factors.memory)
        yield from _of_one_cluster(list(own), model, cluster, scaled(profiles, by), limit)


def _assumed(run: Run) -> Runtime:
    """Return the runtime that is assumed for a run."""
    known, plain = runtime_of(run), {name: getattr(SHARDWRIGHT, name) for name in run.habits_left_out}
    held = replace(known.held, recomputed=run.modules)
    return replace(known, **{"operator_s": run.launch_us / 1e6, "held": held, **dict(run.habits), **plain})


def _of_one_cluster(
    runs: Sequence[Run], model: Model, cluster: Cluster, profiles: Profiles, limit: int
) -> Iterator[Priced | Unpriced]:
    costs = None
    for run in runs:
        try:
            plan = _plan(run, model, cluster)
            costs = costs or cost_model_of(plan, profiles)
            found = evaluate(plan, profiles, costs, timeline=False).estimate
            step_s = found.simulated_step_time_s
        except BadInput as problem:
            yield Unpriced(run, str(problem))
            continue
        held = _held_bytes(plan, found, run, profiles, limit)
        yield Priced(run, step_s, max(held), held[0] if run.read_on_first else max(held), limit)


def _held_bytes(plan: Plan, found: Estimate, run: Run, profiles: Profiles, limit: int) -> list[int]:
    """Return the bytes that a rank of each stage holds, including the process if the measured memory includes it."""
    process = profiles.process_bytes + _COMMUNICATORS * profiles.communicator_bytes
    needed = [
        stage.memory_bytes - stage.memory_terms_bytes["process"] - stage.memory_terms_bytes.get("communicators", 0)
        for stage in found.stages
    ]
    kept = kept_bytes(plan, needed, [limit] * len(needed), profiles)
    return [sum(pair) + round(run.machine.counts_process * process) for pair in zip(needed, kept, strict=True)]


def _precision(run: Run) -> Precision:
    return Precision(compute=run.compute, reduce=run.reduce)


def _plan(run: Run, model: Model, cluster: Cluster) -> Plan:
    request = UniformRequest(
        global_batch_size=run.global_batch_size,
        num_microbatches=run.num_microbatches,
        tp_size=run.tp_size,
        cp_size=run.cp_size,
        context=ContextParallel.RING if run.cp_size > 1 else ContextParallel.GATHER,
        pp_size=run.pp_size,
        data_parallel=run.data_parallel,
        sequence_parallel=run.sequence_parallel,
        recompute=run.recompute,
        gradient_reduction=run.gradient_reduction,
        schedule=Schedule.ONE_F_ONE_B if run.chunks == 1 else Schedule.INTERLEAVED_1F1B,
        layer_ranges=run.chunks,
        precision_compute=run.compute,
        precision_reduce=run.reduce,
        compile=run.compiled,
    )
    plan = uniform_plan("published", request, model, cluster)
    stages = plan.stages
    if run.cuts is not None and run.pp_size > 1:
        ranges = list(pairwise(run.cuts))
        stages = tuple(
            PipelineStage(ranks=stage.ranks, layers=tuple(ranges[i :: run.pp_size])) for i, stage in enumerate(stages)
        )
    try:
        layers = tuple(_with_experts(layer, run, model) for layer in plan.layers)
        return replace(plan, stages=stages, layers=layers)
    except ValueError as problem:
        raise BadInput(run.name, str(problem), "leave it out") from None


def _with_experts(layer: LayerStrategy, run: Run, model: Model) -> LayerStrategy:
    """Return the strategy of a layer; if it has experts, they are sharded as in the run."""
    grid = run.ep_size, run.etp_size
    if model.types[layer.type].experts is UNSET or grid == (1, run.tp_size):
        return layer
    width = layer.tp_size * layer.dp_size * layer.cp_size
    kind = run.data_parallel if width > run.ep_size * run.etp_size else DataParallel.DDP
    return replace(layer, experts=ExpertStrategy(ep_size=run.ep_size, etp_size=run.etp_size, data_parallel=kind))


def _cluster(machine: Machine, rates: Rates, devices: int, memory_bytes: int) -> Cluster:
    per_node, joined = min(machine.devices_per_node, devices), rates.device.domain_devices or UNSET
    node = NodeType(device=rates.name, devices_per_node=per_node, memory_bytes=memory_bytes, domain_devices=joined)
    group = NodeGroup(node_type=machine.device, count=devices // per_node)
    return Cluster(name="published", nodes=(group,), node_types={machine.device: node})


def _between(machine: Machine) -> NodeRates | None:
    """Return the rates between nodes; rates from measurements are already reached ones and are not reduced further."""
    step_s = NETWORK_STEP_S if machine.step_us is None else machine.step_us / 1e6
    rates = NodeRates(machine.node_gbit_s, machine.gbit_s_by_collective, step_s).scaled(1e9 / 8)
    return rates.scaled(1 / Efficiencies().link) if machine.measured else rates


def _bytes_per_s(gbyte_s: float | None) -> float | None:
    return None if gbyte_s is None else gbyte_s * 1e9


# The runtimes of published runs: of the systems to which plans are exported, and of others.


RUNTIMES = {
    "megatron_core": SYSTEMS[System.MEGATRON].runtime,
    "torchtitan": SYSTEMS[System.TORCHTITAN].runtime,
    "nanotron": KNOWN[RuntimeName.NANOTRON],
    "megatron_deepspeed": KNOWN[RuntimeName.MEGATRON_DEEPSPEED],
    "llm_foundry": KNOWN[RuntimeName.LLM_FOUNDRY],
}


def runtime_of(run: Run) -> Runtime:
    """Return the runtime of a run; the fields in `uncounted` have this project's values."""
    return replace(RUNTIMES[run.runtime], **{name: getattr(SHARDWRIGHT, name) for name in run.uncounted})
