"""Plans from and for Galvatron: the meaning of its strategy file.

Layers are spread as `core/runtime/hybrid_parallel_config.py` and `comm_groups.py` of hetu-galvatron 2.4.0 spread them:
pipeline stages are equal blocks of ranks, `dp_types_enc` is 1 for ZeRO-3 and 0 for `default_dp_type`, and whether
tensor parallelism shares the sequence is an option of the run, not of the file.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.axes import effective
from shardwright_formats.types import (
    EMBEDDING,
    HEAD,
    Cluster,
    DataParallel,
    GradientReduction,
    Model,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
)
from shardwright_search.interop.galvatron_experts import layer_with_experts, told_of_experts
from shardwright_search.interop.galvatron_file import (
    DataParallelType,
    GalvatronStrategy,
    PipelineType,
    galvatron_keys,
    strategy_of_keys,
)
from shardwright_search.interop.galvatron_layers import check_rings, galvatron_layer, strategy_of
from shardwright_search.interop.limits import Limits, Reading, Setting, Target, torchrun
from shardwright_search.interop.target import (
    WHOLE_LAYERS,
    Exported,
    ExportTarget,
    check_expert_states,
    check_recompute,
    check_stages,
    check_trained,
    kernel_notes,
    strategies,
)
from shardwright_search.options import GalvatronRun
from shardwright_search.space.demands import Demands, Outer
from shardwright_search.space.uniform import stages_of

_DEFAULTS: dict[DataParallel, DataParallelType] = {DataParallel.DDP: "ddp", DataParallel.ZERO2: "zero2"}
_SCHEDULES: dict[PipelineType, Schedule] = {"gpipe": Schedule.GPIPE, "pipedream_flush": Schedule.ONE_F_ONE_B}
_PIPELINE_TYPES: dict[Schedule, PipelineType] = {
    Schedule.GPIPE: "gpipe",
    Schedule.ONE_F_ONE_B: "pipedream_flush",
    Schedule.INTERLEAVED_1F1B: "pipedream_flush",
}
"""Names of the schedules of a stage with one layer range, which is all that Galvatron has."""
_UNUSED_DEFAULT: DataParallelType = "zero2"
"""Value that is written where nothing is left to `default_dp_type`; Galvatron's own launch scripts ask for it."""
_SHARES_SEQUENCE = "read as a run with --sequence-parallel, which the file does not say"
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def plan_of_galvatron(
    name: str, given: GalvatronStrategy, model: Model, cluster: Cluster, run: GalvatronRun, file: Path
) -> Plan:
    """Return the plan that Galvatron would run.

    Raises BadInput where the model or the cluster is another one, and where microbatches would differ in size.
    """
    pp_size = len(given.pp_division)
    if cluster.num_devices % pp_size:
        problem = f"pp_deg {pp_size} does not divide the {cluster.num_devices} devices of cluster {cluster.name}"
        raise BadInput(file, problem, "pass the cluster it was made for")
    if len(given.layers) != (count := len(_joined(model))):
        problem = f"it has {len(given.layers)} layers, model {model.name} {count}"
        raise BadInput(file, problem, "pass the model it was made for")
    width = cluster.num_devices // pp_size
    vocabulary = strategy_of("vtp", given.vocabulary, given, width, run, file)
    shardings = [
        strategy_of(f"tp_sizes_enc of layer {i}", layer, given, width, run, file)
        for i, layer in enumerate(given.layers)
    ]
    try:
        return Plan(
            name=name,
            model=model,
            cluster=cluster,
            global_batch_size=given.global_bsz,
            num_microbatches=run.num_microbatches or _num_microbatches(given, vocabulary.dp_size, file),
            # Without a pipeline Galvatron ignores pipeline_type and takes one microbatch after the other.
            schedule=_SCHEDULES[given.pipeline_type] if pp_size > 1 else Schedule.ONE_F_ONE_B,
            gradient_reduction=run.gradient_reduction,
            precision=run.precision,
            attention=run.attention,
            stages=stages_of(_ranges(given.pp_division, model), pp_size, width),
            embedding=vocabulary,
            head=vocabulary,
            layers=tuple(
                layer_with_experts(sharding, layer, given.default_dp_type, model, i, file)
                for sharding, layer, joined in zip(shardings, given.layers, _joined(model), strict=True)
                for i in joined
            ),
        )
    except ValueError as error:
        raise BadInput(file, str(error), "pass the model and cluster it was made for") from None


