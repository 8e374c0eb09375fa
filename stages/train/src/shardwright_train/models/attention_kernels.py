"""Attention and fused kernels: checked on every rank, and agreed on by all ranks before anything is built."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright.io import BadInput
from shardwright.launch.backend import on_accelerator
from shardwright.models.traits import ATTENDED, SINK_FEATURES, Mask
from shardwright.plan.axes import axes_of, layout_of
from shardwright.types import EMBEDDING, FUSED_SDPA, HEAD, Attention, Heads, Model, Plan, Precision, base_type
from shardwright_train.models.base import Family, family_of
from shardwright_train.models.support import flash_attn_is_installed, flash_obstacle
from shardwright_train.parallel.fused import fusible
from shardwright_train.parallel.world import World
from shardwright_train.torch_private import sdpa_choice

_FLASH, _MATH = Attention.FLASH_ATTENTION_2, Attention.SDPA_MATH
_FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
_ONLY = {
    _MATH: SDPBackend.MATH,
    Attention.SDPA_FLASH: SDPBackend.FLASH_ATTENTION,
    Attention.SDPA_EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    Attention.SDPA_CUDNN: SDPBackend.CUDNN_ATTENTION,
}
"""Kernels of scaled_dot_product_attention by their names in plans."""
_FASTEST_LAST = (Attention.EAGER, Attention.SDPA, _FLASH)
_OTHERS = "use auto, sdpa or eager"
_SHORT = ("bfloat16", "float16")
_TRIED, _ALIGNMENT = 1024, 8
"""Number of positions with which kernels are tried if samples have more, plus the remainder of the samples' number of
positions modulo the second value."""
_CAPABILITY = (8, 0)
"""Lowest compute capability for flash-attn 2: Ampere."""


def check_kernels(plan: Plan, family: Family, device: torch.device, file: object, *, by_document: bool = False) -> None:
    """Raise BadInput naming the first kernel of a plan that this rank or the model's family cannot use.

    `by_document`: whether positions are to attend only to their own document.
    """
    for problem, remedy in _problems(plan, family, device, by_document):
        raise BadInput(file, problem, remedy)


def _problems(plan: Plan, family: Family, device: torch.device, by_document: bool) -> Iterator[tuple[str, str]]:
    """Yield, for each kernel that cannot be used, the problem and the remedy."""
    asked = plan.attention
    if by_document and any(kind.alibi_heads for kind in plan.model.types.values()):
        problem = f"{plan.model.family} models with ALiBi need a mask for each head, unlike --reset-attention-mask"
        yield problem, "leave it out"
    if asked is _FLASH and by_document:
        yield f"attention {asked} does not separate documents, as --reset-attention-mask requires", _OTHERS
    if asked is _FLASH and (lack := _lack(device)) is not None:
        yield f"attention {asked} {lack}", _OTHERS
    if asked in FUSED_SDPA and (lack := _fused_lack(plan, family, device, by_document)) is not None:
        others = "use sdpa_math or eager, which keep all scores"
        yield f"attention {asked} {lack}", others if asked is Attention.SDPA else "use auto or sdpa"
    if plan.compile and (drops := _drops_alike(plan, family)) is not None:
        problem = f"compile: {drops} splits heads over ranks, which would all drop the same positions"
        yield problem, "use sequence_parallel megatron or ulysses for them, no dropout, or no compilation"
    for name in _nowhere(plan, family):
        yield f"fused {name}: {plan.model.family} models have no module that flash-attn computes", "leave it out"


def settle_attention(plans: Sequence[Plan], world: World, *, by_document: bool = False) -> tuple[str, ...]:
    """Return the attention kernel of each plan, the same on all ranks; rank 0 prints it in one line.

    `auto` is one kernel for all plans: the fastest that every rank can run for each of them, if `by_document` even with
    positions that attend only to their own document.
    """
    undecided = [plan for plan in plans if plan.attention is Attention.AUTO]
    can = partial(_can, device=world.device, by_document=by_document)
    possible = [i for i, kernel in enumerate(_FASTEST_LAST) if all(can(plan, kernel) for plan in undecided)]
    best = torch.tensor(possible[-1], device=world.device)
    dist.all_reduce(best, dist.ReduceOp.MIN)
    chosen = _FASTEST_LAST[int(best.item())]
    settled = tuple(chosen if plan.attention is Attention.AUTO else plan.attention for plan in plans)
    if world.rank == 0:
        said = (
            f"{kernel}{' (auto)' if plan.attention is Attention.AUTO else ''}{_by(plan, kernel, world, by_document)}"
            for plan, kernel in zip(plans, settled, strict=True)
        )
        print(f"attention: {', '.join(dict.fromkeys(said))}", file=sys.stderr, flush=True)
    return tuple(kernel.value for kernel in settled)


def _by(plan: Plan, kernel: Attention, world: World, by_document: bool) -> str:
    """Return " by " and the kernel of scaled_dot_product_attention on a GPU; empty on CPU, which has only one."""
    ran = kernels_run(plan, kernel, world.device, by_document=by_document) if on_accelerator(world.device) else ""
    return f" by {ran}" if ran else ""


def kernels_run(plan: Plan, kernel: Attention, device: torch.device, *, by_document: bool = False) -> str:
    """Return the names of the kernels that scaled_dot_product_attention uses for a plan; empty for other attention.

    If positions attend across ranks on a GPU, the kernel for that follows.
    """
    if kernel is not _MATH and kernel not in FUSED_SDPA:
        return ""
    family = family_of(plan.model, plan.name)
    trials = list(_trials(plan, family, device, by_document))
    with sdpa_kernel(list(_backends(kernel.value, device))):
        names = " and ".join(dict.fromkeys(sdpa_choice(*trial.tensors, **trial.settings) for trial in trials))
    if not on_accelerator(device) or not any(axes_of(layer).shares_context for layer in plan.layers):
        return names
    short = plan.precision.compute in _SHORT and not by_document and kernel is not Attention.SDPA_EFFICIENT
    return f"{names}, across ranks by {'flash' if short else 'efficient'}"


def _backends(kernel: str, device: torch.device) -> tuple[SDPBackend, ...]:
    """Return the kernels that scaled_dot_product_attention may use: the requested one; else on a GPU the fused ones."""
    only = {name.value: backend for name, backend in _ONLY.items()}.get(kernel)
    if only is not None:
        return (only,)
    return _FUSED if on_accelerator(device) else (*_FUSED, SDPBackend.MATH)


def use_kernels(precision: Precision, attention: str, device: torch.device) -> None:
    """Configure matrix products, convolutions and attention of this process for a plan, until the next plan.

    Otherwise scaled_dot_product_attention on a GPU would silently fall back to a kernel that keeps all scores.
    """
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = precision.tf32
    backends = _backends(attention, device)
    torch.backends.cuda.enable_math_sdp(SDPBackend.MATH in backends)
    torch.backends.cuda.enable_flash_sdp(SDPBackend.FLASH_ATTENTION in backends)
    torch.backends.cuda.enable_mem_efficient_sdp(SDPBackend.EFFICIENT_ATTENTION in backends)
    torch.backends.cuda.enable_cudnn_sdp(SDPBackend.CUDNN_ATTENTION in backends)


for _kernel in _ONLY:
    ALL_ATTENTION_FUNCTIONS.register(_kernel.value, ALL_ATTENTION_FUNCTIONS[Attention.SDPA.value])


def _can(plan: Plan, kernel: Attention, device: torch.device, by_document: bool) -> bool:
    family = family_of(plan.model, plan.name)
    if kernel not in family.facts.kernels or (kernel is _FLASH and by_document):
        return False
    if kernel is Attention.SDPA:
        return _fused_lack(plan, family, device, by_document) is None
    return kernel is not _FLASH or (flash_attn_is_installed() and flash_obstacle(plan) is None and not _lack(device))


def _lack(device: torch.device) -> str | None:
    """Return which requirement of flash-attn 2 a device does not meet, or None."""
    if not on_accelerator(device):
        return f"needs CUDA, this is {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        present, least = (".".join(map(str, version)) for version in (capability, _CAPABILITY))
        return f"needs compute capability {least}, {torch.cuda.get_device_name(device)} has {present}"
    return None


def _fused_lack(plan: Plan, family: Family, device: torch.device, by_document: bool) -> str | None:
    """Return which part of a plan the GPU's fused kernels of scaled_dot_product_attention do not support, or None."""
    tried = on_accelerator(device) or plan.attention is Attention.SDPA_FLASH
    return _refusal(plan, family, device, by_document) if tried else None


