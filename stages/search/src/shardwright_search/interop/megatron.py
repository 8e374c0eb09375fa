"""A plan as command-line arguments of Megatron-LM, with those that say what its model is.

Names and meanings are those of `megatron/training/arguments.py` and `megatron/core/transformer/` in its main branch of
late 2025; megatron-core 0.16 has the same names in its TransformerConfig. Ranks are numbered as its default order
`tp-cp-ep-dp-pp` numbers them.

Data parallelism. DDP is Megatron's own. ZeRO-2 whose gradients are reduced once a step is its distributed optimizer:
the same messages, one reduce-scatter and one all-gather a step, and the whole gradients that deferred reduction holds
anyway. ZeRO-3, and ZeRO-2 that reduces after every microbatch, is Megatron-FSDP, which does so, and which is documented
beside tensor parallelism but not beside a pipeline. DDP that reduces after every microbatch, and ZeRO-3 that holds
whole gradients over several, it has not.
"""

import shlex
from collections.abc import Iterator, Sequence

from msgspec import UNSET

from shardwright_formats.types import (
    DataParallel,
    GradientReduction,
    Model,
    Plan,
    Precision,
    Recompute,
    Schedule,
    SequenceParallel,
)
from shardwright_search.interop.contexts import check_context, contexts_of
from shardwright_search.interop.limits import (
    Limits,
    Target,
    expert_states_alike,
    has_experts,
    torchrun,
    whole_groups,
)
from shardwright_search.interop.megatron_attention import Arguments
from shardwright_search.interop.megatron_experts import (
    LAYER_TYPES,
    check_split_sequence,
    expert_options,
)
from shardwright_search.interop.megatron_model import model_notes, model_options
from shardwright_search.interop.megatron_reader import COMM_TYPES, read_megatron
from shardwright_search.interop.target import Exported, ExportTarget, kernel_notes, uniform_of
from shardwright_search.space.demands import Demands, Outer
from shardwright_search.space.uniform import UniformStrategy

_TARGET = "Megatron-LM"
_KINDS = (Recompute.NONE, Recompute.FULL, Recompute.MLP)
"""Recomputation that it has in common with plans; the last is its selective kind of the module `mlp`."""
_FSDP = "--use-megatron-fsdp"
_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B)
"""Schedules of a pipeline; the layer ranges of a stage decide between them."""


def megatron_arguments(plan: Plan, plan_file: object) -> Exported:
    """Return the arguments that a plan decides, one a line; those of data and of the learning rate are the user's.

    Raises BadInput naming the first thing that Megatron-LM cannot express.
    """
    target = ExportTarget(_TARGET, plan_file)
    uniform = uniform_of(plan, target, _KINDS, has_expert_grids=True, has_context=True, types=LAYER_TYPES)
    check_context(plan, uniform, target, drops=True)
    check_split_sequence(plan, uniform, target)
    holds = plan.schedule in _SCHEDULES or uniform.pp_size == 1
    target.demand(holds, f"the schedule {plan.schedule}", f"choose {' or '.join(_SCHEDULES)}")
    options = {
        **model_options(plan.model, target),
        "--tensor-model-parallel-size": uniform.tp_size,
        "--pipeline-model-parallel-size": uniform.pp_size,
        **_context(uniform),
        "--sequence-parallel": uniform.sequence_parallel is SequenceParallel.MEGATRON,
        "--micro-batch-size": uniform.micro_batch_size,
        "--global-batch-size": plan.global_batch_size,
        "--optimizer": "adam",
        **expert_options(uniform.experts),
        **_partition(uniform),
        **_data_parallel(plan, uniform, target),
        **_recompute(plan, uniform.ranges, target),
        **_precision(plan, target),
    }
    given = {option: value for option, value in options.items() if value is not False}
    words = ([option] if value is True else [option, *str(value).split()] for option, value in given.items())
    text = "".join(f"{shlex.join(option)}\n" for option in words)
    return Exported(text, tuple(_notes(plan, uniform, given)), _environment(uniform, given))


def _context(uniform: UniformStrategy) -> Arguments:
    """Return in how many parts positions are shared out, and how they attend to those of other ranks."""
    if not uniform.shares_context:
        return {}
    return {"--context-parallel-size": uniform.cp_size, "--cp-comm-type": COMM_TYPES[uniform.context]}


