"""A plan as command-line arguments of Megatron-LM.

Names and meanings are those of `megatron/training/arguments.py` and `megatron/core/transformer/` in its main branch of
late 2025. Ranks are numbered as its default order `tp-cp-ep-dp-pp` numbers them.

Data parallelism. DDP is Megatron's own. ZeRO-2 whose gradients are reduced once a step is its distributed optimizer:
the same messages, one reduce-scatter and one all-gather a step, and the whole gradients that deferred reduction holds
anyway. ZeRO-3, and ZeRO-2 that reduces after every microbatch, is Megatron-FSDP, which does so, and which is documented
beside tensor parallelism but not beside a pipeline. DDP that reduces after every microbatch, and ZeRO-3 that holds
whole gradients over several, it has not.
"""

import shlex
from collections.abc import Iterator

from shardwright_formats.types import DataParallel, GradientReduction, Plan, Recompute, Schedule, SequenceParallel
from shardwright_search.interop.megatron_model import Options, model_notes, model_options
from shardwright_search.interop.target import Degrees, Exported, Target, kernel_notes

_TARGET = "Megatron-LM"
_FSDP = "--use-megatron-fsdp"
_SCHEDULES = (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B)
"""Of a pipeline; which of both follows from the layer ranges of a stage."""


def megatron_arguments(plan: Plan, plan_file: object) -> Exported:
    """The arguments that a plan decides, one option a line; those of the data and of the learning rate are the user's.

    Raises BadInput naming the first thing that Megatron-LM cannot express.
    """
    target = Target(_TARGET, plan_file)
    degrees = Degrees.of(plan, target)
    holds = plan.schedule in _SCHEDULES or degrees.pp_size == 1
    target.demand(holds, f"the schedule {plan.schedule}", f"choose {' or '.join(_SCHEDULES)}")
    options = {
        **model_options(plan.model, target),
        "--tensor-model-parallel-size": degrees.tp_size,
        "--pipeline-model-parallel-size": degrees.pp_size,
        "--sequence-parallel": degrees.sequence_parallel is SequenceParallel.MEGATRON,
        "--micro-batch-size": degrees.micro_batch_size,
        "--global-batch-size": plan.global_batch_size,
        "--optimizer": "adam",
        **_partition(degrees),
        **_data_parallel(plan, degrees, target),
        **_recompute(plan, degrees, target),
        **_precision(plan, target),
    }
    said = {option: value for option, value in options.items() if value is not False}
    words = ([option] if value is True else [option, str(value)] for option, value in said.items())
    text = "".join(f"{shlex.join(option)}\n" for option in words)
    return Exported(text, tuple(_notes(plan, degrees, said)), _environment(degrees, said))


def _partition(degrees: Degrees) -> Options:
    """How layers are cut; the layout string where equal ranges, or a first and a last one of their own, do not do."""
    sizes = degrees.range_sizes
    if len(set(sizes)) == 1:
        return {"--num-layers-per-virtual-pipeline-stage": sizes[0]} if degrees.chunks > 1 else {}
    if degrees.chunks == 1 and min(sizes) > 0 and len(set(sizes[1:-1])) <= 1:
        return {"--decoder-first-pipeline-num-layers": sizes[0], "--decoder-last-pipeline-num-layers": sizes[-1]}
    ranges = "|".join(f"t*{size}" if size else "" for size in sizes)
    return {"--pipeline-model-parallel-layout": f"E{ranges}L"}


