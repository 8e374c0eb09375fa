"""Results made up for tests of the report: a small model on two pipeline stages, as if searched, measured, trained."""

import math
from pathlib import Path

import msgspec

from shardwright.io import write_document
from shardwright.plan.chunks import stage_actions
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.measurement import Measurement, PassTime, PlanMeasurement, RankMeasurement, RankMemory
from shardwright.types.model import LayerType, Model, Parameter
from shardwright.types.plan import PipelineStage, Plan, Schedule
from shardwright.types.prediction import (
    Correction,
    CorrectionFactor,
    Estimate,
    Prediction,
    Proof,
    RunnerUp,
    StagePrediction,
    Term,
    TimelineEvent,
)
from shardwright.types.run import BestCheckpoint, Evaluation, RunResult, StepMetrics
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

_MIB = 1024 * 1024


def a_plan(*, num_microbatches: int = 4, pp_size: int = 2, recomputed: int = 3, name: str = "roomy") -> Plan:
    """Eight layers on eight ranks; the first `recomputed` are recomputed and sharded, the last two tensor-parallel."""
    ranks = 8 // pp_size
    kind = LayerType(parameters=(Parameter(name="w", shape=(64, 64)),), forward_flops_per_sample=1)
    model = Model(
        name="demo", family="llama", config={}, sequence_length=128, layers=("block",) * 8,
        types={"embedding": kind, "block": kind, "head": kind},
    )  # fmt: skip
    node = NodeType(device="cpu", devices_per_node=8, memory_bytes=1 << 30, usd_per_hour=2.0)
    cluster = Cluster(name="laptop", nodes=(NodeGroup(node_type="cpu", count=1),), node_types={"cpu": node})
    whole = LayerStrategy(type="block", tp_size=1, dp_size=ranks)
    sharded = LayerStrategy(
        type="block", tp_size=1, dp_size=ranks, data_parallel=DataParallel.ZERO3, recompute=Recompute.FULL
    )
    split = LayerStrategy(
        type="block", tp_size=2, dp_size=ranks // 2, sequence_parallel=SequenceParallel.MEGATRON,
        data_parallel=DataParallel.ZERO2,
    )  # fmt: skip
    cuts = [8 * i // pp_size for i in range(pp_size + 1)]
    return Plan(
        name=name, model=model, cluster=cluster, global_batch_size=32, num_microbatches=num_microbatches,
        schedule=Schedule.ONE_F_ONE_B,
        stages=tuple(
            PipelineStage(ranks=tuple(range(i * ranks, (i + 1) * ranks)), layers=((cuts[i], cuts[i + 1]),))
            for i in range(pp_size)
        ),
        embedding=Strategy(tp_size=1, dp_size=ranks), head=Strategy(tp_size=2, dp_size=ranks // 2),
        layers=(sharded,) * recomputed + (whole,) * (6 - recomputed) + (split,) * 2,
    )  # fmt: skip


def an_estimate(plan: Plan, step_time_s: float) -> Estimate:
    """An estimate with the plan's own action list as its timeline."""
    stages = len(plan.stages)
    unit = step_time_s / (3 * (plan.num_microbatches + stages))
    timeline: list[TimelineEvent] = []
    for stage in range(stages):
        clock = stage * unit
        for action in stage_actions(plan, stage):
            length = unit if action.kind == "forward" else 2 * unit
            timeline.append(
                TimelineEvent(
                    stage=stage,
                    kind=str(action.kind),
                    microbatch=action.microbatch,
                    chunk=action.chunk,
                    start_s=clock,
                    end_s=clock + length,
                )
            )
            clock += length
        timeline.append(
            TimelineEvent(
                stage=stage, kind="optimizer", microbatch=None, chunk=None, start_s=clock, end_s=clock + unit / 2
            )
        )
    terms = {
        "parameters": 8 * _MIB,
        "gradients": 8 * _MIB,
        "optimizer": 16 * _MIB,
        "activations": 20 * _MIB,
        "logits": 5 * _MIB,
    }
    predictions = tuple(
        StagePrediction(
            time_s=3 * unit, time_terms_s={
                "forward": unit, "backward": 2 * unit, "gradient_sync": 0.0, "optimizer": unit / 2,
            },
            memory_bytes=sum(terms.values()) - stage * 8 * _MIB,
            memory_terms_bytes=terms | {"activations": (20 - 8 * stage) * _MIB},
        )
        for stage in range(stages)
    )  # fmt: skip
    return Estimate(
        simulated_step_time_s=step_time_s, simulated_lower_bound_s=0.9 * step_time_s, objective_s=step_time_s,
        samples_per_s=plan.global_batch_size / step_time_s, usd_per_step=step_time_s * 2 / 3600, stages=predictions,
        timeline=tuple(timeline),
    )  # fmt: skip


def write_sample_results(results: Path, *, search: str = "roomy", run: str = "demo", budget_mib: int = 64) -> Plan:
    """Write a search of three plans, two of them measured, what they taught, and a finished run.

    Returns the chosen plan.
    """
    plan = a_plan(name=search)
    others = [a_plan(num_microbatches=8, name=search), a_plan(pp_size=1, num_microbatches=1, recomputed=0, name=search)]
    prediction = Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=budget_mib * _MIB,
        estimate=an_estimate(plan, 0.2),
        proof=Proof(
            objective="the closed form of the step time", objective_s=0.2, objective_bound_s=0.2, gap=0.0,
            scope="tp 1, 2; pp 1, 2; every microbatch count", examined=1234, solved=56,
        ),
        runners_up=tuple(
            RunnerUp(plan=other, estimate=an_estimate(other, 0.22 + 0.03 * i)) for i, other in enumerate(others)
        ),
        warnings=("all_reduce of 64 MiB is extrapolated <beyond> 32 MiB",),
        inputs_sha256={"hardware": "0" * 64}, reference_s=0.0145,
    )  # fmt: skip
    write_document(results / "plans" / f"{search}.json", plan)
    write_document(results / "plans" / f"{search}.prediction.json", prediction)
    measured = Measurement(
        device="cpu", backend="gloo", date="2026-01-31", versions="torch 2.13.0", attention="sdpa",
        allocator="", plans=(_measured(plan, 0.21), _measured(others[0], 0.25)),
    )  # fmt: skip
    write_document(results / "measurements" / "plans" / f"{search}.json", measured)
    learned = Correction(
        factors={
            Term.FORWARD: CorrectionFactor(factor=1.25, lowest=0.75, highest=1.5, num_plans=2, num_ranks=16),
            Term.STEP_END: CorrectionFactor(factor=3.0, lowest=3.0, highest=3.0, num_plans=1, num_ranks=8),
        },
        plans_sha256=(plan.sha256, others[0].sha256), measurements_sha256=("0" * 64,), hardware_sha256="0" * 64,
        profiles_sha256=("0" * 64,), warnings=("forward: thin: 2 plan(s) <of> many",),
    )  # fmt: skip
    write_document(results / "corrections" / f"{search}.json", learned)
    _write_run(results / "runs" / run, plan)
    return plan


def _measured(plan: Plan, step_time_s: float) -> PlanMeasurement:
    memory = RankMemory(
        parameters_bytes=8 * _MIB, gradients_bytes=8 * _MIB, optimizer_bytes=16 * _MIB, peak_bytes=60 * _MIB,
        segments=(), process_bytes=0, peak_reserved_bytes=0, device_used_bytes=0, resident_bytes=300 * _MIB,
    )  # fmt: skip
    return PlanMeasurement(
        plan=plan,
        ranks=tuple(
            RankMeasurement(
                rank=rank, stage=rank * len(plan.stages) // plan.world_size,
                step_s=(step_time_s, 0.9 * step_time_s, 1.3 * step_time_s), reference_s=(0.015,) * 3,
                segments=(), gradient_reduction_s=(), optimizer_s=(), memory=memory,
                passes=tuple(
                    PassTime(kind=kind, microbatch=i, chunk=0, wait_s=0.0, start_s=0.0, time_s=0.001)
                    for i in range(plan.num_microbatches) for kind in ("forward", "backward")
                ),
            )
            for rank in range(plan.world_size)
        ),
    )  # fmt: skip


def _write_run(folder: Path, plan: Plan) -> None:
    losses = [7.6 * 0.985**step + 0.05 * (step % 3) for step in range(100)]
    lines = [
        StepMetrics(
            step=step, loss=loss, step_time_s=0.21, tokens_per_s=1e4, mfu=None, grad_norm=1.0, learning_rate=1e-3,
            peak_memory_bytes=(1,) * plan.world_size, time_utc="2026-01-01T00:00:00Z",
            evaluation=None if step % 50 else Evaluation(
                loss=loss + 0.25, perplexity=math.exp(loss + 0.25), labels=1600, samples=100, time_s=0.5
            ),
        )
        for step, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    done = RunResult(
        plan_sha256=plan.sha256, steps=100, first_loss=losses[0], final_loss=losses[-1], attention="sdpa", wall_s=30.0,
        checkpoint="c", best=BestCheckpoint(step=100, loss=losses[-1] + 0.25, checkpoint="c"),
        predicted_step_time_s=0.2,
    )  # fmt: skip
    write_document(folder / "DONE.json", done)