def _partition(uniform: UniformStrategy) -> Arguments:
    """Return how layers are cut; the layout string where neither equal ranges nor another first and last one do."""
    sizes = [high - low for low, high in uniform.ranges]
    if len(set(sizes)) == 1:
        return {"--num-layers-per-virtual-pipeline-stage": sizes[0]} if uniform.chunks > 1 else {}
    if uniform.chunks == 1 and min(sizes) > 0 and len(set(sizes[1:-1])) <= 1:
        return {"--decoder-first-pipeline-num-layers": sizes[0], "--decoder-last-pipeline-num-layers": sizes[-1]}
    ranges = "|".join(f"t*{size}" if size else "" for size in sizes)
    return {"--pipeline-model-parallel-layout": f"E{ranges}L"}


def _data_parallel(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> Arguments:
    kind, one_microbatch = uniform.data_parallel, plan.num_microbatches == 1
    once = one_microbatch or plan.gradient_reduction is GradientReduction.DEFERRED
    if uniform.replicas == 1:
        return {}
    if kind is DataParallel.DDP:
        feature = "layers[0]: ddp that reduces gradients after every microbatch"
        target.demand(once, feature, "choose gradient_reduction deferred")
        return {}
    # Its optimizer instances are groups of neighbouring data-parallel ranks, and replicas of one another.
    groups: Arguments = {"--num-distributed-optimizer-instances": uniform.shard_groups if uniform.shard_size else False}
    if kind is DataParallel.ZERO2 and once:
        return {"--use-distributed-optimizer": True, **groups}
    how = kind if kind is DataParallel.ZERO3 else f"{kind} that reduces gradients after every microbatch"
    remedy = "choose zero2 with gradient_reduction deferred, or one pipeline stage"
    target.demand(uniform.pp_size == 1, f"layers[0]: {how} in several pipeline stages", remedy)
    feature = f"layers[0]: {kind} that holds whole gradients over several microbatches"
    target.demand(not once or one_microbatch, feature, "choose gradient_reduction every_microbatch")
    return {
        _FSDP: True,
        "--data-parallel-sharding-strategy": "optim_grads_params" if kind is DataParallel.ZERO3 else "optim_grads",
        # Megatron-FSDP demands these, too.
        "--use-distributed-optimizer": True,
        "--no-gradient-accumulation-fusion": True,
        "--ckpt-format": "fsdp_dtensor",
        **groups,
        "--outer-dp-sharding-strategy": "no_shard" if uniform.shard_size else False,
    }


def _notes(plan: Plan, uniform: UniformStrategy, options: Arguments) -> Iterator[str]:
    fsdp = _FSDP in options
    yield f"run it on {plan.world_size} ranks"
    if fsdp:
        yield "unset CUDA_DEVICE_MAX_CONNECTIONS, as Megatron-FSDP wants it"
    elif uniform.tp_size > 1 or uniform.shares_context:
        yield "set CUDA_DEVICE_MAX_CONNECTIONS=1 where the GPUs are older than Blackwell"
    if plan.num_microbatches == 1 and "--use-distributed-optimizer" in options and not fsdp:
        yield "its distributed optimizer holds whole gradients with one microbatch too, 4 bytes a parameter"
    if uniform.shares_context:
        yield "context parallelism is Transformer Engine's: keep --transformer-impl transformer_engine, its default"
    yield from model_notes(plan.model)
    yield from kernel_notes(plan)


def _environment(uniform: UniformStrategy, options: Arguments) -> tuple[str, ...]:
    """Return the lines that set a variable which some settings want to be 1, and FSDP unset; a user's value stays."""
    if _FSDP in options:
        return ("unset CUDA_DEVICE_MAX_CONNECTIONS",)
    needed = uniform.tp_size > 1 or uniform.shares_context
    return ('export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"',) if needed else ()


def _recompute(plan: Plan, ranges: Sequence[tuple[int, int]], target: ExportTarget) -> Arguments:
    """Return every layer, or as many first layers of each range: Megatron's methods `uniform` and `block`.

    The feed-forward parts are recomputed in every layer or none, and in no layer beside whole ones.
    """
    parts = [layer.recompute is Recompute.MLP for layer in plan.layers]
    if any(parts):
        i = parts.index(False) if not all(parts) else 0
        feature = f"layers[{i}]: recompute {plan.layers[i].recompute}, where others have mlp"
        target.demand(all(parts), feature, "recompute all layers alike")
        kinds = {plan.model.types[layer.type].experts is UNSET for layer in plan.layers}
        modules = " ".join("mlp" if dense else "moe" for dense in sorted(kinds, reverse=True))
        return {"--recompute-granularity": "selective", "--recompute-modules": modules}
    recomputed = [layer.recompute is Recompute.FULL for layer in plan.layers]
    most = max(sum(recomputed[low:high]) for low, high in ranges)
    if not most:
        return {}
    method, count = ("uniform", 1) if all(recomputed) else ("block", most)
    for i, first in ((i, low) for low, high in ranges for i in range(low, high) if method == "block"):
        layer = f"layers[{i}]: recompute {plan.layers[i].recompute}"
        where = f"where another pipeline stage recomputes its first {most} layers"
        remedy = "recompute as many first layers of every pipeline stage"
        target.demand(recomputed[i] == (i - first < most), f"{layer}, {where}", remedy)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": count}


_PRECISIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("float32", "float32"): (),
    ("bfloat16", "float32"): ("--bf16",),
    ("bfloat16", "bfloat16"): ("--bf16", "--grad-reduce-in-bf16"),
    ("float16", "float32"): ("--fp16", "--accumulate-allreduce-grads-in-fp32"),
    ("float16", "float16"): ("--fp16",),
}
"""Arguments of the types of computation and reduction; with bfloat16 gradients stay in float32 by themselves."""