def _data_parallel(plan: Plan, degrees: Degrees, target: Target) -> Options:
    kind, one_microbatch = degrees.data_parallel, plan.num_microbatches == 1
    once = one_microbatch or plan.gradient_reduction is GradientReduction.DEFERRED
    if degrees.dp_size == 1:
        return {}
    if kind is DataParallel.DDP:
        what = "layers[0]: ddp that reduces gradients after every microbatch"
        target.demand(once, what, "choose gradient_reduction deferred")
        return {}
    # Its optimizer instances are groups of neighbouring data-parallel ranks, and replicas of one another.
    groups: Options = {"--num-distributed-optimizer-instances": degrees.shard_groups if degrees.shard_size else False}
    if kind is DataParallel.ZERO2 and once:
        return {"--use-distributed-optimizer": True, **groups}
    how = kind if kind is DataParallel.ZERO3 else f"{kind} that reduces gradients after every microbatch"
    remedy = "choose zero2 with gradient_reduction deferred, or one pipeline stage"
    target.demand(degrees.pp_size == 1, f"layers[0]: {how} in several pipeline stages", remedy)
    what = f"layers[0]: {kind} that holds whole gradients over several microbatches"
    target.demand(not once or one_microbatch, what, "choose gradient_reduction every_microbatch")
    return {
        _FSDP: True,
        "--data-parallel-sharding-strategy": "optim_grads_params" if kind is DataParallel.ZERO3 else "optim_grads",
        # What Megatron-FSDP demands beside it.
        "--use-distributed-optimizer": True,
        "--no-gradient-accumulation-fusion": True,
        "--ckpt-format": "fsdp_dtensor",
        **groups,
        "--outer-dp-sharding-strategy": "no_shard" if degrees.shard_size else False,
    }


def _notes(plan: Plan, degrees: Degrees, options: Options) -> Iterator[str]:
    fsdp = _FSDP in options
    yield f"run it on {plan.world_size} ranks"
    if fsdp:
        yield "unset CUDA_DEVICE_MAX_CONNECTIONS, as Megatron-FSDP wants it"
    elif degrees.tp_size > 1:
        yield "set CUDA_DEVICE_MAX_CONNECTIONS=1 where the GPUs are older than Blackwell"
    if plan.num_microbatches == 1 and "--use-distributed-optimizer" in options and not fsdp:
        yield "its distributed optimizer holds whole gradients with one microbatch too, 4 bytes a parameter"
    yield from model_notes(plan.model)
    yield from kernel_notes(plan)


def _environment(degrees: Degrees, options: Options) -> tuple[str, ...]:
    """The variable that some settings want to be 1 and another one not: what the user has set counts where it may."""
    if _FSDP in options:
        return ("unset CUDA_DEVICE_MAX_CONNECTIONS",)
    return ('export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"',) if degrees.tp_size > 1 else ()


def _recompute(plan: Plan, degrees: Degrees, target: Target) -> Options:
    """Every layer, or as many first layers of each range: Megatron's methods `uniform` and `block`."""
    again = [layer.recompute is Recompute.FULL for layer in plan.layers]
    most = max(sum(again[low:high]) for low, high in degrees.ranges)
    if not most:
        return {}
    if all(again):
        method, count = "uniform", 1
    else:
        method, count = "block", most
        for i, first in ((i, low) for low, high in degrees.ranges for i in range(low, high)):
            what = f"layers[{i}]: recompute {plan.layers[i].recompute}"
            where = f"where another pipeline stage recomputes its first {most} layers"
            remedy = "recompute as many first layers of every pipeline stage"
            target.demand(again[i] == (i - first < most), f"{what}, {where}", remedy)
    return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": count}


_PRECISIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("float32", "float32"): (),
    ("bfloat16", "float32"): ("--bf16",),
    ("bfloat16", "bfloat16"): ("--bf16", "--grad-reduce-in-bf16"),
    ("float16", "float32"): ("--fp16", "--accumulate-allreduce-grads-in-fp32"),
    ("float16", "float16"): ("--fp16",),
}
"""By the types of computation and reduction; beside bfloat16 gradients stay in float32 by themselves."""


def _precision(plan: Plan, target: Target) -> Options:
    """Parameters and optimizer state stay in float32."""
    kept, known = plan.precision.parameters, _PRECISIONS.get((plan.precision.compute, plan.precision.reduce))
    remedy = "keep parameters in float32, and reduce in float32 or as computed"
    target.demand_precision(plan, kept == "float32" and known is not None, remedy)
    return dict.fromkeys(known or (), True)
