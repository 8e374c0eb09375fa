"""A plan as what Hugging Face's accelerate starts: its ParallelismConfig and FSDP2 in Python, and its launch file.

Names are from accelerate 1.15.0: `parallelism_config.py`, `utils/dataclasses.py`, `commands/config/config_args.py`.
Gradients are reduced with the last micro-batch, or with each one if `sync_each_batch` is true.
FSDP2 shards over data-parallel and context-parallel ranks; attention over the latter is torch's `context_parallel`.
"""

import ast
import json
import re
from collections.abc import Mapping
from functools import partial

from msgspec import UNSET

from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.io import BadInput
from shardwright.types import ContextParallel, DataParallel, GradientReduction, Model, Plan, Precision, Recompute
from shardwright_search.space.uniform import UniformStrategy
from shardwright_search.systems.entry import Entry, Limits, Reading, Setting, Settings, program_of, torchrun
from shardwright_search.systems.exporting import (
    WHOLE_LAYERS,
    Exported,
    ExportTarget,
    adapter_text,
    check_context,
    contexts_of,
    imported_for,
    kernel_notes,
    loading_notes,
    loading_text,
    uniform_of,
)
from shardwright_search.systems.torchtitan import ROTATE_METHODS

_TITLE = "accelerate"
_CONFIG = "accelerate.json"
_HANDLER = "TorchContextParallelConfig"
_SETTINGS: Mapping[str, Settings] = {
    "Accelerator": Settings(
        harmless=(
            *("parallelism_config", "fsdp_plugin", "gradient_accumulation_plugin", "gradient_accumulation_steps"),
            *("mixed_precision", "log_with", "project_dir", "project_config", "rng_types", "split_batches"),
            *("step_scheduler_with_optimizer", "device_placement", "dataloader_config", "dynamo_backend"),
            "dynamo_plugin",
        ),
        values={"cpu": (False,)},
    ),
    "ParallelismConfig": Settings(
        harmless=(
            *("dp_replicate_size", "dp_shard_size", "cp_size", "cp_handler", "tp_handler", "sp_handler", "sp_backend"),
        ),
        values={"tp_size": (1,), "sp_size": (1,), "cp_backend": ("torch",)},
    ),
    "FullyShardedDataParallelPlugin": Settings(
        read=("reshard_after_forward", "activation_checkpointing"),
        harmless=(
            *("fsdp_version", "mixed_precision_policy", "state_dict_type", "state_dict_config"),
            *("optim_state_dict_config", "limit_all_gathers", "use_orig_params", "param_init_fn"),
            *("sync_module_states", "cpu_ram_efficient_loading", "transformer_cls_names_to_wrap", "min_num_params"),
            # How communication is hidden is the question's --runtime.
            *("backward_prefetch", "forward_prefetch"),
        ),
        values={
            "sharding_strategy": ("FULL_SHARD",),
            "auto_wrap_policy": ("transformer_based_wrap", "TRANSFORMER_BASED_WRAP"),
        },
    ),
    _HANDLER: Settings(read=("cp_comm_strategy",)),
    "GradientAccumulationPlugin": Settings(
        read=("sync_each_batch",), harmless=("num_steps", "adjust_scheduler", "sync_with_dataloader")
    ),
}
"""Arguments of accelerate's classes that a set-up calls; the question decides how many micro-batches accumulate."""
_SETUP = '''\
"""Set-up of a plan: prepare the model with ACCELERATOR, and load MICRO_BATCH_SIZE samples a rank."""

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin{imported}
{peft}from torch.distributed.fsdp import MixedPrecisionPolicy

MICRO_BATCH_SIZE = {micro_batch_size}
ACCELERATOR = Accelerator(
    parallelism_config=ParallelismConfig(dp_replicate_size={replicas}, dp_shard_size={shards}, tp_size=1{context}),
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward={reshards},
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing={recomputes},
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.{reduce}),
    ),
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={steps}, sync_each_batch={each}),
){adapter}
'''


