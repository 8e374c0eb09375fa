"""A TOML configuration of torchtitan as a plan: what its run does with it."""

import tomllib
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import (
    ContextParallel,
    DataParallel,
    ExpertStrategy,
    GradientReduction,
    Plan,
    Recompute,
    SequenceParallel,
)
from shardwright_search.interop.limits import Reading, Setting
from shardwright_search.space.uniform import UniformStrategy

ROTATE_METHODS = {ContextParallel.GATHER: "allgather", ContextParallel.RING: "alltoall"}
"""Values of `context_parallel_rotate_method`, the first by default: keys go to all ranks, or one further."""
_MODES = ("none", "full", "selective")
_BY_OPERATOR = (
    "torchtitan's selective recomputation by operator is priced as results of products kept; it keeps every second one"
)


def read_torchtitan(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a configuration, with its defaults for what it leaves out.

    Raises BadInput naming `file` for what is wrong, and for what no plan has.
    """
    try:
        sections: Mapping[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(file, f"is no TOML ({error})", "correct the file") from None
    parallel, training = sections.get("parallelism", {}), sections.get("training", {})
    uniform = UniformStrategy(
        tp_size=_number(file, parallel, "tensor_parallel_degree"),
        pp_size=_number(file, parallel, "pipeline_parallel_degree"),
        cp_size=_number(file, parallel, "context_parallel_degree"),
        context=_context(file, parallel),
        sequence_parallel=SequenceParallel.MEGATRON,
    )
    uniform = _with_states(file, parallel, setting.with_dp_size(uniform, file))
    uniform = _with_experts(file, parallel, uniform)
    in_pipeline = uniform.pp_size > 1
    sample_key = "pipeline_parallel_microbatch_size" if in_pipeline else "local_batch_size"
    uniform = uniform._replace(micro_batch_size=_number(file, parallel if in_pipeline else training, sample_key))
    if in_pipeline:
        uniform = _with_ranges(file, parallel, uniform)
    return _recomputed(file, sections.get("activation_checkpoint", {}), setting, uniform)


def _number(file: str, keys: Mapping[str, Any], name: str) -> int:
    number = keys.get(name, 1)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 10**7:
        raise BadInput(file, f"{name} {number!r} is no number from 1", "correct it")
    return number


def _context(file: str, parallel: Mapping[str, Any]) -> ContextParallel:
    """Return how positions attend to those of other ranks; it has no effect where none are shared out."""
    if _number(file, parallel, "context_parallel_degree") == 1:
        return ContextParallel.GATHER
    method = parallel.get("context_parallel_rotate_method", "allgather")
    known = [kind for kind, name in ROTATE_METHODS.items() if name == method]
    if not known:
        problem = f"context_parallel_rotate_method {method!r}"
        raise BadInput(file, problem, f"choose {' or '.join(ROTATE_METHODS.values())}")
    return known[0]


def borrows(experts: ExpertStrategy, tp_size: int, cp_size: int) -> bool:
    """Return whether experts take ranks as its `ParallelDims` has it: of FSDP, cp first, and all of tp or none."""
    fits = experts.etp_size in (1, tp_size)
    borrowed = cp_size * (tp_size if experts.etp_size == 1 else 1)
    return fits and experts.ep_size > 1 and experts.ep_size % borrowed == 0


def _with_states(file: str, parallel: Mapping[str, Any], uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with who shares the states out; by default all, who reshard but in a pipeline."""
    replicas = _number(file, parallel, "data_parallel_replicate_degree")
    whole = parallel.get("data_parallel_shard_degree", -1) == -1
    shards = uniform.dp_size // replicas if whole else _number(file, parallel, "data_parallel_shard_degree")
    if replicas * shards != uniform.dp_size:
        problem = f"data_parallel_replicate_degree {replicas} x data_parallel_shard_degree {shards}"
        raise BadInput(file, f"{problem} are not the {uniform.dp_size} data-parallel ranks", "correct them")
    reshards = parallel.get("fsdp_reshard_after_forward", "default")
    kind = DataParallel.ZERO3 if reshards == "always" else DataParallel.ZERO2
    if reshards == "default" and uniform.pp_size == 1:
        kind = DataParallel.ZERO3
    return uniform._replace(
        data_parallel=kind if shards * uniform.cp_size > 1 else DataParallel.DDP,
        shard_size=shards * uniform.cp_size if replicas > 1 and shards * uniform.cp_size > 1 else 0,
        gradient_reduction=GradientReduction.EVERY_MICROBATCH if uniform.pp_size == 1 else GradientReduction.DEFERRED,
    )


def _with_experts(file: str, parallel: Mapping[str, Any], uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with experts shared out, which borrow tensor-parallel ranks, or take their features' as tp."""
    ep_size = _number(file, parallel, "expert_parallel_degree")
    etp_size = _number(file, parallel, "expert_tensor_parallel_degree")
    if ep_size == 1:  # then the other has no effect
        return uniform
    if etp_size not in (1, uniform.tp_size):
        problem = f"expert_tensor_parallel_degree {etp_size} is neither 1 nor tensor_parallel_degree {uniform.tp_size}"
        raise BadInput(file, problem, "correct it")
    if etp_size == 1 and ep_size % uniform.tp_size:
        problem = f"expert_parallel_degree {ep_size} is no multiple of tensor_parallel_degree {uniform.tp_size}"
        raise BadInput(file, problem, "choose one, or share the features of experts by tp")
    if not borrows(ExpertStrategy(ep_size=ep_size, etp_size=etp_size), uniform.tp_size, uniform.cp_size):
        problem = f"expert_parallel_degree {ep_size} beside context_parallel_degree {uniform.cp_size}"
        raise BadInput(file, problem, "choose a multiple of it, and of tensor_parallel_degree where etp is 1")
    if uniform.shard_groups > 1:
        raise BadInput(file, "data_parallel_replicate_degree beside expert_parallel_degree", "leave it at 1")
    return uniform.with_experts(ep_size, etp_size)


def _with_ranges(file: str, parallel: Mapping[str, Any], uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with the layers of each stage and chunk, where `module_fqns_per_model_part` lists them."""
    parts = parallel.get("module_fqns_per_model_part")
    if parts is None:
        return uniform
    ranges, low = [], 0
    for part in parts:
        count = sum(name.startswith("layers.") for name in part)
        if [name for name in part if name.startswith("layers.")] != [f"layers.{i}" for i in range(low, low + count)]:
            raise BadInput(file, "module_fqns_per_model_part has layers in another order", "list layers.0 and on")
        ranges.append((low, low + count))
        low += count
    if len(ranges) % uniform.pp_size:
        problem = f"module_fqns_per_model_part has {len(ranges)} parts for {uniform.pp_size} pipeline stages"
        raise BadInput(file, problem, "list as many for each")
    return uniform._replace(chunks=len(ranges) // uniform.pp_size, ranges=tuple(ranges))


def _recomputed(file: str, keys: Mapping[str, Any], setting: Setting, uniform: UniformStrategy) -> Reading:
    """Return the plan with what is recomputed: all, none, every n-th layer of a rank, or some results of a layer."""
    mode, option = keys.get("mode", "selective"), str(keys.get("selective_ac_option", "2"))
    if mode not in _MODES:
        raise BadInput(file, f"activation_checkpoint.mode {mode!r}", f"choose {', '.join(_MODES)}")
    if mode == "selective" and option == "op":
        return Reading(setting.plan(uniform._replace(recompute=Recompute.SELECTIVE), file), (_BY_OPERATOR,))
    if mode != "selective":
        kind = Recompute.FULL if mode == "full" else Recompute.NONE
        return Reading(setting.plan(uniform._replace(recompute=kind), file))
    if not option.isdecimal() or int(option) < 1:
        raise BadInput(file, f"selective_ac_option {option!r}", "choose op, or a number from 1")
    return Reading(_every_nth(setting.plan(uniform, file), int(option)))


def _every_nth(plan: Plan, period: int) -> Plan:
    """Return the plan with every n-th of the layers that a rank holds recomputed."""
    layers = list(plan.layers)
    for stage in plan.stages:
        held = [i for low, high in stage.layers for i in range(low, high)]
        for i in held[period - 1 :: period]:
            layers[i] = replace(layers[i], recompute=Recompute.FULL)
    return replace(plan, layers=tuple(layers))
