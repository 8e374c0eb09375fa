"""A plan as DeepSpeed's configuration (JSON), and such a configuration as a plan.

Keys and meanings are from `deepspeed/runtime/config.py` and `runtime/zero/config.py` of 0.19.8. Stage 1 reduces the
gradients of all micro-batches once a step; stages 2 and 3 reduce them after each micro-batch. Parameters are kept in
bfloat16 in addition to their float32 copies, as by Megatron-LM's optimizers.
"""

import json
from collections.abc import Iterator, Mapping

from msgspec import UNSET

from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.io import BadInput, object_of
from shardwright.types import DataParallel, GradientReduction, Model, Plan, Precision, Recompute
from shardwright_search.space.uniform import UniformStrategy
from shardwright_search.systems.entry import Entry, Limits, Reading, Setting, Settings, program_of, torchrun
from shardwright_search.systems.exporting import (
    WHOLE_LAYERS,
    Exported,
    ExportTarget,
    adapter_text,
    imported_for,
    kernel_notes,
    loading_notes,
    loading_text,
    uniform_of,
)

_TITLE = "DeepSpeed"
_ADAPTER = "deepspeed_adapter.py"
_CHECKPOINTS = (
    "activation_checkpointing configures DeepSpeed's function alone: the model has to call it for every block, or "
    "gradient_checkpointing_enable() of transformers"
)
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}
_SETTINGS = Settings(
    read=("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "activation_checkpointing"),
    harmless=(
        *("gradient_accumulation_steps", "optimizer", "scheduler", "bf16", "fp16", "communication_data_type"),
        *("data_types", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "steps_per_print"),
        *("wall_clock_breakdown", "memory_breakdown", "dump_state", "zero_allow_untested_optimizer"),
        *("zero_force_ds_cpu_optimizer", "checkpoint", "dataloader_drop_last", "flops_profiler", "aio"),
    ),
    values={
        **dict.fromkeys(("sparse_attention", "sparse_gradients", "compression_training", "amp"), (False,)),
        **dict.fromkeys(("progressive_layer_drop", "curriculum_learning", "data_efficiency"), (False,)),
        **dict.fromkeys(("elasticity", "autotuning", "hybrid_engine", "torch_autocast"), (False,)),
        "sequence_parallel_size": (1,),
    },
    strict=False,
)
"""Keys of the whole file; the question, not the file, decides the optimizer and the precision."""
_ZERO_SETTINGS = Settings(
    read=("stage",),
    harmless=(
        *("allgather_bucket_size", "reduce_bucket_size", "contiguous_gradients", "overlap_comm", "compute_grad_norm"),
        *("stage3_prefetch_bucket_size", "prefetch_bucket_size", "stage3_max_live_parameters", "max_live_parameters"),
        *("stage3_max_reuse_distance", "max_reuse_distance", "stage3_param_persistence_threshold"),
        *("param_persistence_threshold", "stage3_model_persistence_threshold", "model_persistence_threshold"),
        *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save", "sub_group_size"),
        *("stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "elastic_checkpoint"),
        *("load_from_fp32_weights", "legacy_stage1", "round_robin_gradients", "enable_sanity_checks"),
        *("stage3_module_granularity_threshold", "module_granularity_threshold", "pipeline_loading_checkpoint"),
        *("log_trace_cache_warnings", "cpu_offload_use_pin_memory", "use_multi_rank_bucket_allreduce", "leaf_module"),
        *("memory_efficient_linear", "parameter_alignment", "override_module_apply"),
    ),
    values={
        **dict.fromkeys(("reduce_scatter", "allgather_partitions"), (True,)),
        "zero_hpz_partition_size": (1,),
        "mics_shard_size": (-1,),
    },
)
"""Keys of its ZeRO; plans do not decide the sizes of buckets and what is fetched ahead."""
_CHECKPOINT_SETTINGS = Settings(
    harmless=(
        *("partition_activations", "contiguous_memory_optimization", "synchronize_checkpoint_boundary", "profile"),
        "number_checkpoints",
    )
)
"""Keys of recomputation; activations would be partitioned among tensor-parallel ranks, of which there is only one."""
_OPTIMIZER_SETTINGS = Settings(
    harmless=("params", "legacy_fusion"),
    values={"type": ("Adam", "AdamW", "FusedAdam", "adam", "adamw")},
)
_TYPE_SETTINGS = Settings(
    harmless=(
        *("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
        *("consecutive_hysteresis", "fused_mode", "immediate_grad_update", "check_grad_overflow", "auto_cast"),
    )
)
"""Keys of bf16 and fp16; masters and states of the optimizer in 16 bits are refused."""


def deepspeed_json(plan: Plan, plan_file: object) -> Exported:
    """Return the configuration that a plan determines; optimizer and learning rate are the user's.

    Raises BadInput naming the first feature that DeepSpeed cannot express with a stock model.
    """
    target = ExportTarget(_TITLE, plan_file)
    uniform = uniform_of(plan, target, with_peft=True)
    target.demand(uniform.pp_size == 1, f"{uniform.pp_size} pipeline stages", "choose one, or write a PipelineModule")
    target.demand(uniform.layer.tp_size == 1, f"layers[0]: tp_size {uniform.layer.tp_size}", "choose tp_size 1")
    target.demand(not uniform.layer.shard_size, f"layers[0]: shard_size {uniform.layer.shard_size}", "leave it out")
    keys: dict[str, object] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": uniform.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": _zero(plan, uniform, target),
        **_precision(plan, target),
    }
    kinds = {layer.recompute for layer in plan.layers}
    target.demand(len(kinds) == 1, "recomputation of some layers", "recompute all layers or none")
    if kinds == {Recompute.FULL}:
        keys["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    split = uniform.layer.data_parallel is DataParallel.ZERO3 and uniform.layer.dp_size > 1
    feature = "a base of 8 bits, which ZeRO-3 does not shard"
    target.demand(plan.precision.base != "8bit" or not split, feature, "choose 4bit, or zero2")
    beside = ((_ADAPTER, _adapter(plan)),) if plan.model.low_rank is not UNSET else ()
    return Exported(json.dumps(keys, indent=2) + "\n", tuple(_notes(plan, kinds)), beside=beside)


def _adapter(plan: Plan) -> str:
    loaded = loading_text(plan.precision)
    imported = ("import torch\n" if loaded else "") + imported_for(plan)
    return imported.rstrip() + loaded.rstrip() + adapter_text(plan)


def _zero(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> dict[str, object]:
    if uniform.layer.dp_size == 1:
        return {"stage": 0}
    once = plan.gradient_reduction is GradientReduction.DEFERRED
    # The runtime's price may assume overlap, which is off by default below stage 3.
    hidden = {"overlap_comm": RUNTIMES[RuntimeName.DEEPSPEED].overlap is not None}
    target.demand(uniform.layer.data_parallel is not DataParallel.DDP, "layers[0]: ddp", "choose zero2 or zero3")
    if uniform.layer.data_parallel is DataParallel.ZERO2:
        return {"stage": 1 if once else 2, **hidden}
    feature = "layers[0]: zero3 that holds whole gradients over several microbatches"
    target.demand(not once or plan.num_microbatches == 1, feature, "choose gradient_reduction every_microbatch")
    # By default it keeps parameters of up to 100,000 numbers whole.
    return {"stage": 3, **hidden, "stage3_param_persistence_threshold": 0}


def _precision(plan: Plan, target: ExportTarget) -> dict[str, object]:
    """Return the number formats of computation and reduction."""
    kept, used = plan.precision.parameters, plan.precision.compute
    if plan.model.low_rank is not UNSET and kept == used == plan.precision.reduce == "bfloat16":
        types = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
        return {"bf16": {"enabled": True}, **types}
    target.demand_in_float32(plan, "float32", *_PRECISIONS)
    if used == "float32":
        return {}
    types = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return {_PRECISIONS[used]: {"enabled": True}, **types}


def _notes(plan: Plan, kinds: set[Recompute]) -> Iterator[str]:
    yield f"run it on {plan.world_size} ranks"
    if kinds == {Recompute.FULL}:
        yield _CHECKPOINTS
    if plan.model.low_rank is not UNSET:
        yield f"low-rank matrices are peft's: train.py gives DeepSpeed adapted(model) of {_ADAPTER} (--launch)"
        if plan.precision.parameters == "bfloat16":
            yield "it keeps masters of the low-rank matrices, and their states, in float32, of which the price has half"
    yield from loading_notes(plan.precision)
    yield from kernel_notes(plan)


def read_deepspeed(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a configuration, whose optimizer and precision are not read.

    Raises BadInput naming `file` for what is wrong, and for what no plan has.
    """
    keys = object_of(text, file)
    zero = keys.get("zero_optimization")
    if not isinstance(zero, Mapping):
        raise BadInput(file, "is not a configuration of DeepSpeed", "give one with zero_optimization")
    for name in ("tensor_parallel", "pipeline"):
        if keys.get(name):
            raise BadInput(file, f"{name} is not priced", "leave it out")
    _check_settings(file, keys)
    stage, size = zero.get("stage", 0), keys.get("train_micro_batch_size_per_gpu")
    if type(stage) is not int or stage not in (0, 1, 2, 3) or type(size) is not int or size < 1:
        problem = f"zero_optimization.stage {stage!r}, train_micro_batch_size_per_gpu {size!r}"
        raise BadInput(file, problem, "give a stage from 0 to 3, and samples of a rank")
    checkpoints = "activation_checkpointing" in keys
    uniform = setting.uniform(
        file,
        pp_size=1,
        micro_batch_size=size,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if stage > 1 else GradientReduction.DEFERRED,
        data_parallel=(DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO2, DataParallel.ZERO3)[stage],
        recompute=Recompute.FULL if checkpoints else Recompute.NONE,
    )
    differing = setting.differences(("train_batch_size", keys.get("train_batch_size")))
    return Reading(setting.plan(uniform, file), (*differing, *((_CHECKPOINTS,) if checkpoints else ())))


def _check_settings(file: str, keys: Mapping[str, object]) -> None:
    """Raise BadInput naming the first setting of a configuration that a plan cannot express."""
    _SETTINGS.check(file, keys)
    for name, settings in (
        ("zero_optimization", _ZERO_SETTINGS),
        ("activation_checkpointing", _CHECKPOINT_SETTINGS),
        ("optimizer", _OPTIMIZER_SETTINGS),
        ("bf16", _TYPE_SETTINGS),
        ("fp16", _TYPE_SETTINGS),
    ):
        if isinstance(section := keys.get(name), Mapping):
            settings.check(file, section, f"{name}.")


def deepspeed_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return DeepSpeed's two ways: stage 1 reduces gradients once a step, 2 and 3 after each micro-batch."""
    once, each = GradientReduction.DEFERRED, GradientReduction.EVERY_MICROBATCH
    sharded = (DataParallel.ZERO2, DataParallel.ZERO3)
    return (
        Limits("ZeRO-1, gradients reduced once a step", sharded[:1], once, WHOLE_LAYERS, tp_sizes=(1,), pipeline=False),
        Limits("ZeRO-2 or ZeRO-3, after every micro-batch", sharded, each, WHOLE_LAYERS, tp_sizes=(1,), pipeline=False),
    )


def _command(plan: Plan, file: str) -> str:
    return torchrun(plan, f"train.py --deepspeed --deepspeed_config {file}")


DEEPSPEED = Entry(
    title=_TITLE,
    version="deepspeed 0.19.8",
    sources=(
        "deepspeed/runtime/config.py and constants.py: its keys",
        "deepspeed/runtime/zero/config.py: stages 0 to 3",
    ),
    runtime=RUNTIMES[RuntimeName.DEEPSPEED],
    limits=deepspeed_limits,
    unsearched=("pipelines (PipelineModule)", "tensor parallelism (autotp_size)", "ZeRO++", "offloading"),
    file_name="deepspeed.json",
    mark="train_micro_batch_size_per_gpu",
    export=deepspeed_json,
    read=read_deepspeed,
    command=_command,
    program=program_of(
        '"$TRAIN" --deepspeed --deepspeed_config "$folder/deepspeed.json"', "path of your script, which calls DeepSpeed"
    ),
)
