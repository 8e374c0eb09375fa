"""A plan as a TOML configuration of torchtitan.

Sections and keys are those of its `config/job_config.py` in 0.2.2 (late 2025); what they do is read from
`models/llama3/infra/parallelize.py` and `distributed/{pipeline_parallel,activation_checkpoint,parallel_dims}.py`. Later
versions are configured in Python, with fields of the same names.

Ranks are numbered pipeline stage first, then data-parallel, context-parallel and tensor-parallel rank, as in a plan.
FSDP shards over data-parallel and context-parallel ranks, and no DDP goes beside the latter.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

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
from shardwright_search.interop.limits import Limits, Target, expert_states_alike, torchrun, whole_groups
from shardwright_search.interop.target import WHOLE_LAYERS, Exported, ExportTarget, kernel_notes, uniform_of
from shardwright_search.interop.torchtitan_models import flavor_of, layer_types, registered
from shardwright_search.interop.torchtitan_reader import ROTATE_METHODS, borrows, read_torchtitan
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.demands import Demands, Outer
from shardwright_search.space.uniform import UniformStrategy

Toml = str | int | Sequence[Sequence[str]]

_TARGET = "torchtitan"
_SCHEDULES = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED_1F1B: "1F1B"}
"""Names of the schedules of stages with one layer range."""
_FILLED = ("1F1B",)
"""Schedules that torch refuses with fewer microbatches than stages."""


def torchtitan_toml(plan: Plan, plan_file: object) -> Exported:
    """Return the sections that a plan decides; data and learning rate are the user's.

    Raises BadInput naming the first thing that torchtitan cannot express.
    """
    target = ExportTarget(_TARGET, plan_file)
    uniform = uniform_of(plan, target, has_expert_grids=True, has_context=True, types=layer_types(plan.model))
    check_context(plan, uniform, target)
    _check_model(plan.model, uniform, target)
    _check_parallelism(plan, uniform, target)
    _check_pipeline(plan, uniform, target)
    sections: dict[str, Mapping[str, Toml]] = {
        **_model(plan.model),
        "optimizer": {"name": "AdamW"},
        "training": {**_batch(plan, uniform), **_precision(plan, uniform, target)},
        "parallelism": _parallelism(plan, uniform),
        "activation_checkpoint": _recompute(plan, target),
    }
    return Exported(
        "\n".join(_section(name, keys) for name, keys in sections.items()),
        (f"run it on {plan.world_size} ranks", *_model_notes(plan, uniform), *kernel_notes(plan)),
    )


def _model(model: Model) -> Mapping[str, Mapping[str, Toml]]:
    """Return the section that names the model and the registered sizes, as far as torchtitan has them."""
    if (blocks := registered(model)) is None:
        return {}
    flavor = flavor_of(model)
    return {"model": {"name": blocks.name} | ({} if flavor is None else {"flavor": flavor})}


def _model_notes(plan: Plan, uniform: UniformStrategy) -> Iterator[str]:
    model, blocks = plan.model, registered(plan.model)
    if blocks is None:
        yield f"torchtitan has no {model.family} model: the modules are named as in its decoders"
    elif flavor_of(model) is None:
        yield f"the flavor of [model] is yours: {len(model.layers)} layers, dim {model.boundary[0].features}"
    if blocks is not None and model.tied and not blocks.ties:
        yield f"its {blocks.name} model does not tie embedding and head: tie them, or it takes more memory than planned"
    if uniform.pp_size > 1:
        yield "from torchtitan 0.3 on the module output is called lm_head"


def _check_model(model: Model, uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for what torchtitan has not for the model's blocks, or not for its sequence length."""
    blocks = registered(model)
    lacks = f"of its {blocks.name} model" if blocks is not None else ""
    holds = blocks is None or blocks.pipelines or uniform.pp_size == 1
    target.demand(holds, f"pipeline stages {lacks}, which has no pipelining_fn", "choose pp_size 1")
    holds = blocks is None or blocks.contexts or not uniform.shares_context
    feature = f"layers[0]: cp_size {uniform.cp_size} {lacks}, whose flavors have flex attention"
    target.demand(holds, feature, "choose cp_size 1")
    parts = _sequence_parts(uniform.tp_size, uniform.cp_size)
    feature = f"sequence_length {model.sequence_length} beside tp_size {uniform.tp_size} and cp_size {uniform.cp_size}"
    target.demand(model.sequence_length % parts == 0, feature, f"choose a multiple of {parts}")


def _sequence_parts(tp_size: int, cp_size: int) -> int:
    """Return the number that sequence lengths are multiples of: `seq_len_divisor` of its `parallel_dims.py`."""
    return tp_size * 2 * cp_size


