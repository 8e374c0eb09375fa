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

from shardwright_formats.types.plan import GradientReduction, Plan, Schedule
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_search.interop.target import Degrees, Exported, Target, kernel_notes

__all__ = ["megatron_arguments"]

_TARGET = "Megatron-LM"
_FSDP = "--use-megatron-fsdp"


def megatron_arguments(plan: Plan, plan_file: object) -> Exported:
    """The arguments that a plan decides, one option a line; those of the model itself and of the data are the user's.

    Raises BadInput naming the first thing that Megatron-LM cannot express.
    """
    target = Target(_TARGET, plan_file)
    degrees = Degrees.of(plan, target)
    holds = plan.schedule is not Schedule.GPIPE or degrees.pp_size == 1
    target.demand(holds, "the schedule gpipe", "choose 1f1b or interleaved_1f1b")
    options = [
        *_sizes(plan, degrees),
        *_partition(degrees),
        *_data_parallel(plan, degrees, target),
        *_recompute(plan, degrees, target),
        *_precision(plan, target),
    ]
    text = "".join(f"{shlex.join(option)}\n" for option in options)
    return Exported(text, tuple(_notes(plan, degrees, options)))


def _sizes(plan: Plan, degrees: Degrees) -> Iterator[list[str]]:
    yield ["--num-layers", str(len(plan.layers))]
    yield ["--seq-length", str(plan.model.sequence_length)]
    if not plan.model.tied:
        yield ["--untie-embeddings-and-output-weights"]
    yield ["--tensor-model-parallel-size", str(degrees.tp_size)]
    yield ["--pipeline-model-parallel-size", str(degrees.pp_size)]
    if degrees.sequence_parallel is SequenceParallel.MEGATRON:
        yield ["--sequence-parallel"]
    yield ["--micro-batch-size", str(degrees.micro_batch_size)]
    yield ["--global-batch-size", str(plan.global_batch_size)]
    yield ["--optimizer", "adam"]


def _partition(degrees: Degrees) -> Iterator[list[str]]:
    """How layers are cut; the layout string where equal ranges, or a first and a last one of their own, do not do."""
    sizes = degrees.range_sizes
    if len(set(sizes)) == 1:
        if degrees.chunks > 1:
            yield ["--num-layers-per-virtual-pipeline-stage", str(sizes[0])]
    elif degrees.chunks == 1 and min(sizes) > 0 and len(set(sizes[1:-1])) <= 1:
        yield ["--decoder-first-pipeline-num-layers", str(sizes[0])]
        yield ["--decoder-last-pipeline-num-layers", str(sizes[-1])]
    else:
        ranges = [f"t*{size}" if size else "" for size in sizes]
        yield ["--pipeline-model-parallel-layout", f"E{'|'.join(ranges)}L"]


def _data_parallel(plan: Plan, degrees: Degrees, target: Target) -> Iterator[list[str]]:
    if degrees.dp_size == 1:
        return
    once = plan.num_microbatches == 1 or plan.gradient_reduction is GradientReduction.DEFERRED
    if degrees.data_parallel is DataParallel.DDP:
        what = "layers[0]: ddp that reduces gradients after every microbatch"
        target.demand(once, what, "choose gradient_reduction deferred")
    elif degrees.data_parallel is DataParallel.ZERO2 and once:
        yield ["--use-distributed-optimizer"]
        yield from _shard_groups(degrees)
    else:
        yield from _fsdp(plan, degrees, once, target)


def _fsdp(plan: Plan, degrees: Degrees, once: bool, target: Target) -> Iterator[list[str]]:
    kind = degrees.data_parallel
    how = kind if kind is DataParallel.ZERO3 else f"{kind} that reduces gradients after every microbatch"
    remedy = "choose zero2 with gradient_reduction deferred, or one pipeline stage"
    target.demand(degrees.pp_size == 1, f"layers[0]: {how} in several pipeline stages", remedy)
    what = f"layers[0]: {kind} that holds whole gradients over several microbatches"
    target.demand(not once or plan.num_microbatches == 1, what, "choose gradient_reduction every_microbatch")
    yield [_FSDP]
    sharded = "optim_grads_params" if kind is DataParallel.ZERO3 else "optim_grads"
    yield ["--data-parallel-sharding-strategy", sharded]
    # What Megatron-FSDP demands beside it.
    yield ["--use-distributed-optimizer"]
    yield ["--no-gradient-accumulation-fusion"]
    yield ["--ckpt-format", "fsdp_dtensor"]
    yield from _shard_groups(degrees)
    if degrees.shard_size:
        yield ["--outer-dp-sharding-strategy", "no_shard"]


def _shard_groups(degrees: Degrees) -> Iterator[list[str]]:
    """Its optimizer instances are groups of neighbouring data-parallel ranks, and replicas of one another."""
    if degrees.shard_size:
        yield ["--num-distributed-optimizer-instances", str(degrees.shard_groups)]


def _notes(plan: Plan, degrees: Degrees, options: list[list[str]]) -> Iterator[str]:
    fsdp = [_FSDP] in options
    yield f"run it on {plan.world_size} ranks"
    if fsdp:
        yield "unset CUDA_DEVICE_MAX_CONNECTIONS, as Megatron-FSDP wants it"
    elif degrees.tp_size > 1:
        yield "set CUDA_DEVICE_MAX_CONNECTIONS=1 where the GPUs are older than Blackwell"
    if plan.num_microbatches == 1 and ["--use-distributed-optimizer"] in options and not fsdp:
        yield "its distributed optimizer holds whole gradients with one microbatch too, 4 bytes a parameter"
    yield from kernel_notes(plan)


def _recompute(plan: Plan, degrees: Degrees, target: Target) -> Iterator[list[str]]:
    """Every layer, or as many first layers of each range: Megatron's methods `uniform` and `block`."""
    again = [layer.recompute is Recompute.FULL for layer in plan.layers]
    if not any(again):
        return
    yield ["--recompute-granularity", "full"]
    if all(again):
        yield ["--recompute-method", "uniform"]
        yield ["--recompute-num-layers", "1"]
        return
    most = max(sum(again[low:high]) for low, high in degrees.ranges)
    for low, high in degrees.ranges:
        for i in range(low, high):
            what = (
                f"layers[{i}]: recompute {plan.layers[i].recompute}, where another pipeline stage recomputes its first "
                f"{most} layers"
            )
            remedy = "recompute as many first layers of every pipeline stage"
            target.demand(again[i] == (i - low < most), what, remedy)
    yield ["--recompute-method", "block"]
    yield ["--recompute-num-layers", str(most)]


def _precision(plan: Plan, target: Target) -> Iterator[list[str]]:
    """Parameters and optimizer state stay in float32; beside bfloat16 gradients do by themselves."""
    match plan.precision.parameters, plan.precision.compute, plan.precision.reduce:
        case "float32", "float32", "float32":
            return
        case "float32", "bfloat16", "float32":
            yield ["--bf16"]
        case "float32", "bfloat16", "bfloat16":
            yield ["--bf16"]
            yield ["--grad-reduce-in-bf16"]
        case "float32", "float16", "float32":
            yield ["--fp16"]
            yield ["--accumulate-allreduce-grads-in-fp32"]
        case "float32", "float16", "float16":
            yield ["--fp16"]
        case _:
            remedy = "keep parameters in float32, and reduce in float32 or as computed"
            target.demand_precision(plan, False, remedy)