def _refusal(plan: Plan, family: Family, device: torch.device, by_document: bool = False) -> str | None:
    """Return why no fused kernel supports one group of heads of some attention of a plan, or None."""
    only = _ONLY.get(plan.attention)
    backends = list(_FUSED) if only is None else [only]
    for trial in _trials(plan, family, device, by_document):
        try:
            with sdpa_kernel(backends):
                scaled_dot_product_attention(*trial.tensors, **trial.settings)
        except RuntimeError as error:
            return f"has no fused kernel here ({' '.join(str(error).split())})"
    return None


class _Trial(NamedTuple):
    tensors: tuple[Tensor, Tensor, Tensor]
    """Query, key and value of one group of heads."""
    settings: dict[str, Any]


def _trials(plan: Plan, family: Family, device: torch.device, by_document: bool) -> Iterator[_Trial]:
    """Yield a kernel's trial inputs for each attention of a plan: one group of heads, and few positions.

    Without a mask transformers passes on query heads that share a key head without repeating it (`enable_gqa`).
    """
    dtype, config = getattr(torch, plan.precision.compute), family.configuration(plan.model)
    make, sinks = partial(torch.zeros, dtype=dtype, device=device), family.facts.attention.sinks
    for heads, length, leaves_out in dict.fromkeys(_attentions(plan.model, family)):
        by_mask, learned = by_document or leaves_out in (Mask.PADDING, Mask.BIAS), leaves_out is Mask.BIAS
        masked = by_mask or heads.window is not None or heads.alibi
        group = 1 if masked else heads.heads // heads.kv_heads
        # A mask of all pairs of long samples would not fit: 32 GiB for 131,072 positions.
        tried = min(length, _TRIED + length % _ALIGNMENT)
        places, more = tried + sinks, SINK_FEATURES * sinks
        settings = {
            "attn_mask": make(places, places, requires_grad=learned) if masked else None,
            "dropout_p": family.dropout(config),
            "is_causal": leaves_out is Mask.CAUSAL and not masked,
            "enable_gqa": group > 1,
        }
        yield _Trial(
            (
                make(1, group, places, heads.head_features + more, requires_grad=True),
                make(1, 1, places, heads.head_features + more, requires_grad=True),
                make(1, 1, places, heads.features_of_values + more, requires_grad=True),
            ),
            settings,
        )