def galvatron_file(plan: Plan, plan_file: object) -> Exported:
    """Return Galvatron's strategy file of a plan, and the options that its run needs.

    Raises BadInput naming the first thing that the file cannot say.
    """
    given = galvatron_strategy(plan, plan_file)
    text = json.dumps(galvatron_keys(given), indent=4) + "\n"
    return Exported(text, (f"run it on {plan.world_size} ranks with {' '.join(_options(plan))}", *kernel_notes(plan)))


def galvatron_strategy(plan: Plan, plan_file: object) -> GalvatronStrategy:
    """Return the content of Galvatron's file for a plan; BadInput names the first thing that it cannot say."""
    target = ExportTarget("Galvatron", plan_file)
    check_trained(plan, target)
    check_stages(plan, target)
    check_rings(plan, target)
    _check_ranges(plan, target)
    _check_joined(plan, target)
    _check_precision(plan, target)
    default = _check_strategies(plan, target)
    return GalvatronStrategy(
        layers=tuple(
            told_of_experts(galvatron_layer(effective(plan.layers[first]), plan.layers[first].recompute), plan, first)
            for first, *_ in _joined(plan.model)
        ),
        vocabulary=galvatron_layer(effective(plan.embedding), Recompute.NONE),
        pp_division=tuple(
            sum(low <= first < high for first, *_ in _joined(plan.model))
            for stage in plan.stages
            for low, high in stage.layers
        ),
        global_bsz=plan.global_batch_size,
        chunks=plan.num_microbatches,
        pipeline_type=_PIPELINE_TYPES[plan.schedule],
        default_dp_type=default,
    )


def _joined(model: Model) -> list[tuple[int, ...]]:
    """Return the numbers of the layers that are one of Galvatron's: a block, and what changes its output's shape.

    So it merges Swin's patches (galvatron/models/swin): in the last block of a stage.
    """
    joined: list[tuple[int, ...]] = []
    for number, kind in enumerate(model.layers):
        if joined and kind in model.reshaping:
            joined[-1] += (number,)
        else:
            joined.append((number,))
    return joined


def _ranges(pp_division: Sequence[int], model: Model) -> tuple[tuple[int, int], ...]:
    """Return the half-open range of layers of each pipeline stage."""
    ends = [joined[-1] + 1 for joined in _joined(model)]
    cuts = [0, *(ends[min(count, len(ends)) - 1] if count else 0 for count in accumulate(pp_division))]
    return tuple(pairwise(cuts))


