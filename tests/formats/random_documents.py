"""Documents of every kind, drawn at random within what their types allow."""

from typing import Any

from hypothesis import strategies as st
from msgspec import UNSET

from shardwright.plan.axes import axes_of
from shardwright.plan.chunks import placed
from shardwright.types import (
    Attention,
    BoundaryTensor,
    Cluster,
    DataParallel,
    Estimate,
    GradientReduction,
    LayerStrategy,
    LayerType,
    Measurement,
    Model,
    NodeGroup,
    NodeType,
    Offload,
    Parameter,
    PassTime,
    PipelineStage,
    Plan,
    PlanFailure,
    PlanMeasurement,
    Plans,
    Precision,
    Prediction,
    Proof,
    RankMeasurement,
    RankMemory,
    Recompute,
    Replanned,
    RunnerUp,
    RunResult,
    Schedule,
    Segment,
    SegmentMemory,
    SequenceParallel,
    StagePrediction,
    StopNote,
    Strategy,
    TimelineEvent,
)

CONTROLS = "".join(map(chr, [*range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFFFE, 0xFFFF]))
"""Beside control characters and halves of surrogate pairs, what is refused in files that are read."""
shown = st.characters(exclude_characters=CONTROLS, exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t")
names = st.text(shown, min_size=1, max_size=8)
seconds = st.floats(0, 1e6, allow_nan=False)
byte_counts = st.integers(0, 2**53)
hosts = st.just(UNSET) | st.floats(1e-3, 1e6)
"""What a node type may say of its host."""
digests = st.text("0123456789abcdef", min_size=64, max_size=64)
formats = st.sampled_from(["float64", "float32", "bfloat16", "float16"])
precisions = st.builds(Precision, parameters=formats, compute=formats, reduce=formats, tf32=st.just(False)) | st.builds(
    Precision, parameters=formats, compute=st.just("float32"), reduce=formats, tf32=st.just(True)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(shown),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(shown), inner, max_size=3),
    max_leaves=5,
)


def _lists(of: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, min_size=least, max_size=3).map(tuple)


