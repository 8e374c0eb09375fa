"""torchtitan: a plan as its TOML configuration, and such a configuration as a plan.

Sections and keys are from its `config/job_config.py` in 0.2.2 (late 2025); what they do is read from
`models/llama3/infra/parallelize.py` and `distributed/{pipeline_parallel,activation_checkpoint,parallel_dims}.py`. For
0.3, which is configured in Python, `torchtitan_module` writes a module with the same fields.

Ranks are numbered pipeline stage first, then data-parallel, context-parallel and tensor-parallel rank, as in a plan.
FSDP shards over data-parallel and context-parallel ranks, and DDP is not supported alongside the latter.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.estimate.runtimes import RUNTIMES, RuntimeName
from shardwright.io import BadInput
from shardwright.models.registry import FAMILIES
from shardwright.models.traits import Torchtitan
from shardwright.plan.chunks import placed
from shardwright.types import ContextParallel, DataParallel, ExpertStrategy, Model, Recompute, SequenceParallel
from shardwright.types.plan import FP8, GradientReduction, Plan, Precision, Schedule
from shardwright_search.space.configurations import Configuration, Demands, Outer
from shardwright_search.space.uniform import UniformStrategy, with_experts
from shardwright_search.systems.entry import (
    Entry,
    Limits,
    Reading,
    Setting,
    Settings,
    expert_states_alike,
    program_of,
    shown,
    torchrun,
    whole_groups,
)
from shardwright_search.systems.exporting import (
    WHOLE_LAYERS,
    Exported,
    ExportTarget,
    check_context,
    contexts_of,
    kernel_notes,
    scaled_in,
    uniform_of,
)
from shardwright_search.systems.torchtitan_module import MODULE, STARTS, module_of, obstacle_of_module

# The models that it has.


def registered(model: Model) -> Torchtitan | None:
    """Return torchtitan's model for a model's family; None: it has no such blocks."""
    return FAMILIES[model.family].systems.torchtitan if model.family in FAMILIES else None


def flavor_of(model: Model) -> str | None:
    """Return the name of torchtitan's registered sizes that match a model; None: it has none."""
    if (blocks := registered(model)) is None:
        return None
    family = FAMILIES[model.family]
    config = family.configured(model.config)
    keys = None if "num_key_value_heads" not in family.divided.lengths else config.get("num_key_value_heads")
    experts = None if family.experts is None else config.get(family.experts.number)
    width, heads, inner = map(config.get, ("hidden_size", "num_attention_heads", "intermediate_size"))
    return blocks.flavors.get((width, len(model.layers), heads, keys, inner, config.get("vocab_size"), experts))


def layer_types(model: Model) -> tuple[str, ...]:
    """Return the layer types that a model for torchtitan may contain together; empty for families it does not have."""
    return () if registered(model) is None else tuple(n for stack in FAMILIES[model.family].stacks for n in stack.types)


# A configuration as a plan.

