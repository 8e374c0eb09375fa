"""A stand-in for the parts of flash-attn that are used, in plain PyTorch: its kernels need a GPU, and are not run here.

The signatures are those of the package (2.7), and so is what its kernels take for granted: shapes, equal formats,
equal shares of a vocabulary. In float64 these compute in float64, where the kernels would use float32.
"""

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CALLS: Counter[str] = Counter()
"""How often each function was called."""


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: Any = None,
    max_seqlen: Any = None,
) -> Tensor:
    CALLS["rotary"] += 1
    assert not interleaved and not inplace and seqlen_offsets == 0 and cu_seqlens is None and max_seqlen is None
    _, length, _, features = x.shape
    half = cos.shape[1]
    assert cos.shape == sin.shape == (length, half) and 2 * half <= features <= 256
    assert x.dtype == cos.dtype == sin.dtype
    cos, sin = cos[:, None], sin[:, None]
    first, second, rest = x.split([half, half, features - 2 * half], -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Any = None,
    x1: Any = None,
    weight1: Any = None,
    bias1: Any = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Any = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out: Any = None,
    residual_out: Any = None,
) -> Tensor:
    CALLS["rms_norm" if is_rms_norm else "layer_norm"] += 1
    assert dropout_p == 0 and not prenorm and not residual_in_fp32 and not return_dropout_mask
    assert all(v is None for v in (residual, x1, weight1, bias1, rowscale, out, residual_out))
    assert weight.shape == x.shape[-1:] and (bias is None or bias.shape == weight.shape)
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = weight.to(wide), None if bias is None else bias.to(wide)
    if is_rms_norm:
        assert bias is None
        return F.rms_norm(x.to(wide), weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(x.to(wide), weight.shape, weight, bias, eps).to(x.dtype)


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, eps: float = 1e-6, **more: Any) -> Tensor:
    return layer_norm_fn(x, weight, bias, *rest, eps=eps, is_rms_norm=True, **more)


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Any = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    CALLS["cross_entropy"] += 1
    assert precomputed_lse is None and not inplace_backward
    assert (label_smoothing, logit_scale, lse_square_scale) == (0.0, 1.0, 0.0)
    assert logits.dim() == 2 and labels.shape == logits.shape[:1]
    losses: Tensor = _CrossEntropy.apply(logits, labels, ignore_index, process_group)
    return losses, torch.zeros_like(losses)


class _CrossEntropy(torch.autograd.Function):
    """The losses are summed over the group, the gradients are each rank's own, as in the package."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignored: int, group: dist.ProcessGroup | None) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        index = labels - rank * logits.shape[1]
        mine = (index >= 0) & (index < logits.shape[1])
        index = index.where(mine, 0)
        counted = labels != ignored
        losses = -wide.gather(1, index[:, None])[:, 0] * mine
        lse = wide.logsumexp(1)
        if group is not None:
            every = [torch.empty_like(lse) for _ in range(size)]
            dist.all_gather(every, lse, group)
            dist.all_reduce(losses, group=group)
            lse = torch.stack(every).logsumexp(0)
        ctx.save_for_backward((wide - lse[:, None]).exp(), index, mine, counted)
        ctx.dtype = logits.dtype
        return (losses + lse) * counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, mine, counted = ctx.saved_tensors
        probabilities[torch.arange(len(index)), index] -= mine.to(probabilities.dtype)
        return (probabilities * (grad * counted)[:, None]).to(ctx.dtype), None, None, None


def modules() -> dict[str, ModuleType]:
    """The modules of the stand-in, by name, for sys.modules."""
    found = {}
    for name, functions in {
        "flash_attn": (),
        "flash_attn.layers": (),
        "flash_attn.layers.rotary": (apply_rotary_emb,),
        "flash_attn.ops": (),
        "flash_attn.ops.triton": (),
        "flash_attn.ops.triton.layer_norm": (layer_norm_fn, rms_norm_fn),
        "flash_attn.ops.triton.cross_entropy": (cross_entropy_loss,),
    }.items():
        found[name] = ModuleType(name)
        for function in functions:
            setattr(found[name], function.__name__, function)
    return found


def install() -> None:
    """Take the package's place in this process."""
    sys.modules.update(modules())
