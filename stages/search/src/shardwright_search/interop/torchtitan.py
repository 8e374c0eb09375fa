"""A plan as a TOML configuration of torchtitan.

Sections and keys are those of its `config/job_config.py` in 0.2.2 (late 2025); what they do is read from
`models/llama3/infra/parallelize.py` and `distributed/{pipeline_parallel,activation_checkpoint,parallel_dims}.py`. Later
versions are configured in Python, with fields of the same names.

Ranks are numbered pipeline stage first, then data-parallel rank, then tensor-parallel rank, as in a plan.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import GradientReduction, Plan, Schedule
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel
from shardwright_models.registry import FAMILIES
from shardwright_search.interop.target import Degrees, Exported, Target, kernel_notes

Toml = str | int | Sequence[Sequence[str]]

_TARGET = "torchtitan"
_SCHEDULES = {Schedule.GPIPE: "GPipe", Schedule.ONE_F_ONE_B: "1F1B", Schedule.INTERLEAVED_1F1B: "1F1B"}
"""Of stages with one layer range."""
_FILLED = ("1F1B",)
"""Schedules that torch refuses with fewer microbatches than stages."""
_FLAVORS: Mapping[tuple[object, ...], str] = {
    (4096, 32, 32, 8, 14336, 128256): "8B",
    (8192, 80, 64, 8, 28672, 128256): "70B",
    (16384, 126, 128, 8, 53248, 128256): "405B",
}
"""Sizes that `models/llama3/__init__.py` registers."""
_REGISTERED = "llama3"
"""The model that has them."""


def torchtitan_toml(plan: Plan, plan_file: object) -> Exported:
    """The sections that a plan decides; data and learning rate are the user's.

    Raises BadInput naming the first thing that torchtitan cannot express.
    """
    target = Target(_TARGET, plan_file)
    degrees = Degrees.of(plan, target)
    _check_parallelism(plan, degrees, target)
    _check_pipeline(plan, degrees, target)
    sections: dict[str, Mapping[str, Toml]] = {
        **_model(plan.model),
        "optimizer": {"name": "AdamW"},
        "training": {**_batch(plan, degrees), **_precision(plan, degrees, target)},
        "parallelism": _parallelism(plan, degrees),
        "activation_checkpoint": _recompute(plan, degrees, target),
    }
    return Exported(
        "\n".join(_section(name, keys) for name, keys in sections.items()),
        (f"run it on {plan.world_size} ranks", *_model_notes(plan, degrees), *kernel_notes(plan)),
    )


def _sizes(model: Model) -> tuple[object, ...]:
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    sizes = {**model.config, "num_hidden_layers": len(model.layers)}
    return tuple(sizes.get(key) for key in (*keys, "vocab_size"))


def _name(model: Model) -> str | None:
    """Return the name of its family there."""
    return FAMILIES[model.family].torchtitan if model.family in FAMILIES else None


def _flavor(model: Model) -> str | None:
    """Return the registered sizes that are the model's."""
    return _FLAVORS.get(_sizes(model)) if _name(model) == _REGISTERED else None


def _model(model: Model) -> dict[str, Mapping[str, Toml]]:
    keys = {"name": _name(model), "flavor": _flavor(model)}
    return {"model": {key: value for key, value in keys.items() if value is not None}} if _name(model) else {}


def _model_notes(plan: Plan, degrees: Degrees) -> Iterator[str]:
    model = plan.model
    if _name(model) is None:
        yield f"torchtitan has no {model.family} model: the modules are named as in its decoders"
    elif _flavor(model) is None:
        yield f"the flavor of [model] is yours: {len(model.layers)} layers, dim {model.boundary[0].features}"
    if degrees.pp_size > 1:
        yield "from torchtitan 0.3 on the module output is called lm_head"


def _check_parallelism(plan: Plan, degrees: Degrees, target: Target) -> None:
    holds = degrees.tp_size == 1 or degrees.sequence_parallel is SequenceParallel.MEGATRON
    what = "embedding: tensor parallelism without sequence_parallel megatron"
    target.demand(holds, what, "choose sequence_parallel megatron")
    alone = degrees.tp_size == degrees.pp_size == 1
    holds = degrees.dp_size == 1 or degrees.data_parallel is not DataParallel.DDP or alone
    target.demand(holds, "embedding: ddp beside tensor or pipeline parallelism", "choose zero2 or zero3")
    if degrees.dp_size == 1 or plan.num_microbatches == 1:
        return
    # Accumulating gradients it reduces each microbatch's; torch's pipeline schedules reduce with the last one.
    reduced = GradientReduction.EVERY_MICROBATCH if degrees.pp_size == 1 else GradientReduction.DEFERRED
    where = "without a pipeline" if degrees.pp_size == 1 else "in a pipeline"
    what = f"gradient_reduction {plan.gradient_reduction} {where}"
    target.demand(plan.gradient_reduction is reduced, what, f"choose {reduced}")


