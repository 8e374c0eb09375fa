"""Predicted time and memory of any plan, from the same cost functions that the search uses."""

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import repeat
from math import ceil
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET

from shardwright.estimate.notes import SPARE_SHARE
from shardwright.key import LayerKey
from shardwright.models.context import plan_obstacle
from shardwright.optimizers.registry import ADAMW, OPTIMIZERS
from shardwright.plan.axes import axes_of, layout_of
from shardwright.plan.communication import shares_experts
from shardwright.plan.differences import MAX_RELATIVE_ERROR
from shardwright.plan.offload import check_offload
from shardwright.plan.process_groups import communicator_bytes, communicators
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.schedule import step_time
from shardwright.plan.supported_fields import check_fields
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, Estimate, Plan, StagePrediction, TimelineEvent
from shardwright.types.hardware_profile import Collective
from shardwright.types.strategy import ContextParallel, LayerStrategy, SequenceParallel, Strategy
from shardwright_search.cost_model.expert_load import StatedLoad
from shardwright_search.cost_model.layer import CostModel, picoseconds
from shardwright_search.cost_model.profiles import LayerPoints, Profiles, Sources, check_profiles, sources_of
from shardwright_search.cost_model.stage_costs import StageCosts, range_costs, shared_cost_ps, stage_costs, tied_cost_ps
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_search.simulation.simulator import Simulation, lower_bound_ps, num_played, simulate, step_time_ps

_PER_SECOND = 1e12


class Evaluation(NamedTuple):
    """An estimate, its closed form as the exact integer that plans are compared by, and warnings."""

    estimate: Estimate
    objective_ps: int
    warnings: tuple[str, ...]
    reference_s: float
    """Time of the reference workload on the machine as profiled; 0 if none was run, or on several machines."""


def cost_model_of(plan: Plan, profiles: Profiles, time_model: TimeModel = TimeModel.INTERPOLATE) -> CostModel:
    """Return the cost model that prices a plan."""
    return CostModel(
        plan.model,
        plan.cluster,
        profiles,
        plan.precision,
        plan.gradient_reduction,
        time_model,
        OPTIMIZERS[plan.optimizer],
        plan.loss_chunks or 1,
    )


def offset_ps(costs: CostModel, stages: Sequence[Sequence[int]]) -> int:
    """Return the time of a step that no strategy changes: the step's overhead, and parameters that layers share."""
    return picoseconds(costs.step_overhead_s) + shared_cost_ps(costs, stages)


def simulated_step_ps(plan: Plan, costs: CostModel) -> int:
    """Return a plan's simulated step time and nothing else; it includes the fixed overhead of a step."""
    times = [costs_of_range.times for costs_of_range in range_costs(plan, costs)]
    simulated_ps = step_time_ps(times, plan.schedule, plan.num_microbatches, len(plan.stages[0].layers))
    return simulated_ps + _always_ps(plan, costs)


def _always_ps(plan: Plan, costs: CostModel) -> int:
    """Return the time of a step that no schedule changes: `offset_ps`, and the cost of tied parameters."""
    ranks = [stage.ranks for stage in plan.stages]
    ends = (ranks[plan.stage_of(name)] for name in (EMBEDDING, HEAD))
    return offset_ps(costs, ranks) + tied_cost_ps(costs, plan.embedding, plan.head, *ends)


