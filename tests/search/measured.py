"""Measurements that were never made: plans that take what is predicted of each term, times a factor."""

import msgspec

from shardwright.plan.chunks import stage_actions
from shardwright.plan.schedules.passes import Pass
from shardwright.types.measurement import PassTime, PlanMeasurement, RankMeasurement, RankMemory, Segment
from shardwright.types.plan import Plan
from shardwright.types.prediction import Estimate, Term
from shardwright.types.strategy import DataParallel
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.options import UniformRequest
from shardwright_search.uniform_plan import uniform_plan

__all__ = ["FACTORS", "PLAIN", "a_plan", "measured_as", "scaled", "three_plans"]

FACTORS = {
    Term.FORWARD: 1.5,
    Term.BACKWARD: 1.25,
    Term.GRADIENT_SYNC: 2.0,
    Term.STEP_END: 3.0,
    Term.MEMORY: 1.125,
}
PLAIN = dict.fromkeys(Term, 1.0)


def a_plan(world, *, pp=2, tp=1, microbatches=4, data_parallel=DataParallel.DDP) -> Plan:
    model, cluster, _ = world
    request = UniformRequest(
        global_batch_size=16, num_microbatches=microbatches, tp_size=tp, pp_size=pp, data_parallel=data_parallel
    )
    return uniform_plan("plan", request, model, cluster)


def measured_as(plan: Plan, profiles, factors, repeats=3) -> PlanMeasurement:
    """The plan as if it had taken what is predicted of each term, times a factor."""
    estimate = evaluate(plan, profiles).estimate
    ranks = tuple(
        _rank(plan, rank, estimate, profiles.step_overhead_s, factors, repeats) for rank in range(plan.world_size)
    )
    return PlanMeasurement(plan=plan, ranks=ranks)


def _rank(plan, rank, estimate: Estimate, overhead_s, factors, repeats) -> RankMeasurement:
    index = next(i for i, stage in enumerate(plan.stages) if rank in stage.ranks)
    stage = estimate.stages[index]
    terms, several = stage.time_terms_s, plan.num_microbatches > 1
    overlapped_time = (terms["gathers"] + terms["redistribution"]) / 2
    forward = factors[Term.FORWARD] * terms["forward"] + overlapped_time
    backward = factors[Term.BACKWARD] * terms["backward"] + overlapped_time + terms["gradient_sync_every_microbatch"]
    sync = factors[Term.GRADIENT_SYNC] * terms["gradient_sync"]
    end = factors[Term.STEP_END] * (terms["optimizer"] + overhead_s)
    passes = tuple(
        PassTime(
            kind=str(action.kind), microbatch=action.microbatch, chunk=0, wait_s=0.001, start_s=0.0,
            # Half of the reduction is waited for in the last backward pass, half after it.
            time_s=(forward if action.kind is Pass.FORWARD else backward)
            + (sync / 2 if action.kind is Pass.BACKWARD and action.microbatch == plan.num_microbatches - 1 else 0),
        )
        for action in stage_actions(plan, index)
    )  # fmt: skip
    # The later stage waits for the first at the end of the step.
    step = sum(each.wait_s + each.time_s for each in passes) + sync / 2 + end + index
    return RankMeasurement(
        rank=rank, stage=index, step_s=(step,) * repeats, reference_s=(0.5,) * repeats,
        segments=(Segment(name="layers", forward_s=(forward,) * repeats, backward_s=(backward,) * repeats),),
        gradient_reduction_s=(sync,) * repeats if several else (), optimizer_s=(end,) * repeats, passes=passes,
        memory=_memory(round(factors[Term.MEMORY] * stage.memory_bytes)),
    )  # fmt: skip


def _memory(peak_bytes: int) -> RankMemory:
    return RankMemory(
        parameters_bytes=0, gradients_bytes=0, optimizer_bytes=0, peak_bytes=peak_bytes, segments=(), process_bytes=0,
        peak_reserved_bytes=0, device_used_bytes=0, resident_bytes=0,
    )  # fmt: skip


def three_plans(world) -> tuple[Plan, ...]:
    return tuple(
        a_plan(world, data_parallel=kind, microbatches=count)
        for kind, count in ((DataParallel.DDP, 4), (DataParallel.ZERO3, 4), (DataParallel.DDP, 2))
    )


def scaled(measured: PlanMeasurement, step_s: float, peak_bytes: int) -> PlanMeasurement:
    ranks = tuple(
        msgspec.structs.replace(rank, step_s=(step_s, step_s, 9.0), memory=_memory(peak_bytes))
        for rank in measured.ranks
    )
    return msgspec.structs.replace(measured, ranks=ranks)