def _attentions(model: Model, family: Family) -> Iterator[tuple[Heads, int, Mask]]:
    """Yield the heads of each attention, the number of positions, and the mask.

    Positions are counted in a sample, in an image, or in a window of an image.
    """
    config = family.facts.configured(model.config)
    for name, kind in model.types.items():
        layer, lengths = base_type(name), {tensor.name: tensor.sequence_length for tensor in kind.outputs}
        of_window, mask = (
            family.facts.shapes(layer, config).get(ATTENDED),
            family.facts.of_type(layer, config).attention.mask,
        )
        for heads in (region.attention for region in kind.regions if region.attention is not None):
            yield heads, of_window or lengths[heads.queries], mask


def _drops_alike(plan: Plan, family: Family) -> str | None:
    """Return the first layer whose replicas must draw different dropout in attention, which compiled graphs cannot."""
    if family.dropout(family.configuration(plan.model)) == 0:
        return None
    alike = (i for i, strategy in enumerate(plan.layers) if layout_of(strategy).replicas > 1)
    return next((f"layers[{i}]" for i in alike), None)


def _nowhere(plan: Plan, family: Family) -> Iterator[str]:
    """Yield the requested fusions that the model has no modules for."""
    types = plan.model.layers
    layers = (EMBEDDING, *(f"layers[{types.index(kind)}]" for kind in dict.fromkeys(types)), HEAD)
    for name in plan.fused:
        with torch.device("meta"):
            modules = [family.build(plan.model, layer) for layer in layers]
        if not any(fusible(module, name) for module in modules):
            yield name