def evaluate(plan: Plan, profiles: Profiles, costs: CostModel | None = None, timeline: bool = True) -> Evaluation:
    """Return the predicted time and memory of a plan; `costs`: its cost model, if it already exists.

    Without `timeline` there are no events, and if there are very many microbatches, not all are simulated.

    Raises BadInput for a field that has no price, and if a profile belongs to another model, device or precision, or
    has no point for a layer.
    """
    known = ("optimizer", "precision.base", "loss_chunks", "layers.offload", "expert_placement")
    check_fields(plan, f"plan {plan.name}", "the cost model", known)
    check_offload(plan, f"plan {plan.name}")
    check_profiles(profiles, plan.model, plan.cluster, plan.precision, plan.attention, plan.compile)
    costs = cost_model_of(plan, profiles) if costs is None else costs
    ranges = range_costs(plan, costs)
    stages = [stage_costs(plan, index, ranges) for index in range(len(plan.stages))]
    profiles_of = [[costs.profiles_on(name) for name in costs.node_types_of(stage.ranks)] for stage in plan.stages]
    always_ps = _always_ps(plan, costs)
    times, num_chunks = [each.times for each in ranges], len(plan.stages[0].layers)
    shape = plan.schedule, plan.num_microbatches, num_chunks
    more = plan.num_microbatches - num_played(len(times), len(plan.stages), plan.num_microbatches)
    simulation = simulate(times, *shape) if timeline else Simulation((), step_time_ps(times, *shape))
    objective_ps = always_ps + _closed_form_ps(plan, stages)
    step_s = (simulation.step_ps + always_ps) / _PER_SECOND
    bound_ps = lower_bound_ps(times, plan.num_microbatches, num_chunks, plan.schedule.turns) + always_ps
    splits = plan.schedule.splits
    estimate = Estimate(
        simulated_step_time_s=step_s,
        simulated_lower_bound_s=bound_ps / _PER_SECOND,
        objective_s=objective_ps / _PER_SECOND,
        samples_per_s=plan.global_batch_size / step_s,
        usd_per_step=_usd_per_step(plan, step_s),
        stages=tuple(map(_stage_prediction, stages, profiles_of, _communicators(plan, profiles_of), repeat(splits))),
        timeline=_timeline(simulation),
    )
    priced = {warning for each in ranges for warning in each.warnings}
    priced |= set(_offload_lines(plan))
    if more and not timeline:
        priced.add(f"{more} of {plan.num_microbatches} microbatches were taken to pass as those before; no timeline")
    warnings, used = (*provenance_warnings(plan, profiles), *sorted(priced)), profiles.used(plan.cluster)
    return Evaluation(estimate, objective_ps, warnings, used[0].reference_s if len(used) == 1 else 0.0)


def _offload_lines(plan: Plan) -> Iterator[str]:
    """Yield warnings about what is assumed of copies between devices and hosts, and where their rates come from."""

    def rate(name: str) -> str:
        given = {getattr(kind, name) is not UNSET for kind in plan.cluster.node_types.values()}
        whose = {True: "the cluster's", False: "the measured"}
        return f"{' or '.join(whose[each] for each in sorted(given, reverse=True))} {name}"

    if any(layer.offloads_optimizer and not layer.updates_on_host for layer in plan.layers):
        copied = f"offloaded states are copied at {rate('host_bytes_per_s')}"
        yield f"assumed: {copied}, on GPUs overlapped with their layer's forward pass"
    if any(layer.updates_on_host for layer in plan.layers):
        rates = f"{rate('host_updates_per_s')}, its copies at {rate('host_bytes_per_s')}"
        yield f"assumed: the host updates at {rates}, overlapped with nothing"
    if any(layer.offloads_activations for layer in plan.layers):
        copied = f"offloaded activations are copied at {rate('host_bytes_per_s')}"
        yield f"assumed: {copied}, on GPUs beside their layer's passes"


def _closed_form_ps(plan: Plan, stages: Sequence[StageCosts]) -> int:
    """Return the closed form of a step, without the fixed overhead of a step."""
    microbatch_ps, hidden_ps = [stage.microbatch_ps for stage in stages], [stage.hidden_ps for stage in stages]
    end = max(stage.sum_of("exposed_ps") for stage in stages)
    forms = schedule_of(plan.schedule).closed_forms(plan.num_microbatches, len(plan.stages[0].layers))
    return step_time(forms, sum(microbatch_ps) - sum(hidden_ps), max(microbatch_ps), end, max(hidden_ps))


def _communicators(plan: Plan, profiles_of: Sequence[Sequence[Profiles]]) -> Sequence[int | None]:
    """Return the largest memory of communicators on any rank of each stage; None if they use none."""
    sizes = [max(each.communicator_bytes for each in profiles) for profiles in profiles_of]
    if plan.world_size == 1 or not any(sizes):
        return [None] * len(plan.stages)
    counted, stages = communicators(plan), zip(plan.stages, sizes, strict=True)
    distinct = (({id(counted[rank]): counted[rank] for rank in stage.ranks}.values(), size) for stage, size in stages)
    return [max(communicator_bytes(each, size) for each in of_stage) for of_stage, size in distinct]


