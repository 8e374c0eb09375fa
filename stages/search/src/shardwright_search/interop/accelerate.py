"""A plan as what Hugging Face's accelerate starts: its ParallelismConfig and FSDP2 in Python, and its launch file.

Names are those of accelerate 1.15.0: `parallelism_config.py`, `utils/dataclasses.py`, `commands/config/config_args.py`.
Gradients are reduced with the last micro-batch, or with each where `sync_each_batch` is true.
FSDP2 shards over data-parallel and context-parallel ranks; the latter attend as torch's `context_parallel` does.
"""

import json
import re
from functools import partial

from shardwright_formats.io import BadInput
from shardwright_formats.types import (
    ContextParallel,
    DataParallel,
    GradientReduction,
    Model,
    Plan,
    Precision,
    Recompute,
)
from shardwright_search.interop.contexts import check_context, contexts_of
from shardwright_search.interop.limits import Limits, Reading, Setting, Target, torchrun
from shardwright_search.interop.target import WHOLE_LAYERS, Exported, ExportTarget, kernel_notes, uniform_of
from shardwright_search.interop.torchtitan_reader import ROTATE_METHODS
from shardwright_search.space.uniform import UniformStrategy

_TITLE = "accelerate"
_CONFIG = "accelerate.json"
_HANDLER = "TorchContextParallelConfig"
_SETUP = '''\
"""Set-up of a plan: prepare the model with ACCELERATOR, and load MICRO_BATCH_SIZE samples a rank."""

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin{imported}
from torch.distributed.fsdp import MixedPrecisionPolicy

MICRO_BATCH_SIZE = {micro_batch_size}
ACCELERATOR = Accelerator(
    parallelism_config=ParallelismConfig(dp_replicate_size={replicas}, dp_shard_size={shards}, tp_size=1{context}),
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward={reshards},
        auto_wrap_policy="transformer_based_wrap",
        activation_checkpointing={recomputes},
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.float32),
    ),
    gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={steps}, sync_each_batch={each}),
)
'''


def accelerate_setup(plan: Plan, plan_file: object) -> Exported:
    """Return the set-up of a plan of data parallelism alone, with the launch file beside it.

    Raises BadInput naming the first thing that accelerate cannot express beside a stock model.
    """
    target = ExportTarget(_TITLE, plan_file)
    uniform = uniform_of(plan, target, has_context=True)
    check_context(plan, uniform, target)
    _check_groups(uniform, target)
    target.demand(uniform.pp_size == 1, f"{uniform.pp_size} pipeline stages", "choose one")
    target.demand(uniform.tp_size == 1, f"layers[0]: tp_size {uniform.tp_size}", "choose tp_size 1")
    shards = uniform.replicas == 1 or uniform.data_parallel is not DataParallel.DDP
    target.demand(shards, "layers[0]: ddp", "choose zero2 or zero3, which FSDP2 runs")
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = kept == reduced == "float32" and used in ("float32", "bfloat16")
    target.demand_precision(plan, holds, "compute in float32 or bfloat16, and keep and reduce in float32")
    kinds = {layer.recompute for layer in plan.layers}
    target.demand(len(kinds) == 1, "recomputation of some layers", "recompute all layers or none")
    text = _SETUP.format(
        micro_batch_size=uniform.micro_batch_size,
        replicas=uniform.shard_groups,
        shards=_shards(uniform),
        context=_context(uniform),
        imported=f", {_HANDLER}" if uniform.shares_context else "",
        reshards=uniform.data_parallel is DataParallel.ZERO3,
        recomputes=kinds == {Recompute.FULL},
        compute=used,
        steps=plan.num_microbatches,
        each=plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH,
    )
    notes = [f"run it on {plan.world_size} ranks", "your script imports ACCELERATOR and prepares the model with it"]
    if uniform.shares_context:
        notes.append("each step runs inside ACCELERATOR.maybe_context_parallel, which shares out tokens and labels")
    return Exported(text, (*notes, *kernel_notes(plan)), beside=((_CONFIG, _config(plan, uniform)),))