ROTATE_METHODS = {ContextParallel.GATHER: "allgather", ContextParallel.RING: "alltoall"}
"""Values of `context_parallel_rotate_method`, the first by default: keys go to all ranks, or to the next rank."""
_SECTIONS = ("parallelism", "training", "activation_checkpoint")
_SETTINGS = {
    "parallelism": Settings(
        read=(
            *("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward"),
            *("tensor_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule"),
            *("pipeline_parallel_microbatch_size", "module_fqns_per_model_part", "context_parallel_degree"),
            *("context_parallel_rotate_method", "expert_parallel_degree", "expert_tensor_parallel_degree"),
        ),
        # How communication is hidden is the question's --runtime.
        harmless=("enable_async_tensor_parallel", "pipeline_parallel_expert_parallel_overlap"),
        values={
            "pipeline_parallel_first_stage_less_layers": (0, 1),
            "pipeline_parallel_last_stage_less_layers": (0, 1),
            "context_parallel_load_balancer": ("headtail",),
            "expert_parallel_comm_backend": ("standard",),
        },
    ),
    "training": Settings(
        read=("local_batch_size", "global_batch_size", "seq_len"),
        harmless=(
            *("dataset", "dataset_path", "dataloader", "max_norm", "steps", "seed", "gc_freq", "gc_debug"),
            *("mixed_precision_param", "compile"),
        ),
        values={"mixed_precision_reduce": ("float32",), "dtype": ("float32",)},
    ),
    "activation_checkpoint": Settings(
        read=("mode", "selective_ac_option"),
        harmless=(
            *("per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget", "preserve_rng_state"),
            *("visualize_memory_budget_pareto", "determinism_check", "debug"),
        ),
    ),
    "optimizer": Settings(
        harmless=("lr", "beta1", "beta2", "eps", "weight_decay", "implementation"),
        values={"name": ("AdamW", "Adam")},
    ),
    "fault_tolerance": Settings(values={"enable": (False,)}, strict=False),
}
_CONVERTERS = {
    "float8": "fp8",
    "quantize.linear.float8": "fp8",
    "quantize.grouped_mm.float8": "fp8",
    "quantize.linear.mx": "fp8",
    "quantize.grouped_mm.mx": "fp8",
}
"""The precision of the question that a converter of the model implies."""
_HARMLESS_SECTIONS = {
    *("job", "profiling", "metrics", "lr_scheduler", "checkpoint", "comm", "memory_estimation", "debug", "validation"),
    *("compile", "experimental"),
}
_OTHER_SECTION = Settings(harmless=("precompute_float8_dynamic_scale_for_fsdp",), strict=False)
_OF_RANGES = {
    "Interleaved1F1B": Schedule.INTERLEAVED_1F1B,
    "InterleavedZeroBubble": Schedule.INTERLEAVED_ZERO_BUBBLE,
    "ZBVZeroBubble": Schedule.ZERO_BUBBLE_V,
}
"""Schedules of stages with several layer ranges, by torch's names."""
_READ_SCHEDULES = {"1F1B": Schedule.ONE_F_ONE_B, "GPipe": Schedule.GPIPE, **_OF_RANGES}
_MODES = ("none", "full", "selective")
_PERIOD = re.compile(r"[1-9][0-9]{0,6}")
_BY_OPERATOR = (
    "torchtitan's selective recomputation by operator is priced as results of products kept; it keeps every second one"
)