def _stage_prediction(
    stage: StageCosts, profiles: Sequence[Profiles], held: int | None, splits: bool
) -> StagePrediction:
    """Return a stage's time and memory with their terms.

    `profiles`: one for each of its node types. `held`: bytes of communicators.

    `splits`: whether backward passes leave something to weight passes.
    """
    weight_ps = sum(each.weight_ps for each in stage.ranges)
    times_ps = {
        "forward": stage.sum_of("forward_ps"),
        "backward": stage.sum_of("backward_ps") - weight_ps,
        **({str(Pass.WEIGHT): weight_ps} if splits else {}),
        "gathers": stage.sum_of("gather_forward_ps") + stage.sum_of("gather_backward_ps"),
        "gradient_sync_every_microbatch": stage.sum_of("sync_every_ps"),
        "redistribution": sum(r.redistribution_forward_ps + r.redistribution_backward_ps for r in stage.ranges),
        "sends": sum(r.send_before_ps + r.send_after_ps for r in stage.ranges),
        "gradient_sync": stage.sum_of("sync_ps"),
        "optimizer": stage.sum_of("optimizer_ps"),
    }
    states = {name: stage.sum_of(f"memory.{name}") for name in ("parameters", "gathered_parameters", "optimizer")}
    # At the peak some gradients may not exist yet, and some activations no longer.
    activations = min(stage.activation_bytes, stage.working_bytes)
    gradients = min(sum(each.gradient_bytes for each in stage.ranges), stage.working_bytes - activations)
    workspace = stage.working_bytes - activations - gradients
    memory_terms = states | {
        "gradients": gradients + stage.sum_of("memory.gradient_buffer"),
        "activations": activations,
        "workspace": workspace,
        "process": max(each.process_bytes for each in profiles),
    }
    if held is not None:
        memory_terms["communicators"] = held
    factor = max(each.memory_factor for each in profiles)
    memory_terms = {name: ceil(resident * factor) for name, resident in memory_terms.items()}
    return StagePrediction(
        time_s=stage.microbatch_ps / _PER_SECOND,
        time_terms_s={name: time_ps / _PER_SECOND for name, time_ps in times_ps.items()},
        memory_bytes=sum(memory_terms.values()),
        memory_terms_bytes=memory_terms,
        host_bytes=stage.host_bytes or UNSET,
    )


def _timeline(simulation: Simulation) -> tuple[TimelineEvent, ...]:
    return tuple(
        TimelineEvent(
            stage=event.stage,
            kind=event.kind,
            microbatch=event.microbatch,
            chunk=event.chunk,
            start_s=event.start_ps / _PER_SECOND,
            end_s=event.end_ps / _PER_SECOND,
        )
        for event in simulation.events
    )


def _usd_per_step(plan: Plan, step_s: float) -> float | None:
    """Return the price of all nodes for one step; None if a node has no price."""
    usd_per_hour = 0.0
    for group in plan.cluster.nodes:
        if (price := plan.cluster.node_types[group.node_type].usd_per_hour) is None:
            return None
        usd_per_hour += price * group.count
    return usd_per_hour * step_s / 3600


# Memory that a rank is observed to use beyond its plan's needs, and that the allocator reclaims when needed.
#
# A search counts what a plan needs. Tensors that messages have used on another stream stay until the host has waited
# for these, or until the allocator has no other place.


_INPUTS = 2
"""Inputs of a block that tensor-parallel ranks gather: of attention and of the feed-forward part."""
_WAITED_FOR = 2
"""Micro-batches of a pipeline whose inputs are free again when the host has waited for their messages.

Fitted to the given runs of the playbook: those with 2, 4 and 8 stages hold none, a half and three quarters.
"""


def kept_bytes(
    plan: Plan, needed_bytes: Sequence[int], device_bytes: Sequence[int], profiles: Profiles
) -> tuple[int, ...]:
    """Return the bytes of gathered inputs that a rank of each stage holds beyond its needs.

    They are kept while there is room in the part of its device that plans may use by default.
    """
    kept = kept_if_it_fits(plan, profiles)
    room = (int((1 - SPARE_SHARE) * most) - needed for needed, most in zip(needed_bytes, device_bytes, strict=True))
    return tuple(max(0, min(pair)) for pair in zip(kept, room, strict=True))


def kept_if_it_fits(plan: Plan, profiles: Profiles) -> tuple[int, ...]:
    """Return the bytes of gathered inputs that a rank of each stage holds until their memory is needed."""
    if not profiles.held.gathered_inputs:
        return (0,) * len(plan.stages)
    schedule, stages = schedule_of(plan.schedule), len(plan.stages)
    share = 1 - _WAITED_FOR / stages if stages > 1 else 1.0
    return tuple(
        ceil(
            schedule.in_flight(stages, plan.num_microbatches, index)
            * share
            * sum(_gathered_bytes(plan, plan.layers[low:high]) for low, high in stage.layers)
        )
        for index, stage in enumerate(plan.stages)
    )


