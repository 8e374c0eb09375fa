"""A plan as DeepSpeed's configuration (JSON), and such a configuration as a plan.

Keys and meanings are those of `deepspeed/runtime/config.py` and `runtime/zero/config.py` of 0.19.8. Stage 1 reduces the
gradients of all micro-batches once a step, stages 2 and 3 those of each. Parameters are kept in bfloat16 beside their
float32 copies, as by Megatron-LM's optimizers.
"""

import json
from collections.abc import Iterator, Mapping

from shardwright_formats.io import BadInput
from shardwright_formats.types import DataParallel, GradientReduction, Model, Plan, Precision, Recompute
from shardwright_search.interop.limits import Limits, Reading, Setting, Target, torchrun
from shardwright_search.interop.target import WHOLE_LAYERS, Exported, ExportTarget, kernel_notes, uniform_of
from shardwright_search.space.uniform import UniformStrategy

_TITLE = "DeepSpeed"
_CHECKPOINTS = (
    "activation_checkpointing configures DeepSpeed's function alone: the model has to call it for every block, or "
    "gradient_checkpointing_enable() of transformers"
)
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def deepspeed_json(plan: Plan, plan_file: object) -> Exported:
    """Return the configuration that a plan decides; optimizer and learning rate are the user's.

    Raises BadInput naming the first thing that DeepSpeed cannot express beside a stock model.
    """
    target = ExportTarget(_TITLE, plan_file)
    uniform = uniform_of(plan, target)
    target.demand(uniform.pp_size == 1, f"{uniform.pp_size} pipeline stages", "choose one, or write a PipelineModule")
    target.demand(uniform.tp_size == 1, f"layers[0]: tp_size {uniform.tp_size}", "choose tp_size 1")
    target.demand(not uniform.shard_size, f"layers[0]: shard_size {uniform.shard_size}", "leave it out")
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
    return Exported(json.dumps(keys, indent=2) + "\n", tuple(_notes(plan, kinds)))


def _zero(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> dict[str, object]:
    if uniform.dp_size == 1:
        return {"stage": 0}
    once = plan.gradient_reduction is GradientReduction.DEFERRED
    target.demand(uniform.data_parallel is not DataParallel.DDP, "layers[0]: ddp", "choose zero2 or zero3")
    if uniform.data_parallel is DataParallel.ZERO2:
        return {"stage": 1 if once else 2}
    feature = "layers[0]: zero3 that holds whole gradients over several microbatches"
    target.demand(not once or plan.num_microbatches == 1, feature, "choose gradient_reduction every_microbatch")
    # By default it keeps parameters of up to 100,000 numbers whole.
    return {"stage": 3, "stage3_param_persistence_threshold": 0}


def _precision(plan: Plan, target: ExportTarget) -> dict[str, object]:
    """Return the types of computation and reduction; gradients are summed in float32."""
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = kept == reduced == "float32" and (used == "float32" or used in _PRECISIONS)
    target.demand_precision(plan, holds, "compute in float32, bfloat16 or float16, and keep and reduce in float32")
    if used == "float32":
        return {}
    types = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    return {_PRECISIONS[used]: {"enabled": True}, **types}


def _notes(plan: Plan, kinds: set[Recompute]) -> Iterator[str]:
    yield f"run it on {plan.world_size} ranks"
    if kinds == {Recompute.FULL}:
        yield _CHECKPOINTS
    yield from kernel_notes(plan)


def read_deepspeed(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a configuration; its optimizer and precision are not read.

    Raises BadInput naming `file` for what is wrong, and for what no plan has.
    """
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(file, f"not valid JSON ({error})", "write the file again") from None
    zero = keys.get("zero_optimization", {}) if isinstance(keys, dict) else None
    if not isinstance(zero, Mapping):
        raise BadInput(file, "is no configuration of DeepSpeed", "give one with zero_optimization")
    for name in ("tensor_parallel", "pipeline"):
        if keys.get(name):
            raise BadInput(file, f"{name} is not priced", "leave it out")
    stage, size = zero.get("stage", 0), keys.get("train_micro_batch_size_per_gpu")
    if stage not in (0, 1, 2, 3) or not isinstance(size, int) or isinstance(size, bool) or size < 1:
        problem = f"zero_optimization.stage {stage!r}, train_micro_batch_size_per_gpu {size!r}"
        raise BadInput(file, problem, "give a stage from 0 to 3, and samples of a rank")
    checkpoints = "activation_checkpointing" in keys
    uniform = UniformStrategy(
        micro_batch_size=size,
        data_parallel=(DataParallel.DDP, DataParallel.ZERO2, DataParallel.ZERO2, DataParallel.ZERO3)[stage],
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if stage > 1 else GradientReduction.DEFERRED,
        recompute=Recompute.FULL if checkpoints else Recompute.NONE,
    )
    return Reading(setting.plan(uniform, file), (_CHECKPOINTS,) if checkpoints else ())


def deepspeed_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return its two ways: stage 1, which reduces gradients once a step, and 2 and 3, those of each microbatch."""
    once, each = GradientReduction.DEFERRED, GradientReduction.EVERY_MICROBATCH
    sharded = (DataParallel.ZERO2, DataParallel.ZERO3)
    return (
        Limits("ZeRO-1, gradients reduced once a step", sharded[:1], once, WHOLE_LAYERS, tp_sizes=(1,), pipeline=False),
        Limits("ZeRO-2 or ZeRO-3, after every micro-batch", sharded, each, WHOLE_LAYERS, tp_sizes=(1,), pipeline=False),
    )


def _command(plan: Plan, file: str) -> str:
    return torchrun(plan, f"train.py --deepspeed --deepspeed_config {file}")


DEEPSPEED = Target(
    title=_TITLE,
    version="deepspeed 0.19.8",
    sources=(
        "deepspeed/runtime/config.py and constants.py: its keys",
        "deepspeed/runtime/zero/config.py: stages 0 to 3",
    ),
    limits=deepspeed_limits,
    unsearched=("pipelines (PipelineModule)", "tensor parallelism (autotp_size)", "ZeRO++", "offloading"),
    file_name="deepspeed.json",
    mark="train_micro_batch_size_per_gpu",
    export=deepspeed_json,
    read=read_deepspeed,
    command=_command,
)