def _check_groups(uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput where groups of shards are not of whole context-parallel groups, and of several of them."""
    feature = f"layers[0]: shard_size {uniform.shard_size} beside cp_size {uniform.cp_size}"
    holds = uniform.shard_size % uniform.cp_size == 0 and (not uniform.shares_context or _in_groups(uniform))
    target.demand(holds, feature, "choose twice cp_size, or a larger multiple")


def _in_groups(uniform: UniformStrategy) -> bool:
    return uniform.shard_groups == 1 or _shards(uniform) > 1


def _shards(uniform: UniformStrategy) -> int:
    """Return the data-parallel ranks of a group that shares states out."""
    return uniform.dp_size // uniform.shard_groups


def _context(uniform: UniformStrategy) -> str:
    """Return the arguments of context parallelism; none where there is none."""
    if not uniform.shares_context:
        return ""
    handler = f'{_HANDLER}(cp_comm_strategy="{ROTATE_METHODS[uniform.context]}")'
    return f", cp_size={uniform.cp_size}, cp_handler={handler}"


def _config(plan: Plan, uniform: UniformStrategy) -> str:
    """Return the file of `accelerate launch --config_file`, which sets the same by environment variables."""
    keys = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "no" if plan.precision.compute == "float32" else "bf16",
        "use_cpu": False,
        "debug": False,
        "num_processes": plan.world_size,
        "num_machines": sum(group.count for group in plan.cluster.nodes),
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": uniform.data_parallel is DataParallel.ZERO3,
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
        "parallelism_config_cp_size": uniform.cp_size,
        "parallelism_config_cp_backend": "torch",
        "parallelism_config_cp_comm_strategy": ROTATE_METHODS[uniform.context],
    }


def read_setup(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a set-up as `accelerate_setup` writes it; raises BadInput where a setting is missing."""

    def given(name: str, kind: str = r"\d{1,7}") -> str:
        match = re.search(rf"\b{name} ?= ?({kind})\b", text)
        if match is None:
            raise BadInput(file, f"sets no {name}", "give a set-up as --launch writes it")
        return match[1]

    cp_size = int(given("cp_size")) if re.search(r"\bcp_size\b", text) else 1
    method = given("cp_comm_strategy", '"(?:allgather|alltoall)') if cp_size > 1 else ""
    shards, words = int(given("dp_shard_size")) * cp_size, "True|False"
    uniform = UniformStrategy(
        cp_size=cp_size,
        context=ContextParallel.RING if "alltoall" in method else ContextParallel.GATHER,
        micro_batch_size=int(given("MICRO_BATCH_SIZE")),
        data_parallel=DataParallel.ZERO3 if given("reshard_after_forward", words) == "True" else DataParallel.ZERO2,
        recompute=Recompute.FULL if given("activation_checkpointing", words) == "True" else Recompute.NONE,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH
        if given("sync_each_batch", words) == "True"
        else GradientReduction.DEFERRED,
        shard_size=shards if 1 < shards < setting.cluster.num_devices else 0,
    )
    return Reading(setting.plan(uniform, file))


def accelerate_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return its two ways: FSDP2 that reduces each microbatch's gradients, or those of all with the last."""
    once, each = GradientReduction.DEFERRED, GradientReduction.EVERY_MICROBATCH
    sharded = (DataParallel.ZERO2, DataParallel.ZERO3)
    alone = partial(Limits, tp_sizes=(1,), pipeline=False, contexts=contexts_of(model))
    return (
        alone("FSDP2, gradients reduced once a step", sharded, once, WHOLE_LAYERS),
        alone("FSDP2, after every micro-batch", sharded, each, WHOLE_LAYERS),
    )


ACCELERATE = Target(
    title=_TITLE,
    version="accelerate 1.15.0",
    sources=(
        "accelerate/parallelism_config.py and utils/dataclasses.py: ParallelismConfig, FSDP2, accumulation",
        "accelerate/commands/config/config_args.py: the launch file",
    ),
    limits=accelerate_limits,
    unsearched=("tensor parallelism of transformers' plans", "HSDP", "DDP", "offloading"),
    file_name="accelerate_setup.py",
    mark="FullyShardedDataParallelPlugin",
    export=accelerate_setup,
    read=read_setup,
    command=lambda plan, file: torchrun(plan, "train.py") + f"  # train.py imports {file}",
)