def _gathered_bytes(plan: Plan, layers: Sequence[LayerStrategy]) -> float:
    """Return the bytes of a micro-batch's full inputs of some layers, beyond the rank's own shard."""
    tensor = plan.model.boundary[-1]
    size = ITEMSIZE[plan.precision.compute] * tensor.features * tensor.sequence_length
    gathered = (layer for layer in layers if layer.sequence_parallel is SequenceParallel.MEGATRON)
    return sum(
        _INPUTS * size * axes_of(layer).rank_samples(plan.microbatch_samples) * (1 - 1 / axes_of(layer).region.size)
        for layer in gathered
    )


# Warnings of a prediction about numbers that were not measured: one line for each kind and profile.


_QUOTED = ("analytic", "assumed")
"""Sources for which the profile's notes are repeated."""


def provenance_warnings(plan: Plan, profiles: Profiles) -> tuple[str, ...]:
    """Return lines headed `analytic`, `assumed`, `absent`, `uncertain` or `launch-bound` about a plan's prediction.

    Before them come lines headed `plan_only`, which say why this project's runtime cannot run the plan. Lines headed
    `analytic` and `assumed` repeat what the profile's own notes say of such numbers, such as the error that was seen.
    """
    context = plan_obstacle(plan)
    obstacles = (plan.cluster.obstacle, None if context is None else context.problem)
    unrun = (f"plan_only: {obstacle}" for obstacle in obstacles if obstacle is not None)
    lines = (line for one in profiles.used(plan.cluster) for line in _device_lines(plan, one))
    return (
        *unrun,
        *dict.fromkeys(lines),
        *_optimizer_lines(plan),
        *_load_lines(plan, profiles),
        *_document_lines(plan),
    )


def _optimizer_lines(plan: Plan) -> Iterator[str]:
    """Yield warnings that the step time of an optimizer other than AdamW is assumed, as no profile measured it."""
    if plan.optimizer != ADAMW.name:
        yield f"assumed: the step of {plan.optimizer} takes as long as AdamW's by the bytes that both move"
    if OPTIMIZERS[plan.optimizer].whole_matrices:
        yield (
            f"assumed: the products of {plan.optimizer} are as fast as the layer's forward pass, and no rank of a "
            "stage has more of them than the mean and a largest matrix"
        )


def _document_lines(plan: Plan) -> Iterator[str]:
    """Yield a warning that context parallelism balances whole samples, not separate documents.

    Masked attention in this project's runtime takes equal time on all ranks, about twice the time of causal attention.
    """
    if any(axes_of(layer).shares_context for layer in plan.layers):
        unlike = (
            "where documents keep to themselves, masks skip no pair of positions, and kernels that do leave ranks "
            "unequal work (shardwright train check --reset-attention-mask --data says how unequal)"
        )
        yield f"assumed: samples of one document each: {unlike}"


def _load_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Yield a warning about the load of experts that is assumed: even, a stated ratio, or means of a logged load."""
    grids = (layer.expert_grid for layer in plan.layers)
    if not any(grid and axes_of(grid).dense.experts.size > 1 for grid in grids):
        return
    if profiles.load is None:
        yield "assumed: all experts get as many positions: imbalance takes the load of a run"
    elif isinstance(profiles.load, StatedLoad):
        yield f"assumed: the fullest rank's experts get up to {profiles.load.ratio:g} times the mean rank's positions"
    elif plan.expert_placement:
        yield "assumed: placed experts get their mean shares of the load: peaks of single steps are not known of them"


def _device_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Yield the warnings about the nodes with the device of these profiles."""
    layers, points = _used(plan, profiles), dict(_points(plan, profiles))
    messages = frozenset(("messages", str(point.source)) for point in profiles.hardware.points.rows)
    yield from _lines(layers, profiles.model_file, profiles.notes)
    yield from _lines(messages, profiles.hardware_file, profiles.hardware.provenance.notes)
    yield from _overlap_lines(plan, profiles)
    yield from _uncertain_lines(points, profiles.model_file)
    yield from _launch_lines({key.type for key in points}, profiles)
    for name in sorted({name for name, source in layers | messages if source == "absent"}):
        yield f"absent: {name}: counted as 0"