def _num_microbatches(given: GalvatronStrategy, dp_size: int, file: Path) -> int:
    """Return the number of microbatches that torch's `chunk` makes of a data-parallel rank's samples.

    Raises BadInput where the last is smaller: a plan's are equal.
    """
    samples, left = divmod(given.global_bsz, dp_size)
    if left:
        problem = f"global_bsz {given.global_bsz} is not shared out evenly to the {dp_size} ranks of embedding and head"
        raise BadInput(file, problem, "pass the cluster it was made for")
    size = -(-samples // given.chunks)
    if samples % size:
        raise BadInput(
            file,
            f"chunks {given.chunks} cuts a rank's {samples} samples into microbatches of {size} and one of "
            f"{samples % size}, which no plan can say",
            "choose --num-microbatches yourself",
        )
    return samples // size


def _check_ranges(plan: Plan, target: ExportTarget) -> None:
    for i, stage in enumerate(plan.stages):
        feature = "several layer ranges in a pipeline stage"
        target.demand(len(stage.layers) == 1, feature, "choose the schedule 1f1b or gpipe")
        ((low, high),) = stage.layers
        target.demand(low < high, f"stages[{i}] without a layer", "give every pipeline stage a layer")


def _check_joined(plan: Plan, target: ExportTarget) -> None:
    """Check that what Galvatron joins to a block is sharded, recomputed and placed as the block is."""
    for first, *others in _joined(plan.model):
        block = plan.layers[first]
        for number in others:
            layer = plan.layers[number]
            alike = replace(layer, type=block.type) == block
            feature = f"layers[{number}], {layer.type}, sharded or recomputed otherwise than the block before it"
            target.demand(alike, feature, "give both one strategy: set fine_grained to false")
            apart = any(number == low for stage in plan.stages for low, _ in stage.layers)
            target.demand(not apart, f"a cut before layers[{number}], {layer.type}", "cut behind it")


def _check_precision(plan: Plan, target: ExportTarget) -> None:
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = kept == "float32" and used in _PRECISIONS and reduced in ("float32", used)
    target.demand_precision(plan, holds, "keep parameters in float32, and reduce in float32 or as computed")


def _check_strategies(plan: Plan, target: ExportTarget) -> DataParallelType:
    """Return the file's `default_dp_type`; BadInput names the first layer that the file has no place for."""
    default: tuple[str, DataParallel] | None = None
    sharing: tuple[str, SequenceParallel] | None = None
    for where, strategy in strategies(plan):
        kind, sequence = strategy.data_parallel, strategy.sequence_parallel
        ulysses = strategy.sequence_parallel is SequenceParallel.ULYSSES
        strided = not strategy.tp_consecutive and (where in (EMBEDDING, HEAD) or ulysses)
        target.demand(not strided, f"{where}: strided groups there", "make them consecutive")
        feature = f"{where}: states shared out in groups of {strategy.shard_size}"
        target.demand(not strategy.shard_size, feature, "share them out among all ranks: leave out shard_size")
        if kind is not DataParallel.ZERO3 and (strategy.dp_size > 1 or strategy.cp_size > 1 or ulysses):
            default = default or (where, kind)
            feature = f"{where}: {kind}, where {default[0]} has {default[1]}"
            target.demand(kind is default[1], feature, "use zero3 beside one of ddp and zero2")
        if strategy.tp_size > 1 and not ulysses:
            sharing = sharing or (where, sequence)
            feature = f"{where}: sequence_parallel {sequence}, where {sharing[0]} has {sharing[1]}"
            target.demand(sequence is sharing[1], feature, "use one kind wherever tp_size is above 1")
    for i, layer in enumerate(plan.layers):
        check_expert_states(f"layers[{i}]", layer, target)
    check_recompute(plan, target)
    alike = effective(plan.embedding) == effective(plan.head)
    target.demand(alike, "a head sharded otherwise than the embedding", "shard them alike")
    return _UNUSED_DEFAULT if default is None else _DEFAULTS[default[1]]


def _options(plan: Plan) -> Iterator[str]:
    """Yield the options of Galvatron's run that the plan needs and the file cannot hold."""
    yield f"--mixed_precision {_PRECISIONS[plan.precision.compute]}"
    if plan.precision.reduce == "float32" != plan.precision.compute:
        yield "--reduce_in_fp32"
    if any(strategy.sequence_parallel is SequenceParallel.MEGATRON for _, strategy in strategies(plan)):
        yield "--sequence-parallel"
    if plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH and plan.num_microbatches > 1:
        yield "--no_async_grad_reduce"


def galvatron_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return its two ways: one of ddp and zero2, which holds for all layers, beside zero3.

    For models with layers that it joins to the block before, it has none in which each layer has its own strategy.
    """
    if model.reshaping:
        return ()
    return tuple(
        Limits(
            f"{kind} and zero3, tensor parallelism that shares the sequence",
            data_parallel=(kind, DataParallel.ZERO3),
            gradient_reduction=GradientReduction.DEFERRED,
            recompute=WHOLE_LAYERS,
            sequence_parallel=(SequenceParallel.MEGATRON,),
            uniform=False,
            demands=Demands(outer=Outer.ALIKE, block_in_each_stage=True),
        )
        for kind in (DataParallel.DDP, DataParallel.ZERO2)
    )


def read_strategy(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a strategy file under a run with the setting's precision and --sequence-parallel."""
    path = Path(file)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(path, f"not valid JSON ({error})", "write the file again") from None
    run = GalvatronRun(sequence_parallel="megatron", attention=setting.attention)
    plan = plan_of_galvatron(file, strategy_of_keys(raw, path), setting.model, setting.cluster, run, path)
    return Reading(replace(plan, precision=setting.precision), (_SHARES_SEQUENCE,))


def _command(plan: Plan, file: str) -> str:
    return torchrun(plan, f"train_dist.py --galvatron_config_path {file} {' '.join(_options(plan))}")


GALVATRON = Target(
    title="Galvatron",
    version="hetu-galvatron 2.4.0",
    sources=(
        "galvatron/core/runtime/hybrid_parallel_config.py: keys, one default_dp_type, one strategy of the vocabulary",
        "galvatron/core/runtime/arguments.py: --galvatron_config_path, --sequence-parallel",
    ),
    limits=galvatron_limits,
    unsearched=(
        "Ulysses",
        "tensor parallelism without --sequence-parallel",
        "gpipe",
        "strided groups",
        "expert parallelism",
        "context parallelism, which newer versions have",
    ),
    file_name="galvatron.json",
    mark="pp_deg",
    export=galvatron_file,
    read=read_strategy,
    command=_command,
)
