"""Writes an example of every file beside this script: `python core/examples/write_examples.py`.

The numbers are made up and measure nothing. A test writes them again and compares the bytes.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwright.io.hdf5 import Profile, Provenance, tables_of
from shardwright.io.json import Document, write_document
from shardwright.io.table import Table, columns_of
from shardwright.plan.chunks import stage_actions
from shardwright.plan.schedules.passes import Pass
from shardwright.types.cluster import Cluster, NodeGroup, NodeType
from shardwright.types.hardware_profile import HardwareProfile, write_hardware_profile
from shardwright.types.measurement import (
    Measurement,
    PassTime,
    PlanFailure,
    PlanMeasurement,
    RankMeasurement,
    RankMemory,
    Segment,
    SegmentMemory,
)
from shardwright.types.model import BoundaryTensor, LayerType, Model, Parameter
from shardwright.types.model_profile import ModelProfile, ProfileOrigin, write_model_profile
from shardwright.types.plan import PipelineStage, Plan, Plans, Schedule
from shardwright.types.prediction import (
    Band,
    Certificate,
    ConfigurationProof,
    Correction,
    CorrectionFactor,
    Estimate,
    MemoryPrice,
    Prediction,
    Proof,
    RunnerUp,
    StagePrediction,
    Term,
    TimelineEvent,
)
from shardwright.types.run import BestCheckpoint, ExpertLoad, GroupLoad, LayerLoad, Replanned, RunResult, StopNote
from shardwright.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

__all__ = ["write_examples"]


def write_examples(folder: Path) -> None:
    """Write every example into a folder."""
    plan = _plan(_model(), _cluster())
    documents: dict[str, Document] = {
        "model": plan.model,
        "cluster": plan.cluster,
        "plan": plan,
        "plans": Plans(plans=(plan, _gpipe_plan(plan))),
        "prediction": _prediction(plan),
        "certificate": _certificate(plan),
        "measurement": _measurement(plan),
        "correction": _correction(plan),
        "run": RunResult(
            plan_sha256=plan.sha256,
            steps=100,
            first_loss=3.5,
            final_loss=1.25,
            attention="sdpa",
            wall_s=60.0,
            checkpoint="checkpoints/example/step-00000100",
            best=BestCheckpoint(step=80, loss=1.5, checkpoint="checkpoints/example/step-00000080"),
            predicted_step_time_s=0.5,
        ),
        "stopped": StopNote(
            step=40,
            steps=100,
            reason="signal",
            checkpoint="checkpoints/example/step-00000040",
            time_utc="2026-01-01T00:00:00+00:00",
        ),
        "replanned": Replanned(
            plan=plan, resume_from="checkpoints/example/step-00000040", step_before_s=0.5, step_after_s=0.75
        ),
        "expert_load": _expert_load(),
    }
    for name, document in documents.items():
        write_document(folder / f"{name}.json", document)
    write_hardware_profile(folder / "hardware_profile.h5", _hardware_profile())
    write_model_profile(folder / "model_profile.h5", _model_profile(plan.model))


def _model() -> Model:
    hidden = BoundaryTensor(name="hidden_states", sequence_length=16, features=8)
    block = LayerType(
        parameters=(
            Parameter(name="norm.weight", shape=(8,)),
            Parameter(name="up.weight", shape=(32, 8), tp_dim=0),
            Parameter(name="down.weight", shape=(8, 32), tp_dim=1),
        ),
        forward_flops_per_sample=16384,
        tp_must_divide={"intermediate_size": 32},
        ulysses_must_divide={"num_attention_heads": 2},
        outputs=(hidden,),
    )
    embedding = LayerType(
        parameters=(Parameter(name="embed.weight", shape=(64, 8), tp_dim=0),),
        forward_flops_per_sample=0,
        outputs=(hidden,),
    )
    head = LayerType(
        parameters=(Parameter(name="head.weight", shape=(64, 8), tp_dim=0),), forward_flops_per_sample=16384
    )
    return Model(
        name="example",
        family="example",
        config={"hidden_size": 8, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64},
        sequence_length=16,
        layers=("block", "block", "block"),
        types={"embedding": embedding, "block": block, "head": head},
        tied=(("embed.weight", "head.weight"),),
    )


def _cluster() -> Cluster:
    node_type = NodeType(device="cpu", devices_per_node=2, memory_bytes=1 << 30, usd_per_hour=0.5)
    return Cluster(
        name="example", nodes=(NodeGroup(node_type="example-2", count=2),), node_types={"example-2": node_type}
    )


def _plan(model: Model, cluster: Cluster) -> Plan:
    sharded = LayerStrategy(
        type="block", tp_size=1, dp_size=2, data_parallel=DataParallel.ZERO3, recompute=Recompute.FULL
    )
    split = LayerStrategy(type="block", tp_size=2, dp_size=1, sequence_parallel=SequenceParallel.MEGATRON)
    return Plan(
        name="example",
        model=model,
        cluster=cluster,
        global_batch_size=8,
        num_microbatches=2,
        schedule=Schedule.ONE_F_ONE_B,
        stages=(PipelineStage(ranks=(0, 1), layers=((0, 2),)), PipelineStage(ranks=(2, 3), layers=((2, 3),))),
        embedding=Strategy(tp_size=1, dp_size=2, data_parallel=DataParallel.ZERO2),
        head=Strategy(tp_size=2, dp_size=1, sequence_parallel=SequenceParallel.MEGATRON),
        layers=(sharded, split, split),
    )


def _gpipe_plan(plan: Plan) -> Plan:
    return Plan(
        name="example-gpipe",
        model=plan.model,
        cluster=plan.cluster,
        global_batch_size=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        schedule=Schedule.GPIPE,
        stages=plan.stages,
        embedding=plan.embedding,
        head=plan.head,
        layers=plan.layers,
    )


def _estimate(step_time_s: float) -> Estimate:
    stage = StagePrediction(
        time_s=0.25,
        time_terms_s={"layers": 0.1875, "sends": 0.0625},
        memory_bytes=4096,
        memory_terms_bytes={"states": 3072, "activations": 1024},
    )
    return Estimate(
        simulated_step_time_s=step_time_s,
        simulated_lower_bound_s=0.75,
        objective_s=1.0,
        samples_per_s=8 / step_time_s,
        usd_per_step=0.00025,
        stages=(stage, stage),
        timeline=(TimelineEvent(stage=0, kind="forward", microbatch=0, chunk=0, start_s=0.0, end_s=0.125),),
    )


def _prediction(plan: Plan) -> Prediction:
    return Prediction(
        plan_sha256=plan.sha256,
        memory_budget_bytes=1 << 30,
        estimate=_estimate(1.0),
        proof=Proof(
            objective="step time of the closed form",
            objective_s=1.0,
            objective_bound_s=1.0,
            gap=0.0,
            scope="an example",
            examined=4,
            solved=1,
            second_opinion="an example: no other solver was asked",
        ),
        runners_up=(RunnerUp(plan=_gpipe_plan(plan), estimate=_estimate(1.25)),),
        warnings=("an example: nothing here was predicted",),
        inputs_sha256={"hardware": "0" * 64, "profile": "0" * 64, "search": "0" * 64},
        reference_s=0.015625,
    )


def _measurement(plan: Plan) -> Measurement:
    return Measurement(
        device="cpu",
        backend="gloo",
        date="2026-01-31",
        versions="torch 2.13.0",
        attention="sdpa",
        allocator="",
        plans=(PlanMeasurement(plan=plan, ranks=tuple(_rank(plan, rank) for rank in range(plan.world_size))),),
        failed=(
            PlanFailure(
                plan=_gpipe_plan(plan), category="out_of_memory", rank=1, where="in step 1 of toy", asked_bytes=2 << 30
            ),
        ),
    )


def _certificate(plan: Plan) -> Certificate:
    prices = ((MemoryPrice(ps_per_byte=12.5),),)
    low = Band(slowest_below_ps=2.5e9, slowest_weights=(0.0,), exposed_weights=(0.5,), prices=prices)
    high = Band(slowest_below_ps=None, slowest_weights=(3.0, 0.0), exposed_weights=(1.0, 0.0), prices=prices * 2)
    name, pinned = "batch 8, 1f1b", dict.fromkeys(("search", "hardware", "profile"), "0" * 64)
    proof = ConfigurationProof(configuration=name, layouts=True, time_prices=prices, bands=(low, high))
    return Certificate(plan_sha256=plan.sha256, inputs_sha256=pinned, bound_ps=1.25e12, configurations=(proof,))


def _expert_load() -> ExpertLoad:
    layer = LayerLoad(layer=0, shares=(0.5, 0.25, 0.125, 0.125), groups=(GroupLoad(ep_size=2, imbalance=1.625),))
    return ExpertLoad(model="example", first_step=1, last_step=100, layers=(layer,))


def _correction(plan: Plan) -> Correction:
    factor = CorrectionFactor(factor=1.125, lowest=0.875, highest=1.25, num_plans=3, num_ranks=12)
    return Correction(
        factors={Term.FORWARD: factor, Term.MEMORY: factor},
        plans_sha256=(plan.sha256,),
        measurements_sha256=("0" * 64,),
        hardware_sha256="0" * 64,
        profiles_sha256=("0" * 64,),
        warnings=("an example: nothing here was measured",),
    )


def _rank(plan: Plan, rank: int) -> RankMeasurement:
    stage = next(i for i, stage in enumerate(plan.stages) if rank in stage.ranks)
    names = ("embedding", "layers") if stage == 0 else ("layers", "head")
    memory = RankMemory(
        parameters_bytes=1024,
        gradients_bytes=1024,
        optimizer_bytes=2048,
        peak_bytes=8192,
        segments=tuple(
            SegmentMemory(name=name, activation_bytes=512, forward_workspace_bytes=256, backward_workspace_bytes=768)
            for name in names
        ),
        process_bytes=0,
        peak_reserved_bytes=0,
        device_used_bytes=0,
        resident_bytes=1 << 20,
    )
    return RankMeasurement(
        rank=rank,
        stage=stage,
        step_s=(1.0, 1.125),
        reference_s=(0.015625, 0.015625),
        segments=tuple(Segment(name=name, forward_s=(0.125, 0.125), backward_s=(0.25, 0.25)) for name in names),
        gradient_reduction_s=(0.0625, 0.0625),
        optimizer_s=(0.03125, 0.03125),
        passes=tuple(
            PassTime(
                kind="forward" if action.kind is Pass.FORWARD else "backward",
                microbatch=action.microbatch,
                chunk=action.chunk,
                wait_s=0.0625,
                start_s=0.125 * (number + 1),
                time_s=0.0625,
            )
            for number, action in enumerate(stage_actions(plan, stage))
        ),
        memory=memory,
    )


_PROVENANCE = Provenance(date="2026-01-31", versions="torch 2.13.0", notes="Made up.")


def _hardware_profile() -> HardwareProfile:
    kinds = (("all_reduce", 2, 1024), ("all_reduce", 2, 1048576), ("p2p", 1, 1024))
    points = (
        (collective, 2, ranks_per_node, 1, message_bytes, 0.02, "measured")
        for collective, ranks_per_node, message_bytes in kinds
    )
    times_s = ((0.001, 0.0012), (0.01, 0.011), (0.0005, 0.0006))
    rows: dict[str, Iterable[tuple[object, ...]]] = {
        "points": points,
        "repeats": ((point, time_s, 0) for point, times in enumerate(times_s) for time_s in times),
        "pairs": [(0, 1, 1024, 0.0005, "measured")],
        "overlap": [("all_reduce", 2, 2, 1048576, 0.01, 0.01, 1.5, 1.25, "measured")],
        "ranks": [(rank, "matrix_flops_per_s", 1e10, "measured") for rank in range(2)],
        "rates": [("matrix_flops_per_s", 1e10, "measured")],
    }
    return HardwareProfile(
        cluster="example",
        device="cpu",
        backend="gloo",
        provenance=_PROVENANCE,
        **_tables(HardwareProfile, rows),
    )


def _model_profile(model: Model) -> ModelProfile:
    origin = ProfileOrigin(
        model=model.name,
        architecture_sha256=model.architecture_sha256,
        device="cpu",
        backend="gloo",
        precision="float32/float32/float32",
        attention="sdpa",
    )
    types = ("embedding", "block", "head")
    time_s, size = (0.0001, "measured"), (4096, "measured", 0, "absent")
    states = (2048, 2048, 4096, "measured", 0.0001, "derived", 0.0002, 2, "derived", 0.0001, 0.0001, 2, "derived")
    rows: dict[str, Iterable[tuple[object, ...]]] = {
        "layers": (
            (name, 1, "none", "none", 2, 16, 0.001 * number, *time_s, 0.002 * number, *time_s, *size)
            for number, name in enumerate(types, start=1)
        ),
        "states": ((name, 1, *states) for name in types),
        "process": [(0, "measured", 0, "derived", 1 << 20, "measured", 0.001, "derived", 0.015625, "measured")],
        "fits": [("block", 1, "none", "none", "forward_s", "batch", 0, 16, -1e-4, 1e-3, 0.0, 3, 0.01, 0.02, 3, 0.03)],
    }
    return ModelProfile(origin=origin, provenance=_PROVENANCE, **_tables(ModelProfile, rows))


def _tables(kind: type[Profile], rows: Mapping[str, Iterable[tuple[object, ...]]]) -> dict[str, Any]:
    """Each row's values in the order of its table's columns."""
    return {
        name: Table(row_type, dict(zip(columns_of(row_type), zip(*rows[name], strict=True), strict=True)))
        for name, row_type in tables_of(kind).items()
        if name in rows
    }


if __name__ == "__main__":
    write_examples(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