def _overlap_lines(plan: Plan, profiles: Profiles) -> Iterator[str]:
    """Yield the warnings for slowdowns that were stated, or measured over only one kind of link."""
    overlap, notes = profiles.hardware.overlap, profiles.hardware.provenance.notes
    sources = frozenset(("overlap", str(row.source)) for row in overlap.rows)
    yield from _lines(sources, profiles.hardware_file, notes)
    if not sources and any(
        layout_of(strategy).samples.size > 1 for _, strategy in _layers_on(plan, profiles.origin.device)
    ):
        effect = "collectives of data parallelism are counted as if nothing were computed beside them"
        yield f"absent: overlap of {profiles.hardware_file.name}: {effect}"
    known = set((overlap["ranks_per_node"] < overlap["group_size"]).tolist())
    if len(known) == 1 and len(set(plan.cluster.domain_of_rank)) > 1:
        there, here = ("across nodes", "inside a node") if known == {True} else ("inside a node", "across nodes")
        yield f"assumed: slowdowns of overlapped messages {here} of {profiles.hardware_file.name}: those {there}"
    if has_ring(plan) and not (overlap["collective"] == Collective.P2P.encode()).any():
        assumed = "slow computation as other collectives do" if sources else "overlap with nothing"
        yield f"assumed: sends of a ring {assumed}: {profiles.hardware_file.name} has no overlap of sends"


def has_ring(plan: Plan) -> bool:
    """Return whether some layer passes keys and values around a ring of ranks."""
    return any(axes_of(layer).shares_context and layer.context is ContextParallel.RING for layer in plan.layers)


def _used(plan: Plan, profiles: Profiles) -> Sources:
    """Return the numbers of the model profile that price the plan, with their sources."""
    sources = set(profiles.sources).union(*(points.sources for _, points in _points(plan, profiles)))
    for name, strategy in dict.fromkeys(_layers_on(plan, profiles.origin.device)):
        # A reduction that was not measured is counted by its messages.
        tp_size = _profiled(profiles, name, axes_of(strategy).dense.tensor.size)
        sources |= sources_of(profiles.states[LayerKey(type=name, tp_size=tp_size)], "optimizer_s")
    return frozenset(sources)


def _points(plan: Plan, profiles: Profiles) -> Iterator[tuple[LayerKey, LayerPoints]]:
    """Yield the curves that price the plan's layers."""
    length = plan.model.sequence_length
    for name, strategy in dict.fromkeys(_layers_on(plan, profiles.origin.device)):
        tp_size = _profiled(profiles, name, strategy.tp_size)
        key = LayerKey.from_strategy(name, strategy, tp_size=tp_size, sequence_length=length)
        points = profiles.beside_experts if shares_experts(strategy) else profiles
        if (exact := points.layers.get(key)) is not None:
            yield key, exact
        else:  # A length that was never profiled is priced by the lengths that were.
            yield from points.of_any_length(key).items()


def _uncertain_lines(points: Mapping[LayerKey, LayerPoints], file: Path) -> Iterator[str]:
    """Yield a warning if the standard error of a block's time is over a fifth."""
    for key, measured in points.items():
        if key.type not in (EMBEDDING, HEAD) and (worst := float(measured.errors.max())) > MAX_RELATIVE_ERROR:
            error = f"{key.without('sequence_length')} of {file.name}: a standard error of {worst:.0%}"
            yield f"uncertain: time of {error}: measure it on a quieter machine or with a larger min_time_s"


def _launch_lines(types: Set[str], profiles: Profiles) -> Iterator[str]:
    """Yield the profile's notes on launch-bound layers that were scaled in proportion."""
    for line in profiles.notes.splitlines():
        if line.startswith(tuple(f"launch-bound: {name} " for name in types)):
            yield f"{line.rstrip('.')}: {profiles.model_file.name}"


def _profiled(profiles: Profiles, type_name: str, degree: int) -> int:
    """Return the degree whose numbers priced a plan: if no node could measure it, the next smaller one."""
    profiled = (key.tp_size for key in profiles.states if key.type == type_name)
    return max(size for size in profiled if size <= degree)


def _layers_on(plan: Plan, device: str) -> Iterator[tuple[str, Strategy]]:
    """Yield the layers of the stages on that device, with embedding and head."""
    cluster, last = plan.cluster, plan.stage_of(HEAD)
    for number, stage in enumerate(plan.stages):
        if all(cluster.of_rank(rank).device != device for rank in stage.ranks):
            continue
        yield from ((EMBEDDING, plan.embedding),) if number == 0 else ()
        yield from ((HEAD, plan.head),) if number == last else ()
        for low, high in stage.layers:
            yield from ((layer.type, layer) for layer in plan.layers[low:high])


def _lines(sources: Sources, file: Path, notes: str) -> Iterator[str]:
    """Yield a line for each kind of numbers that were not measured, with the profile's note on it."""
    for kind in _QUOTED:
        names = sorted(name for name, source in sources if source == kind)
        if names:
            said = next((line for line in notes.splitlines() if line.startswith(kind)), kind)
            note = said.removeprefix(kind).strip(" ,:.")
            yield f"{kind}: {', '.join(names)} of {file.name}" + (f": {note}" if note else "")