def accelerate_setup(plan: Plan, plan_file: object) -> Exported:
    """Return the set-up of a plan with data parallelism only, and its launch file.

    Raises BadInput naming the first feature that accelerate cannot express with a stock model.
    """
    target = ExportTarget(_TITLE, plan_file)
    uniform = uniform_of(plan, target, has_context=True, with_peft=True)
    check_context(plan, uniform, target)
    _check_groups(uniform, target)
    target.demand(uniform.pp_size == 1, f"{uniform.pp_size} pipeline stages", "choose one")
    target.demand(uniform.layer.tp_size == 1, f"layers[0]: tp_size {uniform.layer.tp_size}", "choose tp_size 1")
    shards = uniform.replicas == 1 or uniform.layer.data_parallel is not DataParallel.DDP
    target.demand(shards, "layers[0]: ddp", "choose zero2 or zero3, which FSDP2 runs")
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = used in ("float32", "bfloat16") and kept == reduced and kept in ("float32", used)
    remedy = "compute in float32 or bfloat16, and keep and reduce in float32, or all in bfloat16"
    target.demand_precision(plan, holds, remedy)
    target.demand(plan.precision.base != "8bit", "a base of 8 bits, which FSDP2 does not shard", "choose 4bit")
    kinds = {layer.recompute for layer in plan.layers}
    target.demand(len(kinds) == 1, "recomputation of some layers", "recompute all layers or none")
    adapter = adapter_text(plan)
    text = _SETUP.format(
        adapter=loading_text(plan.precision).rstrip("\n") + adapter.rstrip("\n"),
        peft=imported_for(plan),
        reduce=plan.precision.reduce,
        micro_batch_size=uniform.micro_batch_size,
        replicas=uniform.shard_groups,
        shards=_shards(uniform),
        context=_context(uniform),
        imported=f", {_HANDLER}" if uniform.shares_context else "",
        reshards=uniform.layer.data_parallel is DataParallel.ZERO3,
        recomputes=kinds == {Recompute.FULL},
        compute=plan.precision.compute,
        steps=plan.num_microbatches,
        each=plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH,
    )
    notes = [f"run it on {plan.world_size} ranks", "your script imports ACCELERATOR and prepares the model with it"]
    if adapter:
        notes.append("low-rank matrices are peft's: your script prepares adapted(model)")
    notes += loading_notes(plan.precision)
    if uniform.shares_context:
        notes.append("each step runs inside ACCELERATOR.maybe_context_parallel, which splits tokens and labels")
    return Exported(text, (*notes, *kernel_notes(plan)), beside=((_CONFIG, _config(plan, uniform)),))