def _precision(plan: Plan, target: ExportTarget) -> Arguments:
    """Return the options of a plan's types; parameters and optimizer state stay in float32."""
    options = _PRECISIONS.get((plan.precision.compute, plan.precision.reduce))
    remedy = "keep parameters in float32, and reduce in float32 or as computed"
    target.demand_precision(plan, plan.precision.parameters == "float32" and options is not None, remedy)
    return dict.fromkeys(options or (), True)


def megatron_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return its two ways: its own optimizers over pipelines, and Megatron-FSDP, documented without one."""
    whole = () if has_experts(model) else (SequenceParallel.NONE,)
    parallel = *whole, SequenceParallel.MEGATRON
    contexts = contexts_of(model, drops=True)
    demands = Demands(outer=Outer.AS_LAYERS, allows=lambda each: whole_groups(each) and expert_states_alike(each))
    return (
        Limits(
            "DDP or its distributed optimizer, gradients reduced once a step",
            data_parallel=(DataParallel.DDP, DataParallel.ZERO2),
            gradient_reduction=GradientReduction.DEFERRED,
            recompute=_KINDS,
            sequence_parallel=parallel,
            types=LAYER_TYPES,
            schedules=_SCHEDULES,
            expert_grids=True,
            contexts=contexts,
            demands=demands,
        ),
        Limits(
            "Megatron-FSDP without a pipeline, gradients reduced after every micro-batch",
            data_parallel=(DataParallel.ZERO2, DataParallel.ZERO3),
            gradient_reduction=GradientReduction.EVERY_MICROBATCH,
            recompute=_KINDS,
            sequence_parallel=parallel,
            types=LAYER_TYPES,
            pipeline=False,
            expert_grids=True,
            contexts=contexts,
            demands=demands,
        ),
    )


MEGATRON = Target(
    title=_TARGET,
    version="megatron-core 0.16.1",
    sources=(
        "megatron/core/transformer/transformer_config.py: recompute_modules, pipeline_model_parallel_layout",
        "megatron/core/distributed/distributed_data_parallel_config.py: use_distributed_optimizer, use_megatron_fsdp",
        "megatron/core/pipeline_parallel/schedules.py: interleaved micro-batches are a multiple of the stages",
    ),
    limits=megatron_limits,
    unsearched=("recomputation of some layers of a stage (block)", "optimizer instances", "core_attn and layernorm"),
    file_name="args.txt",
    mark="",
    export=megatron_arguments,
    read=read_megatron,
    command=lambda plan, file: torchrun(
        plan, f'"$PRETRAIN" $(xargs < {file}) --data-path DATA --train-iters N --lr LR'
    ),
)
