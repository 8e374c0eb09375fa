"""Predicted time and memory of any plan, from the same cost functions that the search uses."""

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import ceil
from typing import NamedTuple

from msgspec import UNSET

from shardwright.optimizers.registry import OPTIMIZERS
from shardwright.plan.offload import check_offload
from shardwright.plan.process_groups import communicator_bytes, communicators
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.schedule import step_time
from shardwright.plan.supported_fields import check_fields
from shardwright.types import EMBEDDING, HEAD, Estimate, Plan, StagePrediction, TimelineEvent
from shardwright_search.cost_model.layer import CostModel, picoseconds
from shardwright_search.cost_model.profiles import Profiles, check_profiles
from shardwright_search.cost_model.provenance import provenance_warnings
from shardwright_search.cost_model.stage_costs import StageCosts, range_costs, stage_costs
from shardwright_search.cost_model.tied_weights import shared_cost_ps, tied_cost_ps
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
    """Return the time of a step whatever its strategies: the step's overhead, and parameters that layers share."""
    return picoseconds(costs.step_overhead_s) + shared_cost_ps(costs, stages)


def simulated_step_ps(plan: Plan, costs: CostModel) -> int:
    """Return only a plan's simulated step time, including the fixed overhead of a step."""
    times = [costs_of_range.times for costs_of_range in range_costs(plan, costs)]
    simulated_ps = step_time_ps(times, plan.schedule, plan.num_microbatches, len(plan.stages[0].layers))
    return simulated_ps + _always_ps(plan, costs)


def _always_ps(plan: Plan, costs: CostModel) -> int:
    """Return the time of a step whatever its schedule."""
    ranks = [stage.ranks for stage in plan.stages]
    ends = (ranks[plan.stage_of(name)] for name in (EMBEDDING, HEAD))
    return offset_ps(costs, ranks) + tied_cost_ps(costs, plan.embedding, plan.head, *ends)


def evaluate(plan: Plan, profiles: Profiles, costs: CostModel | None = None, timeline: bool = True) -> Evaluation:
    """Return the predicted time and memory of a plan; `costs` is its cost model, if it exists already.

    Without `timeline` there are no events, and very many microbatches are not all played.

    Raises BadInput for a field that has no price, and when a profile is of another model, device or precision, or lacks
    a point.
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
    """Yield what is assumed of copies between devices and hosts, and whose rates they are."""

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
    """Return the terms of a stage; `profiles`: of each of its node types; `held`: bytes of communicators.

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
    # At the peak some gradients may not be there yet, and some activations no longer.
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
