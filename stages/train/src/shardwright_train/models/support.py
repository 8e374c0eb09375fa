"""Checks, before ranks start, for plan features that the device or this installation does not support."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import msgspec
from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.models.context import WITHOUT_FLASH, plan_obstacle
from shardwright.models.mtp import mtp_layers
from shardwright.models.registry import FAMILIES, check_trained
from shardwright.plan.axes import axes_of
from shardwright.plan.offload import check_offload
from shardwright.plan.supported_fields import check_fields
from shardwright.types import HEAD, NARROW_BITS, Attention, GradientReduction, Plan, Recompute
from shardwright_train.start import without_collection

_SIXTEEN_BITS = ("bfloat16", "float16")
_MIXED_FLOAT16 = ("float32", "float16", "float32")
OPTIMIZERS_RUN = ("adamw", "adamw-bf16", "adamw-8bit", "sgd", "lion", "muon")
"""Optimizers that engine/updates.py has; listed here, because that file loads torch."""
_WIDEST_HEAD = 256
"""Largest number of features of a head that flash-attn 2 supports."""


def check_supported(plan: Plan, file: object) -> None:
    """Raise BadInput naming the first part of a plan that the runtime does not support on any device."""
    optimizer = ["optimizer"] if plan.optimizer in OPTIMIZERS_RUN else []
    further = ("loss_chunks", "layers.offload", "expert_placement", *optimizer)
    check_trained(plan.model.family, file)
    check_fields(plan, file, "the runtime", further)
    check_offload(plan, file)
    for problem, remedy in _beyond(plan):
        raise BadInput(file, problem, remedy)
    if plan.model.is_traced:
        with without_collection():
            from shardwright_train.models.as_stock import as_stock
        as_stock(plan.model.family).check(plan, file)


def check_installed(plan: Plan, file: object) -> None:
    """Raise BadInput if a plan requires flash-attn and it is not installed."""
    wants = [f"attention {plan.attention}"] if plan.attention is Attention.FLASH_ATTENTION_2 else []
    wants += [f"fused {name}" for name in plan.fused]
    if wants and not flash_attn_is_installed():
        problem = f"flash-attn is not installed, and {' and '.join(wants)} needs it"
        raise BadInput(file, problem, "pip install 'shardwright[flash-attn]', or use sdpa and nothing fused")


def flash_attn_is_installed() -> bool:
    """Return whether flash-attn 2 is installed; other packages have a module of the same name."""
    try:
        version("flash-attn")
    except PackageNotFoundError:
        return False
    return True


def flash_obstacle(plan: Plan) -> str | None:
    """Return why flash_attention_2 can never run a plan, or None, regardless of installation, device and family."""
    if _on_cpu(plan):
        return "needs CUDA, but the plan is for cpu"
    if (compute := plan.precision.compute) not in _SIXTEEN_BITS:
        return f"computes in bfloat16 or float16, but the plan in {compute}"
    regions = (region for kind in plan.model.types.values() for region in kind.regions)
    attentions = [region.attention for region in regions if region.attention is not None]
    widest = max((h.head_features for h in attentions), default=0)
    if any(h.features_of_values != h.head_features for h in attentions):
        return "does not support value heads of another width than query heads"
    if any(axes_of(layer).shares_context for layer in plan.layers):
        return WITHOUT_FLASH
    if any(h.alibi for h in attentions):
        return "cannot add the slopes of ALiBi to scores"
    if widest > _WIDEST_HEAD:
        return f"supports heads of up to {_WIDEST_HEAD} features, but the model has {widest}"
    return None


def without_devices(plan: Plan, plain: str) -> tuple[Plan, str]:
    """Return the plan that a dry run runs instead, uncompiled and without flash-attn, and its attention, or `plain`."""
    here = plan.attention.value if plan.attention in (Attention.EAGER, Attention.SDPA_MATH) else plain
    return msgspec.structs.replace(plan, fused=(), compile=False), here


def _beyond(plan: Plan) -> Iterator[tuple[str, str]]:
    precision, family = plan.precision, plan.model.family
    kernels = (Attention.AUTO, *(FAMILIES[family].kernels if family in FAMILIES else Attention))
    if plan.attention not in kernels:
        yield f"attention {plan.attention} is not supported for {family} models", f"use one of: {', '.join(kernels)}"
    if plan.attention in (Attention.SDPA_EFFICIENT, Attention.SDPA_CUDNN) and _on_cpu(plan):
        yield f"attention {plan.attention} needs CUDA, but the plan is for cpu", "use auto, sdpa or sdpa_flash"
    if precision.tf32 and _on_cpu(plan):
        yield "precision tf32 needs CUDA, but the plan is for cpu", "leave it out"
    formats = (precision.parameters, precision.compute, precision.reduce)
    if precision.compute in NARROW_BITS:
        yield f"precision {precision.compute} is only for estimates", "compute in bfloat16"
    if "float16" in formats and formats != _MIXED_FLOAT16:
        yield (
            f"precision {'/'.join(formats)} is not supported",
            "keep float16 to compute, parameters and reduce in float32",
        )
    if plan.attention is Attention.FLASH_ATTENTION_2 and (obstacle := flash_obstacle(plan)) is not None:
        yield f"attention {plan.attention} {obstacle}", "use auto, sdpa or eager"
    if plan.schedule.splits:
        if plan.compile:
            yield (
                f"compile: the schedule {plan.schedule} splits backward passes, compiled ones are joint",
                "leave it out",
            )
        if plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH:
            yield (
                f"gradient_reduction every_microbatch: the schedule {plan.schedule} sums gradients over a step",
                "reduce them once a step: deferred",
            )
    if plan.compile and any(kind.experts is not UNSET for kind in plan.model.types.values()):
        yield (
            "compile: blocks with experts cannot be compiled, because the host reads how many rows each expert has",
            "leave it out",
        )
    if mtp_layers(plan.model.layers):
        yield from _beyond_mtp(plan)
    if (freed := next((layer.recompute for layer in plan.layers if layer.recompute.parts), None)) is not None:
        if plan.compile:
            yield f"compile: recompute {freed} frees results that a compiled block does not show", "leave it out"
        if plan.model.is_traced:
            yield f"recompute {freed}: parts of {family} blocks are not known", f"choose {Recompute.FULL}"
    if (shared := plan_obstacle(plan)) is not None:
        yield shared
    if plan.loss_chunks and "cross_entropy" in plan.fused:
        yield "loss_chunks: the fused cross_entropy has all logits at once", "leave one of them out"
    if plan.fused and (obstacle := _fused_obstacle(plan)) is not None:
        yield f"fused {obstacle}", "leave it out"


def _beyond_mtp(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.compile:
        yield "compile: layers that predict further tokens (mtp) are not compiled", "leave it out"
    trained = sorted(name for name, family in FAMILIES.items() if name in family.mtp_trained)
    if plan.model.family not in trained:
        problem = f"layers that predict further tokens (mtp) are trained for {', '.join(trained)}"
        yield f"{problem}, not {plan.model.family}", "plan without --mtp, or export the plan to megatron"


def _fused_obstacle(plan: Plan) -> str | None:
    names = ", ".join(plan.fused)
    if _on_cpu(plan):
        return f"{names} needs CUDA, but the plan is for cpu"
    if plan.precision.compute == "float64":
        return f"{names} computes in at most float32, but the plan in float64"
    parts = axes_of(plan.head).dense.tensor.size
    lengths = [p.shape[p.tp_dim] for p in plan.model.types[HEAD].parameters if p.tp_dim is not None]
    odd = [length for length in lengths if length % parts]
    if "cross_entropy" in plan.fused and odd:
        return f"cross_entropy needs equal shards, but the head's tp_size {parts} does not divide {odd[0]} classes"
    return None


def _on_cpu(plan: Plan) -> bool:
    return any(plan.cluster.node_types[name].on_cpu for name in plan.cluster.node_type_of_rank)