def _check_parallelism(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> None:
    holds = uniform.tp_size == 1 or uniform.sequence_parallel is SequenceParallel.MEGATRON
    feature = "embedding: tensor parallelism without sequence_parallel megatron"
    target.demand(holds, feature, "choose sequence_parallel megatron")
    _check_experts(uniform, target)
    alone = uniform.tp_size == uniform.pp_size == uniform.cp_size == 1
    holds = uniform.replicas == 1 or uniform.data_parallel is not DataParallel.DDP or alone
    beside = "context" if uniform.shares_context else "tensor or pipeline"
    target.demand(holds, f"embedding: ddp beside {beside} parallelism", "choose zero2 or zero3")
    feature = f"embedding: shard_size {uniform.shard_size} beside cp_size {uniform.cp_size}"
    target.demand(uniform.shard_size % uniform.cp_size == 0, feature, "choose a multiple of cp_size")
    if uniform.replicas == 1 or plan.num_microbatches == 1:
        return
    # Accumulating gradients it reduces each microbatch's; torch's pipeline schedules reduce with the last one.
    reduced = GradientReduction.EVERY_MICROBATCH if uniform.pp_size == 1 else GradientReduction.DEFERRED
    where = "without a pipeline" if uniform.pp_size == 1 else "in a pipeline"
    feature = f"gradient_reduction {plan.gradient_reduction} {where}"
    target.demand(plan.gradient_reduction is reduced, feature, f"choose {reduced}")


def _check_experts(uniform: UniformStrategy, target: ExportTarget) -> None:
    """Raise BadInput for expert grids that torchtitan does not have: they borrow FSDP's ranks, and all of tp or no."""
    if (experts := uniform.experts) is None:
        return
    sizes = f"ep_size {experts.ep_size} x etp_size {experts.etp_size} beside tp_size {uniform.tp_size}"
    beside = f"{sizes} and cp_size {uniform.cp_size}" if uniform.shares_context else sizes
    holds = borrows(experts, uniform.tp_size, uniform.cp_size)
    remedy = "give ep_size 2 or more, and etp_size as tp_size, or 1 with a multiple of tp_size as ep_size"
    remedy += ", a multiple of cp_size either way" if uniform.shares_context else ""
    target.demand(holds, f"layers[0]: {beside}", remedy)
    replicated = uniform.replicas > 1 and uniform.data_parallel is DataParallel.DDP
    target.demand(not replicated, "layers[0]: experts shared out beside ddp", "choose zero2 or zero3")


def _has_experts_so(configuration: Configuration) -> bool:
    """Return whether a configuration's experts, if they are shared out, are so as torchtitan does it."""
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
    feature = f"1f1b with {plan.num_microbatches} microbatches in {uniform.pp_size} pipeline stages"
    holds = _schedule(plan, uniform) not in _FILLED or plan.num_microbatches >= uniform.pp_size
    target.demand(holds, feature, "choose as many microbatches or more")
    feature = "tied embedding and head in several pipeline stages"
    target.demand(not plan.model.tied, feature, "untie them or choose one stage")


def _schedule(plan: Plan, uniform: UniformStrategy) -> str:
    """Return torch's name of a schedule, which goes by the layer ranges of a stage."""
    return _SCHEDULES[plan.schedule] if uniform.chunks == 1 else "Interleaved1F1B"


def _batch(plan: Plan, uniform: UniformStrategy) -> dict[str, Toml]:
    """Return the batch: an accumulation step takes a microbatch; in a pipeline these are cut from the local batch."""
    passes = plan.num_microbatches if uniform.pp_size > 1 else 1
    return {
        "local_batch_size": uniform.micro_batch_size * passes,
        "global_batch_size": plan.global_batch_size,
        "seq_len": plan.model.sequence_length,
    }


def _precision(plan: Plan, uniform: UniformStrategy, target: ExportTarget) -> dict[str, Toml]:
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = kept == reduced == "float32" and used in ("float32", "bfloat16")
    target.demand_precision(plan, holds, "compute in float32 or bfloat16, and keep and reduce in float32")
    holds = used == kept or uniform.replicas > 1 or uniform.tp_size == uniform.pp_size == 1
    where = " without data-parallel ranks: its FSDP casts"
    target.demand_precision(plan, holds, "choose dp_size 2 or more, or compute in float32", where)
    return {"mixed_precision_param": used, "mixed_precision_reduce": reduced}


def _parallelism(plan: Plan, uniform: UniformStrategy) -> dict[str, Toml]:
    replicated = uniform.data_parallel is DataParallel.DDP
    keys: dict[str, Toml] = {
        "data_parallel_replicate_degree": uniform.dp_size if replicated else uniform.shard_groups,
        "data_parallel_shard_degree": 1 if replicated else uniform.replicas // uniform.shard_groups // uniform.cp_size,
        "tensor_parallel_degree": uniform.tp_size,
        "pipeline_parallel_degree": uniform.pp_size,
        "context_parallel_degree": uniform.cp_size,
    }
    if uniform.shares_context:
        keys["context_parallel_rotate_method"] = ROTATE_METHODS[uniform.context]
    if (experts := uniform.experts) is not None:
        keys |= {"expert_parallel_degree": experts.ep_size, "expert_tensor_parallel_degree": experts.etp_size}
    if not replicated:
        keys["fsdp_reshard_after_forward"] = "always" if uniform.data_parallel is DataParallel.ZERO3 else "never"
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
    """Return all, none, or every n-th of the layers that a rank holds: it counts them as it wraps them."""
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
    """Return a section as text; JSON spells these values as TOML does: names, numbers, lists of lists of names."""
    return "".join((f"[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())))


def _reads(configuration: Configuration, casts: bool) -> bool:
    """Return whether its parallelism goes together: ddp is alone, and casts are those of FSDP's ranks."""
    layers = configuration.layers
    assert layers is not None
    alone = layers.tp_size == layers.cp_size == configuration.pp_size == 1
    if layers.dp_size == layers.cp_size == 1:
        return alone or not casts
    return layers.data_parallel is not DataParallel.DDP or alone


def torchtitan_limits(model: Model, precision: Precision) -> tuple[Limits, ...]:
    """Return its two ways: accumulation, which reduces each microbatch's gradients, and a pipeline, the last one's."""
    casts = precision.compute != precision.parameters
    parallel, blocks = (SequenceParallel.MEGATRON, SequenceParallel.NONE), registered(model)
    contexts = contexts_of(model) if blocks is None or blocks.contexts else ()

    def accumulates(configuration: Configuration) -> bool:
        read = _divides(configuration, model) and _shares_sequence(configuration) and _reads(configuration, casts)
        return read and _has_experts_so(configuration)

    def fills(configuration: Configuration) -> bool:
        filled = configuration.num_microbatches >= configuration.pp_size
        return filled and whole_groups(configuration) and accumulates(configuration)

    flat = Limits(
        "FSDP2, HSDP aside, or DDP without a pipeline, gradients reduced after every micro-batch",
        data_parallel=tuple(DataParallel),
        gradient_reduction=GradientReduction.EVERY_MICROBATCH,
        recompute=WHOLE_LAYERS,
        sequence_parallel=parallel,
        pipeline=False,
        types=layer_types(model),
        expert_grids=True,
        contexts=contexts,
        demands=Demands(outer=Outer.AS_LAYERS, allows=accumulates),
    )
    pipeline = Limits(
        "FSDP2 in a pipeline, gradients reduced with the last micro-batch",
        data_parallel=(DataParallel.ZERO2, DataParallel.ZERO3),
        gradient_reduction=GradientReduction.DEFERRED,
        recompute=WHOLE_LAYERS,
        sequence_parallel=parallel,
        pipeline=True,
        types=layer_types(model),
        schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B),
        expert_grids=True,
        contexts=contexts,
        demands=Demands(outer=Outer.AS_LAYERS, allows=fills),
    )
    return (flat,) if model.tied or not (blocks is None or blocks.pipelines) else (flat, pipeline)


def _divides(configuration: Configuration, model: Model) -> bool:
    layers = configuration.layers
    assert layers is not None
    return model.sequence_length % _sequence_parts(layers.tp_size, layers.cp_size) == 0


def _shares_sequence(configuration: Configuration) -> bool:
    layers = configuration.layers
    assert layers is not None
    return layers.tp_size == 1 or layers.sequence_parallel is SequenceParallel.MEGATRON


TORCHTITAN = Target(
    title=_TARGET,
    version="torchtitan 0.2.2",
    sources=(
        "torchtitan/config/job_config.py: its keys",
        "torchtitan/models/llama3/infra/parallelize.py: sequence parallelism beside tensor parallelism, DDP alone",
        "torchtitan/models/*/__init__.py: flavors, and which models have pipelines and context parallelism",
        "torchtitan/distributed/parallel_dims.py: sequence lengths are multiples of 2 tp cp",
        "torch/distributed/pipelining/schedules.py: 1F1B has as many micro-batches as stages or more",
    ),
    limits=torchtitan_limits,
    unsearched=("recomputation of every n-th layer", "recomputation by operator", "HSDP"),
    file_name="torchtitan.toml",
    mark="",
    export=torchtitan_toml,
    read=read_torchtitan,
    command=lambda plan, file: torchrun(plan, f"-m torchtitan.train --job.config_file {file}"),
)