def _layer_type(outer: str | None) -> st.SearchStrategy[LayerType]:
    parameter = st.builds(
        Parameter,
        name=st.just(outer) if outer else names,
        shape=st.just((64, 8)) if outer else _lists(st.integers(1, 64), 1),
        tp_dim=st.sampled_from([None, 0]),
    )
    return st.builds(
        LayerType,
        parameters=parameter.map(lambda one: (one,)) if outer else _lists(parameter),
        forward_flops_per_sample=byte_counts,
        tp_must_divide=st.dictionaries(names, st.just(64), max_size=2),
        ulysses_must_divide=st.dictionaries(names, st.just(64), max_size=2),
        sequence_must_divide=st.just(UNSET) | st.dictionaries(names, st.just(64), min_size=1, max_size=2),
        outputs=_lists(st.builds(BoundaryTensor, name=names, sequence_length=st.just(64), features=st.integers(1, 9))),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    blocks = draw(st.lists(names.filter(lambda name: name not in ("embedding", "head")), min_size=1, max_size=3))
    types = {name: draw(_layer_type(None)) for name in blocks}
    outer = {name: draw(_layer_type(f"{name}.weight")) for name in ("embedding", "head")}
    return Model(
        name=draw(names),
        family=draw(names),
        config=draw(st.dictionaries(st.text(shown), json_values, max_size=3)),
        sequence_length=64,
        layers=tuple(draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=6))),
        types=outer | types,
        tied=draw(st.sampled_from([(), (("embedding.weight", "head.weight"),)])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Clusters of 1, 2, 4 or 8 devices, so that every power of two can share them out."""
    devices = draw(st.sampled_from([1, 2, 4, 8]))
    per_node = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= devices]))
    types = {
        name: NodeType(
            device=draw(names),
            devices_per_node=per_node,
            memory_bytes=draw(st.integers(1, 2**40)),
            usd_per_hour=draw(st.none() | seconds),
            host_memory_gib=draw(hosts),
            host_bytes_per_s=draw(hosts),
        )
        for name in draw(st.lists(names, min_size=1, max_size=2, unique=True))
    }
    nodes = [NodeGroup(node_type=draw(st.sampled_from(sorted(types))), count=1) for _ in range(devices // per_node)]
    return Cluster(name=draw(names), nodes=tuple(nodes), node_types=types)


def _powers_up_to(most: int) -> list[int]:
    return [n for n in (1, 2, 4, 8) if n <= most]


@st.composite
def _spread(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    tp_size = draw(st.sampled_from(_powers_up_to(ranks)))
    plain = Strategy(
        tp_size=tp_size,
        tp_consecutive=draw(st.booleans()),
        dp_size=ranks // tp_size,
        data_parallel=draw(st.sampled_from(DataParallel)),
        sequence_parallel=draw(st.sampled_from(SequenceParallel)),
    )
    shards = axes_of(plain).dense.shards
    sizes = _powers_up_to(shards // 2)[1:] if shards % 2 == 0 else []
    shard_size = draw(st.sampled_from([0, *(n for n in sizes if shards % n == 0)]))
    fields = {name: getattr(plain, name) for name in Strategy.__struct_fields__}
    return fields | {"shard_size": shard_size}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    model, cluster = draw(models()), draw(clusters())
    devices, layers = cluster.num_devices, len(model.layers)
    # Only the first range and the last may be empty.
    num_stages = draw(st.sampled_from([n for n in _powers_up_to(devices) if n <= layers + 2]))
    schedule = draw(st.sampled_from(Schedule))
    most = min(2, (layers + 2) // num_stages) if num_stages > 1 else 1
    if schedule.turns and most < 2:
        schedule = Schedule.ZERO_BUBBLE
    chunks = draw(st.integers(2 if schedule.turns else 1, most)) if schedule.interleaves else 1
    parts = num_stages * chunks
    inner = [*range(parts - 1)] if parts > layers else draw(st.permutations(range(layers + 1)))[: parts - 1]
    cuts = sorted(inner)
    ranges = list(zip([0, *cuts], [*cuts, layers], strict=True))
    ranks = draw(st.permutations(range(devices)))
    width = devices // num_stages
    held = placed(ranges, schedule, num_stages)
    stages = tuple(
        PipelineStage(ranks=tuple(sorted(ranks[i * width : (i + 1) * width])), layers=held[i])
        for i in range(num_stages)
    )
    num_microbatches = draw(st.integers(1, 4))
    strategies = [
        LayerStrategy(
            type=kind,
            recompute=draw(st.sampled_from(Recompute)),
            offload=draw(st.sampled_from([UNSET, Offload.OPTIMIZER])),
            **draw(_spread(width)),
        )
        for kind in model.layers
    ]
    return Plan(
        name=draw(names),
        model=model,
        cluster=cluster,
        global_batch_size=8 * num_microbatches,
        num_microbatches=num_microbatches,
        schedule=schedule,
        gradient_reduction=draw(st.sampled_from(GradientReduction)),
        precision=draw(precisions),
        attention=draw(st.sampled_from(Attention)),
        fused=draw(st.lists(st.sampled_from(["rotary", "norm", "cross_entropy"]), unique=True).map(tuple)),
        stages=stages,
        embedding=Strategy(**draw(_spread(width))),
        head=Strategy(**draw(_spread(width))),
        layers=tuple(strategies),
    )


stage_predictions = st.builds(
    StagePrediction,
    time_s=seconds,
    time_terms_s=st.dictionaries(names, seconds, max_size=2),
    memory_bytes=byte_counts,
    memory_terms_bytes=st.dictionaries(names, byte_counts, max_size=2),
    host_bytes=st.just(UNSET) | byte_counts,
)
events = st.builds(
    TimelineEvent,
    stage=st.integers(0, 7),
    kind=names,
    microbatch=st.none() | st.integers(0, 7),
    chunk=st.none() | st.integers(0, 3),
    start_s=seconds,
    end_s=seconds,
)
estimates = st.builds(
    Estimate,
    simulated_step_time_s=seconds,
    simulated_lower_bound_s=seconds,
    objective_s=seconds,
    samples_per_s=seconds,
    usd_per_step=st.none() | seconds,
    stages=_lists(stage_predictions, 1),
    timeline=_lists(events),
)
proofs = st.builds(
    Proof,
    objective=names,
    objective_s=seconds,
    objective_bound_s=seconds,
    gap=seconds,
    scope=names,
    examined=st.integers(0, 2**31 - 1),
    solved=st.integers(0, 2**31 - 1),
    second_opinion=st.none() | names,
)
predictions = st.builds(
    Prediction,
    plan_sha256=digests,
    memory_budget_bytes=st.none() | byte_counts,
    estimate=estimates,
    proof=st.none() | proofs,
    runners_up=_lists(st.builds(RunnerUp, plan=plans(), estimate=estimates)),
    warnings=_lists(names),
    inputs_sha256=st.dictionaries(names, digests, max_size=2),
    reference_s=seconds,
)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    plan = draw(plans())
    repeats = draw(st.integers(1, 3))
    times = st.lists(seconds, min_size=repeats, max_size=repeats).map(tuple)
    segment_memory = st.builds(
        SegmentMemory,
        name=names,
        activation_bytes=byte_counts,
        forward_workspace_bytes=byte_counts,
        backward_workspace_bytes=byte_counts,
    )
    memory = RankMemory(
        parameters_bytes=draw(byte_counts),
        gradients_bytes=draw(byte_counts),
        optimizer_bytes=draw(byte_counts),
        peak_bytes=draw(byte_counts),
        segments=draw(_lists(segment_memory)),
        process_bytes=draw(byte_counts),
        peak_reserved_bytes=draw(byte_counts),
        device_used_bytes=draw(byte_counts),
        resident_bytes=draw(byte_counts),
    )
    ranks = tuple(
        RankMeasurement(
            rank=rank,
            stage=(stage := next(i for i, stage in enumerate(plan.stages) if rank in stage.ranks)),
            step_s=draw(times),
            reference_s=draw(st.lists(st.floats(1e-6, 10.0), min_size=repeats, max_size=repeats).map(tuple)),
            segments=(Segment(name=draw(names), forward_s=draw(times), backward_s=draw(times)),),
            gradient_reduction_s=draw(times),
            optimizer_s=draw(times),
            passes=tuple(
                PassTime(kind=kind, microbatch=i, chunk=chunk, wait_s=draw(seconds), start_s=1.5, time_s=draw(seconds))
                for kind in ("backward", "forward", *["weight"] * plan.schedule.splits)
                for i in range(plan.num_microbatches)
                for chunk in range(len(plan.stages[stage].layers))
            ),
            memory=memory,
        )
        for rank in range(plan.world_size)
    )
    failure = PlanFailure(
        plan=plan,
        category="out_of_memory",
        rank=draw(st.integers(0, plan.world_size - 1)),
        where=draw(names),
        asked_bytes=draw(st.none() | byte_counts),
    )
    return Measurement(
        device=draw(names),
        backend=draw(names),
        date=draw(names),
        versions=draw(names),
        attention=draw(names),
        allocator=draw(names),
        plans=(PlanMeasurement(plan=plan, ranks=ranks),),
        failed=draw(st.sampled_from([(), (failure,)])),
    )


runs = st.builds(
    RunResult,
    plan_sha256=digests,
    steps=st.integers(1, 10**6),
    first_loss=seconds,
    final_loss=seconds,
    attention=names,
    wall_s=seconds,
    checkpoint=names,
)
stops = st.builds(
    StopNote,
    step=st.integers(1, 10**6),
    steps=st.integers(1, 10**6),
    reason=st.sampled_from(["signal", "max_time_s"]),
    checkpoint=names,
    time_utc=names,
)
replanned = st.builds(
    Replanned, plan=plans(), resume_from=st.none() | names, step_before_s=seconds, step_after_s=seconds
)
documents = st.one_of(
    *(models(), clusters(), plans(), st.builds(Plans, plans=_lists(plans(), 1)), predictions, measurements(), runs),
    *(stops, replanned),
)