def read_torchtitan(text: str, file: str, setting: Setting) -> Reading:
    """Return the plan of a configuration, with torchtitan's defaults for missing keys.

    Raises BadInput naming `file` for what is wrong, and for what no plan has.
    """
    try:
        sections: Mapping[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(file, f"is not TOML ({error})", "correct the file") from None
    parallel, training, recompute = (_table(file, sections, name) for name in _SECTIONS)
    if not any(name.endswith("_degree") for name in parallel):
        raise BadInput(file, "sets no parallel size", "give a degree in [parallelism], such as tensor_parallel_degree")
    _check_settings(file, sections, setting)
    in_pipeline = (pp_size := _number(file, parallel, "pipeline_parallel_degree")) > 1
    sample_key = "pipeline_parallel_microbatch_size" if in_pipeline else "local_batch_size"
    uniform = setting.uniform(
        file,
        pp_size,
        _number(file, parallel if in_pipeline else training, sample_key),
        GradientReduction.DEFERRED if in_pipeline else GradientReduction.EVERY_MICROBATCH,
        tp_size=_number(file, parallel, "tensor_parallel_degree"),
        cp_size=_number(file, parallel, "context_parallel_degree"),
        context=_context(file, parallel),
        sequence_parallel=SequenceParallel.MEGATRON,
    )
    uniform = _with_states(file, parallel, uniform)
    uniform = _with_experts(file, parallel, setting, uniform)
    if in_pipeline:
        uniform = _with_ranges(file, parallel, uniform)
    reading = _recomputed(file, recompute, setting, uniform)
    plan = _scheduled(file, parallel, reading.plan)
    batch = training.get("global_batch_size", -1)
    differing = ("global_batch_size", None if batch == -1 else batch), ("seq_len", training.get("seq_len"))
    return Reading(plan, (*setting.differences(*differing), *reading.notes))


def _check_settings(file: str, sections: Mapping[str, Any], setting: Setting) -> None:
    """Raise BadInput naming the first setting of a configuration that a plan cannot express."""
    asked = [name for name, precision in _CONVERTERS.items() if setting.precision.compute == precision]
    converters = sections["model"].get("converters", []) if isinstance(sections.get("model"), Mapping) else []
    for converter in converters if isinstance(converters, list) else [converters]:
        if converter not in asked:
            problem = f"model.converters {shown(converter)} is not priced"
            raise BadInput(file, problem, "leave it out, or ask for its precision")
    for name, section in sections.items():
        if name not in _HARMLESS_SECTIONS and name != "model":
            keys = section if isinstance(section, Mapping) else {name: section}
            settings = _SETTINGS.get(name, _OTHER_SECTION)
            settings.check(file, keys if name in _SETTINGS else dict(_leaves(keys)), f"{name}.")


def _leaves(keys: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the settings of a section and of its sections, which dotted keys may nest deeper than calls go."""
    left = [keys]
    while left:
        for name, value in left.pop().items():
            if isinstance(value, Mapping):
                left.append(value)
            else:
                yield name, value


def _table(file: str, sections: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    keys = sections.get(name, {})
    if not isinstance(keys, Mapping):
        raise BadInput(file, f"{name} is not a table", f"write [{name}] and its keys")
    return keys


def _number(file: str, keys: Mapping[str, Any], name: str) -> int:
    number = keys.get(name, 1)
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 10**7:
        raise BadInput(file, f"{name} {number!r} is not a whole number from 1 to 9999999", "correct it")
    return number


def _context(file: str, parallel: Mapping[str, Any]) -> ContextParallel:
    """Return the kind of context parallelism, which has no effect at degree 1."""
    if _number(file, parallel, "context_parallel_degree") == 1:
        return ContextParallel.GATHER
    method = parallel.get("context_parallel_rotate_method", "allgather")
    known = [kind for kind, name in ROTATE_METHODS.items() if name == method]
    if not known:
        problem = f"context_parallel_rotate_method {method!r}"
        raise BadInput(file, problem, f"choose {' or '.join(ROTATE_METHODS.values())}")
    return known[0]


def borrows(experts: ExpertStrategy, tp_size: int, cp_size: int) -> bool:
    """Return whether torchtitan's `ParallelDims` has these degrees of expert parallelism.

    Experts are split over ranks of FSDP, context-parallel ones first, and over all tensor-parallel ranks or none.
    """
    fits = experts.etp_size in (1, tp_size)
    borrowed = cp_size * (tp_size if experts.etp_size == 1 else 1)
    return fits and experts.ep_size > 1 and experts.ep_size % borrowed == 0


def _with_states(file: str, parallel: Mapping[str, Any], uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with its sharding of states; by default over all ranks, resharded except in a pipeline."""
    replicas = _number(file, parallel, "data_parallel_replicate_degree")
    whole = parallel.get("data_parallel_shard_degree", -1) == -1
    shards = uniform.layer.dp_size // replicas if whole else _number(file, parallel, "data_parallel_shard_degree")
    if replicas * shards != uniform.layer.dp_size:
        problem = f"data_parallel_replicate_degree {replicas} x data_parallel_shard_degree {shards}"
        raise BadInput(file, f"{problem} are not the {uniform.layer.dp_size} data-parallel ranks", "correct them")
    reshards = parallel.get("fsdp_reshard_after_forward", "default")
    kind = DataParallel.ZERO3 if reshards == "always" else DataParallel.ZERO2
    if reshards == "default" and uniform.pp_size == 1:
        kind = DataParallel.ZERO3
    sharing = shards * uniform.layer.cp_size
    kind, shard_size = (kind, sharing if replicas > 1 else 0) if sharing > 1 else (DataParallel.DDP, 0)
    return uniform.having(file, data_parallel=kind, shard_size=shard_size)


def _with_experts(
    file: str, parallel: Mapping[str, Any], setting: Setting, uniform: UniformStrategy
) -> UniformStrategy:
    """Return the choice with expert parallelism: tensor-parallel ranks split the experts, or their features."""
    ep_size = _number(file, parallel, "expert_parallel_degree")
    etp_size = _number(file, parallel, "expert_tensor_parallel_degree")
    tp_size, cp_size = uniform.layer.tp_size, uniform.layer.cp_size
    if ep_size == 1:  # then the other has no effect
        return uniform
    if etp_size not in (1, tp_size):
        problem = f"expert_tensor_parallel_degree {etp_size} is neither 1 nor tensor_parallel_degree {tp_size}"
        raise BadInput(file, problem, "correct it")
    if etp_size == 1 and ep_size % tp_size:
        problem = f"expert_parallel_degree {ep_size} is not a multiple of tensor_parallel_degree {tp_size}"
        raise BadInput(file, problem, f"choose a multiple, or set expert_tensor_parallel_degree {tp_size}")
    if not borrows(ExpertStrategy(ep_size=ep_size, etp_size=etp_size), tp_size, cp_size):
        factors = f"context_parallel_degree {cp_size}"
        if etp_size == 1 < tp_size:
            factors += f" x tensor_parallel_degree {tp_size}"
        raise BadInput(file, f"expert_parallel_degree {ep_size} is not a multiple of {factors}", "choose a multiple")
    if uniform.shard_groups > 1:
        raise BadInput(file, "data_parallel_replicate_degree with expert_parallel_degree", "leave it at 1")
    return with_experts(file, setting.model, uniform, ep_size, etp_size)


def _with_ranges(file: str, parallel: Mapping[str, Any], uniform: UniformStrategy) -> UniformStrategy:
    """Return the choice with the layers of each stage and chunk, if `module_fqns_per_model_part` lists them."""
    parts = parallel.get("module_fqns_per_model_part")
    if parts is None:
        return uniform
    if not isinstance(parts, list) or not all(isinstance(name, str) for part in parts for name in _list(part)):
        raise BadInput(
            file, "module_fqns_per_model_part is not a list of lists of names", "list the modules of each part"
        )
    ranges, low = [], 0
    for part in parts:
        count = sum(name.startswith("layers.") for name in part)
        if [name for name in part if name.startswith("layers.")] != [f"layers.{i}" for i in range(low, low + count)]:
            raise BadInput(file, "module_fqns_per_model_part has layers in another order", "list layers.0 and on")
        ranges.append((low, low + count))
        low += count
    if len(ranges) % uniform.pp_size:
        problem = f"module_fqns_per_model_part has {len(ranges)} parts for {uniform.pp_size} pipeline stages"
        raise BadInput(file, problem, "list the same number for each")
    return uniform._replace(chunks=len(ranges) // uniform.pp_size, ranges=tuple(ranges))


def _list(part: object) -> list[object]:
    """Return a list unchanged; for another value, a list that contains no names."""
    return part if isinstance(part, list) else [None]


def _recomputed(file: str, keys: Mapping[str, Any], setting: Setting, uniform: UniformStrategy) -> Reading:
    """Return the plan with its recomputation: all, none, every n-th layer of a rank, or some results of a layer."""
    mode, option = keys.get("mode", "selective"), str(keys.get("selective_ac_option", "2"))
    if mode not in _MODES:
        raise BadInput(file, f"activation_checkpoint.mode {mode!r}", f"choose {', '.join(_MODES)}")
    if mode == "selective" and option == "op":
        return Reading(setting.plan(uniform.having(file, recompute=Recompute.SELECTIVE), file), (_BY_OPERATOR,))
    if mode != "selective":
        kind = Recompute.FULL if mode == "full" else Recompute.NONE
        return Reading(setting.plan(uniform.having(file, recompute=kind), file))
    if _PERIOD.fullmatch(option) is None:
        raise BadInput(file, f"selective_ac_option {option!r}", "choose op, or a number from 1")
    return Reading(_every_nth(setting.plan(uniform, file), int(option)))


def _scheduled(file: str, parallel: Mapping[str, Any], plan: Plan) -> Plan:
    """Return the plan with the named schedule, which has no effect without a pipeline."""
    if len(plan.stages) == 1:
        return plan
    name = parallel.get("pipeline_parallel_schedule", "1F1B")
    kind = _READ_SCHEDULES.get(name) if isinstance(name, str) else None
    if kind is None:
        problem = f"parallelism.pipeline_parallel_schedule {name} is not priced"
        raise BadInput(file, problem, f"choose {', '.join(_READ_SCHEDULES)}")
    chunks = len(plan.stages[0].layers)
    if (chunks > 1) != (name in _OF_RANGES):
        problem = f"pipeline_parallel_schedule {name} with {chunks} layer ranges a stage is not priced"
        wanted = "several parts" if name in _OF_RANGES else "one part"
        raise BadInput(file, problem, f"list {wanted} for each stage in module_fqns_per_model_part")
    if kind.turns and chunks != 2:
        problem = f"pipeline_parallel_schedule {name} needs 2 layer ranges a stage, not {chunks}"
        raise BadInput(file, problem, "list two parts for each stage in module_fqns_per_model_part")
    held = placed([plan.stages[stage].layers[chunk] for stage, chunk in plan.way], kind, len(plan.stages))
    stages = (replace(stage, layers=layers) for stage, layers in zip(plan.stages, held, strict=True))
    return replace(plan, schedule=kind, stages=tuple(stages))


def _every_nth(plan: Plan, period: int) -> Plan:
    """Return the plan with every n-th of the layers that a rank holds recomputed."""
    layers = list(plan.layers)
    for stage in plan.stages:
        held = [i for low, high in stage.layers for i in range(low, high)]
        for i in held[period - 1 :: period]:
            layers[i] = replace(layers[i], recompute=Recompute.FULL)
    return replace(plan, layers=tuple(layers))


# A plan as a configuration.

Toml = str | int | Sequence[str] | Sequence[Sequence[str]]

_TARGET = "torchtitan"
_SCHEDULES = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED_1F1B: "1F1B"}
"""Names of the schedules of stages with one layer range."""
_SCHEDULES_OF_RANGES = {kind: name for name, kind in _OF_RANGES.items()}
_FILLED = ("1F1B",)
"""Schedules that torch refuses with fewer microbatches than stages."""


def torchtitan_toml(plan: Plan, plan_file: object) -> Exported:
    """Return the configuration sections that a plan determines; the user adds data and learning rate.

    Raises BadInput naming the first feature that torchtitan cannot express.
    """
    target = ExportTarget(_TARGET, plan_file)
    uniform = uniform_of(plan, target, has_expert_grids=True, has_context=True, types=layer_types(plan.model))
    check_context(plan, uniform, target)
    _check_model(plan.model, uniform, target)
    _check_parallelism(plan, uniform, target)
    _check_pipeline(plan, uniform, target)
    sections: dict[str, Mapping[str, Toml]] = {
        **_model(plan),
        "optimizer": {"name": "AdamW"},
        "training": {**_batch(plan, uniform), **_precision(plan, uniform, target)},
        "parallelism": _parallelism(plan, uniform),
        "activation_checkpoint": _recompute(plan, target),
        **({"compile": {"enable": True}} if plan.compile else {}),
        **_scaling(plan),
    }
    obstacle = obstacle_of_module(plan, uniform, registered(plan.model), sections)
    newer = f"torchtitan 0.3 has no {obstacle}, 0.2.2 reads this file"
    if obstacle is None:
        newer = f"torchtitan 0.3 reads {MODULE}.py (--launch): {torchrun(plan, STARTS)}"
    kernels = kernel_notes(replace(plan, compile=False))
    return Exported(
        "\n".join(_section(name, keys) for name, keys in sections.items()),
        (f"run it on {plan.world_size} ranks", newer, *_model_notes(plan), *_order_notes(plan), *kernels),
        beside=() if obstacle else ((f"{MODULE}.py", module_of(plan, uniform, sections)),),
    )


def _model(plan: Plan) -> Mapping[str, Mapping[str, Toml]]:
    """Return the section for the model: its registered sizes, if torchtitan has them, and matrix products in FP8."""
    blocks, flavor = registered(plan.model), flavor_of(plan.model)
    keys: dict[str, Toml] = {} if blocks is None else {"name": blocks.name}
    keys |= {} if flavor is None else {"flavor": flavor}
    if plan.precision.compute == FP8:
        keys["converters"] = ["quantize.linear.mx" if scaled_in(plan) == "mxfp8" else "quantize.linear.float8"]
    return {"model": keys} if keys else {}


def _scaling(plan: Plan) -> Mapping[str, Mapping[str, Toml]]:
    """Return the section for FP8 scaling, of blocks only; with MXFP8 torchtitan leaves out the head itself."""
    if plan.precision.compute != FP8 or scaled_in(plan) == "mxfp8":
        return {}
    return {"quantize.linear.float8": {"recipe_name": "rowwise", "filter_fqns": ["output"]}}


def _order_notes(plan: Plan) -> Iterator[str]:
    if plan.schedule.splits:
        yield f"torch orders the passes of {plan.schedule} itself: as if all took as long, the memory is the same"


def _model_notes(plan: Plan) -> Iterator[str]:
    model, blocks = plan.model, registered(plan.model)
    if blocks is None:
        yield f"torchtitan has no {model.family} model: the modules are named as in its decoders"
    elif flavor_of(model) is None:
        yield f"the flavor of [model] is yours: {len(model.layers)} layers, dim {model.boundary[0].features}"
    if blocks is not None and model.tied and not blocks.ties:
        yield f"its {blocks.name} model does not tie embedding and head: tie them, or it takes more memory than planned"


def _check_model(model: Model, uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for features that torchtitan does not have for the model's blocks or its sequence length."""
    blocks, tp_size, cp_size = registered(model), uniform.layer.tp_size, uniform.layer.cp_size
    lacks = f"of its {blocks.name} model" if blocks is not None else ""
    holds = blocks is None or blocks.pipelines or uniform.pp_size == 1
    target.demand(holds, f"pipeline stages {lacks}, which has no pipelining_fn", "choose pp_size 1")
    holds = blocks is None or blocks.contexts or not uniform.shares_context
    feature = f"layers[0]: cp_size {cp_size} {lacks}, whose flavors have flex attention"
    target.demand(holds, feature, "choose cp_size 1")
    parts = _sequence_parts(tp_size, cp_size)
    feature = f"sequence_length {model.sequence_length} beside tp_size {tp_size} and cp_size {cp_size}"
    target.demand(model.sequence_length % parts == 0, feature, f"choose a multiple of {parts}")


def _sequence_parts(tp_size: int, cp_size: int) -> int:
    """Return the number that must divide sequence lengths: `seq_len_divisor` of its `parallel_dims.py`."""
    return tp_size * 2 * cp_size


def _check_parallelism(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> None:
    holds = uniform.layer.tp_size == 1 or uniform.layer.sequence_parallel is SequenceParallel.MEGATRON
    feature = "embedding: tensor parallelism without sequence_parallel megatron"
    target.demand(holds, feature, "choose sequence_parallel megatron")
    _check_experts(uniform, target)
    alone = uniform.layer.tp_size == uniform.pp_size == uniform.layer.cp_size == 1
    holds = uniform.replicas == 1 or uniform.layer.data_parallel is not DataParallel.DDP or alone
    beside = "context" if uniform.shares_context else "tensor or pipeline"
    target.demand(holds, f"embedding: ddp beside {beside} parallelism", "choose zero2 or zero3")
    feature = f"embedding: shard_size {uniform.layer.shard_size} beside cp_size {uniform.layer.cp_size}"
    target.demand(uniform.layer.shard_size % uniform.layer.cp_size == 0, feature, "choose a multiple of cp_size")
    if uniform.replicas == 1 or plan.num_microbatches == 1:
        return
    # Without a pipeline it reduces after each accumulated microbatch; torch's pipeline schedules reduce with the last.
    reduced = GradientReduction.EVERY_MICROBATCH if uniform.pp_size == 1 else GradientReduction.DEFERRED
    where = "without a pipeline" if uniform.pp_size == 1 else "in a pipeline"
    feature = f"gradient_reduction {plan.gradient_reduction} {where}"
    target.demand(plan.gradient_reduction is reduced, feature, f"choose {reduced}")


def _check_experts(uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for expert parallelism that torchtitan does not have (`borrows`), or with DDP."""
    if (experts := uniform.layer.experts) is UNSET:
        return
    sizes = f"ep_size {experts.ep_size} x etp_size {experts.etp_size} beside tp_size {uniform.layer.tp_size}"
    beside = f"{sizes} and cp_size {uniform.layer.cp_size}" if uniform.shares_context else sizes
    holds = borrows(experts, uniform.layer.tp_size, uniform.layer.cp_size)
    remedy = "give ep_size 2 or more, and etp_size as tp_size, or 1 with a multiple of tp_size as ep_size"
    remedy += ", a multiple of cp_size either way" if uniform.shares_context else ""
    target.demand(holds, f"layers[0]: {beside}", remedy)
    replicated = uniform.replicas > 1 and uniform.layer.data_parallel is DataParallel.DDP
    target.demand(not replicated, "layers[0]: expert parallelism with ddp", "choose zero2 or zero3")


def _has_experts_so(configuration: Configuration) -> bool:
    """Return whether a configuration's expert parallelism, if any, is one that torchtitan has."""
    layers = configuration.layers
    if layers is None or layers.experts is UNSET:
        return True
    replicated = layers.data_parallel is DataParallel.DDP
    fits = borrows(layers.experts, layers.tp_size, layers.cp_size)
    return fits and not replicated and expert_states_alike(configuration)


def _check_pipeline(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for pipelines that torch's schedules refuse, or that torchtitan cannot cut."""
    if uniform.pp_size == 1:
        return
    target.demand_schedule(plan, _names(uniform))
    feature = f"1f1b with {plan.num_microbatches} microbatches in {uniform.pp_size} pipeline stages"
    holds = _schedule(plan, uniform) not in _FILLED or plan.num_microbatches >= uniform.pp_size
    target.demand(holds, feature, "choose at least as many microbatches")
    target.demand(not (plan.compile and plan.schedule.splits), f"compile under {plan.schedule}", "leave compile out")
    feature = "tied embedding and head in several pipeline stages"
    target.demand(not plan.model.tied, feature, "untie them or choose one stage")


def _schedule(plan: Plan, uniform: UniformStrategy) -> str:
    """Return torch's name of a schedule, which depends on the number of layer ranges of a stage."""
    return _names(uniform)[plan.schedule]


def _names(uniform: UniformStrategy) -> Mapping[Schedule, str]:
    return _SCHEDULES if uniform.chunks == 1 else _SCHEDULES_OF_RANGES


def _batch(plan: Plan, uniform: UniformStrategy) -> dict[str, Toml]:
    """Return the batch keys: a step accumulates micro-batches; in a pipeline they are cut from the local batch."""
    passes = plan.num_microbatches if uniform.pp_size > 1 else 1
    return {
        "local_batch_size": uniform.micro_batch_size * passes,
        "global_batch_size": plan.global_batch_size,
        "seq_len": plan.model.sequence_length,
    }


def _precision(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> dict[str, Toml]:
    target.demand_in_float32(plan, "float32", "bfloat16", FP8)
    used, reduced = plan.precision.compute, plan.precision.reduce
    used = "bfloat16" if used == FP8 else used
    holds = used == "float32" or uniform.replicas > 1 or uniform.layer.tp_size == uniform.pp_size == 1
    where = " without data-parallel ranks: its FSDP casts"
    target.demand_precision(plan, holds, "choose dp_size 2 or more, or compute in float32", where)
    return {"mixed_precision_param": used, "mixed_precision_reduce": reduced}


def _parallelism(plan: Plan, uniform: UniformStrategy) -> dict[str, Toml]:
    layer = uniform.layer
    replicated = layer.data_parallel is DataParallel.DDP
    keys: dict[str, Toml] = {
        "data_parallel_replicate_degree": layer.dp_size if replicated else uniform.shard_groups,
        "data_parallel_shard_degree": 1 if replicated else uniform.replicas // uniform.shard_groups // layer.cp_size,
        "tensor_parallel_degree": layer.tp_size,
        "pipeline_parallel_degree": uniform.pp_size,
        "context_parallel_degree": layer.cp_size,
    }
    if uniform.shares_context:
        keys["context_parallel_rotate_method"] = ROTATE_METHODS[layer.context]
    if (experts := layer.experts) is not UNSET:
        keys |= {"expert_parallel_degree": experts.ep_size, "expert_tensor_parallel_degree": experts.etp_size}
    if not replicated:
        keys["fsdp_reshard_after_forward"] = "always" if layer.data_parallel is DataParallel.ZERO3 else "never"
    if uniform.pp_size > 1:
        keys["pipeline_parallel_schedule"] = _schedule(plan, uniform)
        keys["pipeline_parallel_microbatch_size"] = uniform.micro_batch_size
        keys["module_fqns_per_model_part"] = _parts(uniform)
    return keys


def _parts(uniform: UniformStrategy) -> list[list[str]]:
    """Return the modules of every stage and chunk, by the names that torchtitan's decoders share."""
    parts = [[f"layers.{i}" for i in range(low, high)] for low, high in uniform.ranges]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]


def _recompute(plan: Plan, target: ExportTarget) -> dict[str, Toml]:
    """Return the keys for recomputation: all, none, or every n-th of a rank's layers."""
    recomputed = [layer.recompute is Recompute.FULL for layer in plan.layers]
    if not any(recomputed) or all(recomputed):
        return {"mode": "full" if any(recomputed) else "none"}
    ranks = [[i for low, high in stage.layers for i in range(low, high)] for stage in plan.stages]
    counted = [(number, i) for layers in ranks for number, i in enumerate(layers, 1)]
    period = min(number for number, i in counted if recomputed[i])
    for number, i in counted:
        feature = f"layers[{i}]: recompute {plan.layers[i].recompute}, number {number} of its rank"
        holds = recomputed[i] == (number % period == 0)
        target.demand(holds, feature, "recompute all layers, none, or every n-th of each rank")
    return {"mode": "selective", "selective_ac_option": str(period)}


def _section(name: str, keys: Mapping[str, Toml]) -> str:
    """Return a section as text; JSON without escapes of letters writes strings, numbers and lists as TOML does."""
    lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in keys.items())
    return "".join((f"[{name}]\n", *lines))


def _reads(configuration: Configuration, casts: bool) -> bool:
    """Return whether torchtitan runs a configuration's kinds of parallelism together: DDP only by itself."""
    layers = configuration.layers
    assert layers is not None
    alone = layers.tp_size == layers.cp_size == configuration.pp_size == 1
    if layers.dp_size == layers.cp_size == 1:
        return alone or not casts
    return layers.data_parallel is not DataParallel.DDP or alone


def torchtitan_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return torchtitan's two ways: accumulation, which reduces gradients after each microbatch, and a pipeline.

    A pipeline reduces gradients with the last microbatch.
    """
    casts = precision.compute != precision.parameters
    parallel, blocks = (SequenceParallel.MEGATRON, SequenceParallel.NONE), registered(model)
    contexts = contexts_of(model) if blocks is None or blocks.contexts else ()

    def accumulates(configuration: Configuration) -> bool:
        layers = configuration.layers
        assert layers is not None
        divides = model.sequence_length % _sequence_parts(layers.tp_size, layers.cp_size) == 0
        shares = layers.tp_size == 1 or layers.sequence_parallel is SequenceParallel.MEGATRON
        return divides and shares and _reads(configuration, casts) and _has_experts_so(configuration)

    def fills(configuration: Configuration) -> bool:
        filled = configuration.num_microbatches >= configuration.pp_size
        return filled and whole_groups(configuration) and accumulates(configuration)

    limits = partial(
        Limits,
        recompute=WHOLE_LAYERS,
        sequence_parallel=parallel,
        types=layer_types(model),
        expert_grids=True,
        contexts=contexts,
    )
    flat = limits(
        "FSDP2, HSDP aside, or DDP without a pipeline, gradients reduced after every micro-batch",
        tuple(DataParallel),
        GradientReduction.EVERY_MICROBATCH,
        pipeline=False,
        demands=Demands(outer=Outer.AS_LAYERS, allows=accumulates),
    )
    pipeline = limits(
        "FSDP2 in a pipeline, gradients reduced with the last micro-batch",
        (DataParallel.ZERO2, DataParallel.ZERO3),
        GradientReduction.DEFERRED,
        pipeline=True,
        schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B),
        demands=Demands(outer=Outer.AS_LAYERS, allows=fills),
    )
    return (flat,) if model.tied or not (blocks is None or blocks.pipelines) else (flat, pipeline)


TORCHTITAN = Entry(
    title=_TARGET,
    version="torchtitan 0.2.2 and 0.3.0",
    sources=(
        "torchtitan/config/job_config.py: its keys",
        "torchtitan/models/llama3/infra/parallelize.py: sequence parallelism beside tensor parallelism, DDP alone",
        "torchtitan/models/*/__init__.py: flavors, and which models have pipelines and context parallelism",
        "torchtitan/distributed/parallel_dims.py: sequence lengths are multiples of 2 tp cp",
        "torch/distributed/pipelining/schedules.py: 1F1B has as many micro-batches as stages or more",
    ),
    runtime=RUNTIMES[RuntimeName.TORCHTITAN],
    limits=torchtitan_limits,
    unsearched=("recomputation of every n-th layer", "recomputation by operator", "HSDP"),
    file_name="torchtitan.toml",
    mark="",
    export=torchtitan_toml,
    read=read_torchtitan,
    command=lambda plan, file: torchrun(plan, f"-m torchtitan.train --job.config_file {file}"),
    program=program_of('-m torchtitan.train --job.config_file "$folder/torchtitan.toml"'),
)