def _check_pipeline(plan: Plan, degrees: Degrees, target: Target) -> None:
    """What torch's schedules refuse, and what torchtitan cannot cut."""
    if degrees.pp_size == 1:
        return
    what = f"1f1b with {plan.num_microbatches} microbatches in {degrees.pp_size} pipeline stages"
    holds = _schedule(plan, degrees) not in _FILLED or plan.num_microbatches >= degrees.pp_size
    target.demand(holds, what, "choose as many microbatches or more")
    what = "tied embedding and head in several pipeline stages"
    target.demand(not plan.model.tied, what, "untie them or choose one stage")


def _schedule(plan: Plan, degrees: Degrees) -> str:
    """Return torch's name of a schedule, which goes by the layer ranges of a stage."""
    return _SCHEDULES[plan.schedule] if degrees.chunks == 1 else "Interleaved1F1B"


def _batch(plan: Plan, degrees: Degrees) -> dict[str, Toml]:
    """Without a pipeline a microbatch is what one accumulation step takes, with one it is cut from the local batch."""
    passes = plan.num_microbatches if degrees.pp_size > 1 else 1
    return {
        "local_batch_size": degrees.micro_batch_size * passes,
        "global_batch_size": plan.global_batch_size,
        "seq_len": plan.model.sequence_length,
    }


def _precision(plan: Plan, degrees: Degrees, target: Target) -> dict[str, Toml]:
    kept, used, reduced = plan.precision.parameters, plan.precision.compute, plan.precision.reduce
    holds = kept == reduced == "float32" and used in ("float32", "bfloat16")
    target.demand_precision(plan, holds, "compute in float32 or bfloat16, and keep and reduce in float32")
    holds = used == kept or degrees.dp_size > 1 or degrees.tp_size == degrees.pp_size == 1
    where = " without data-parallel ranks: its FSDP casts"
    target.demand_precision(plan, holds, "choose dp_size 2 or more, or compute in float32", where)
    return {"mixed_precision_param": used, "mixed_precision_reduce": reduced}


def _parallelism(plan: Plan, degrees: Degrees) -> dict[str, Toml]:
    replicated = degrees.data_parallel is DataParallel.DDP
    keys: dict[str, Toml] = {
        "data_parallel_replicate_degree": degrees.dp_size if replicated else degrees.shard_groups,
        "data_parallel_shard_degree": 1 if replicated else degrees.dp_size // degrees.shard_groups,
        "tensor_parallel_degree": degrees.tp_size,
        "pipeline_parallel_degree": degrees.pp_size,
        "context_parallel_degree": 1,
    }
    if not replicated:
        keys["fsdp_reshard_after_forward"] = "always" if degrees.data_parallel is DataParallel.ZERO3 else "never"
    if degrees.pp_size > 1:
        keys["pipeline_parallel_schedule"] = _schedule(plan, degrees)
        keys["pipeline_parallel_microbatch_size"] = degrees.micro_batch_size
        keys["module_fqns_per_model_part"] = _parts(degrees)
    return keys


def _parts(degrees: Degrees) -> list[list[str]]:
    """The modules of every stage and chunk, by the names that torchtitan's decoders share."""
    parts = [[f"layers.{i}" for i in range(low, high)] for low, high in degrees.ranges]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]


def _recompute(plan: Plan, degrees: Degrees, target: Target) -> dict[str, Toml]:
    """All, none, or every n-th of the layers that a rank holds: it counts them as it wraps them."""
    counted = [
        [i for low, high in degrees.ranges[stage :: degrees.pp_size] for i in range(low, high)]
        for stage in range(degrees.pp_size)
    ]
    again = {i for i, layer in enumerate(plan.layers) if layer.recompute is Recompute.FULL}
    if not again:
        return {"mode": "none"}
    if len(again) == len(plan.layers):
        return {"mode": "full"}
    every = min(n for own in counted for n, i in enumerate(own, 1) if i in again)
    for own in counted:
        for n, i in enumerate(own, 1):
            what = f"layers[{i}]: recompute {plan.layers[i].recompute}, number {n} of its rank"
            target.demand(
                (i in again) == (n % every == 0), what, "recompute all layers, none, or every n-th of each rank"
            )
    return {"mode": "selective", "selective_ac_option": str(every)}


def _section(name: str, keys: Mapping[str, Toml]) -> str:
    """JSON spells these values as TOML does: names, numbers, and lists of lists of names."""
    return "".join((f"[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())))