def _check_groups(uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput unless shard groups consist of several whole context-parallel groups."""
    shard_size, cp_size = uniform.layer.shard_size, uniform.layer.cp_size
    feature = f"layers[0]: shard_size {shard_size} beside cp_size {cp_size}"
    holds = shard_size % cp_size == 0 and (not uniform.shares_context or _in_groups(uniform))
    target.demand(holds, feature, "choose twice cp_size, or a larger multiple")


def _in_groups(uniform: UniformStrategy) -> bool:
    return uniform.shard_groups == 1 or _shards(uniform) > 1


def _shards(uniform: UniformStrategy) -> int:
    """Return the number of data-parallel ranks over which states are sharded."""
    return uniform.layer.dp_size // uniform.shard_groups


def _context(uniform: UniformStrategy) -> str:
    """Return the arguments for context parallelism; empty without it."""
    if not uniform.shares_context:
        return ""
    handler = f'{_HANDLER}(cp_comm_strategy="{ROTATE_METHODS[uniform.layer.context]}")'
    return f", cp_size={uniform.layer.cp_size}, cp_handler={handler}"


def _config(plan: Plan, uniform: UniformStrategy) -> str:
    """Return the file for `accelerate launch --config_file`, which has the same effect by environment variables."""
    keys = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "no" if plan.precision.compute == plan.precision.parameters else "bf16",
        "use_cpu": False,
        "debug": False,
        "num_processes": plan.world_size,
        "num_machines": sum(group.count for group in plan.cluster.nodes),
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": uniform.layer.data_parallel is DataParallel.ZERO3,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_activation_checkpointing": plan.layers[0].recompute is Recompute.FULL,
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": uniform.shard_groups,
            "parallelism_config_dp_shard_size": _shards(uniform),
            "parallelism_config_tp_size": 1,
            **_context_keys(uniform),
        },
    }
    return json.dumps(keys, indent=2) + "\n"


def _context_keys(uniform: UniformStrategy) -> dict[str, int | str]:
    if not uniform.shares_context:
        return {}
    return {
        "parallelism_config_cp_size": uniform.layer.cp_size,
        "parallelism_config_cp_backend": "torch",
        "parallelism_config_cp_comm_strategy": ROTATE_METHODS[uniform.layer.context],
    }


def read_setup(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a set-up as written by `accelerate_setup`; raise BadInput for a missing setting."""

    def given(name: str, kind: str = r"[1-9]\d{0,6}") -> str:
        match = re.search(rf"\b{name} ?= ?({kind})\b", text)
        if match is None:
            raise BadInput(file, f"sets no {name}", "give a set-up as --launch writes it")
        return match[1]

    _check_settings(text, file)
    if "LoraConfig(" in text and setting.model.low_rank is UNSET:
        raise BadInput(file, "trains low-rank matrices", "ask with --lora")
    cp_size = int(given("cp_size")) if re.search(r"\bcp_size\b", text) else 1
    method = given("cp_comm_strategy", '"(?:allgather|alltoall)') if cp_size > 1 else ""
    shards, words = int(given("dp_shard_size")) * cp_size, "True|False"
    each = given("sync_each_batch", words) == "True"
    uniform = setting.uniform(
        file,
        pp_size=1,
        micro_batch_size=int(given("MICRO_BATCH_SIZE")),
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if each else GradientReduction.DEFERRED,
        cp_size=cp_size,
        context=ContextParallel.RING if "alltoall" in method else ContextParallel.GATHER,
        data_parallel=DataParallel.ZERO3 if given("reshard_after_forward", words) == "True" else DataParallel.ZERO2,
        recompute=Recompute.FULL if given("activation_checkpointing", words) == "True" else Recompute.NONE,
        shard_size=shards if 1 < shards < setting.cluster.num_devices else 0,
    )
    return Reading(setting.plan(uniform, file))


def _check_settings(text: str, file: str) -> None:
    """Raise BadInput naming the first argument of accelerate's classes that a plan cannot express."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise BadInput(file, f"is not Python ({type(error).__name__})", "correct it") from None
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name not in _SETTINGS:
            continue
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise BadInput(file, f"{name} has arguments without names", "write each as NAME=VALUE")
        arguments = {str(keyword.arg): _value(text, keyword.value) for keyword in call.keywords}
        _SETTINGS[name].check(file, arguments, f"{name}.")


def _value(text: str, node: ast.expr) -> object:
    """Return the value of a constant expression; for others, the source text."""
    return node.value if isinstance(node, ast.Constant) else ast.get_source_segment(text, node)


def accelerate_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return accelerate's two ways: FSDP2 reducing gradients once a step, or after each micro-batch."""
    once, each = GradientReduction.DEFERRED, GradientReduction.EVERY_MICROBATCH
    sharded = (DataParallel.ZERO2, DataParallel.ZERO3)
    alone = partial(Limits, tp_sizes=(1,), pipeline=False, contexts=contexts_of(model))
    return (
        alone("FSDP2, gradients reduced once a step", sharded, once, WHOLE_LAYERS),
        alone("FSDP2, after every micro-batch", sharded, each, WHOLE_LAYERS),
    )


ACCELERATE = Entry(
    title=_TITLE,
    version="accelerate 1.15.0",
    sources=(
        "accelerate/parallelism_config.py and utils/dataclasses.py: ParallelismConfig, FSDP2, accumulation",
        "accelerate/commands/config/config_args.py: the launch file",
    ),
    runtime=RUNTIMES[RuntimeName.ACCELERATE],
    limits=accelerate_limits,
    unsearched=("tensor parallelism of transformers' plans", "HSDP", "DDP", "offloading"),
    file_name="accelerate_setup.py",
    mark="FullyShardedDataParallelPlugin",
    export=accelerate_setup,
    read=read_setup,
    command=lambda plan, file: torchrun(plan, "train.py") + f"  # train.py imports {file}",
    program=program_of('"$TRAIN"', "path of your script, which imports accelerate_setup"),
)
