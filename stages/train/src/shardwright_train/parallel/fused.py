"""Fused kernels of the flash-attn package (Dao 2023) instead of the operations of stock modules.

Only this file calls them. The code around them is tested with stand-ins written in PyTorch: the kernels themselves
need a GPU, and have not been run.
"""

import copy
import inspect
from collections.abc import Callable, Collection
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_ROTARY = "apply_rotary_pos_emb"
"""Name of the function in transformers' models that rotates queries and keys."""


def fuse(module: nn.Module, names: Collection[str]) -> None:
    """Make a stock layer compute its rotary embeddings or norms with fused kernels, before its parameters are sharded.

    The cross entropy is not set here: the head calls `fused_cross_entropy`.
    """
    for part in module.modules():
        if "rotary" in names and _turns_halves(part):
            part.forward = MethodType(_with_global(_forward_of(part), _ROTARY, _fused_rotary), part)
        if "norm" in names and (norm := _norm_of(part)) is not None:
            part.forward = norm


def fusible(module: nn.Module, name: str) -> bool:
    """Return whether a layer has modules that a named fused kernel can compute; each head has a cross entropy."""
    if name == "rotary":
        return any(map(_turns_halves, module.modules()))
    return name != "norm" or any(_norm_of(part) is not None for part in module.modules())


def fused_cross_entropy(logits: Tensor, labels: Tensor, ignored: int, group: dist.ProcessGroup) -> Tensor:
    """Return the cross entropy [n], in float32, of logits [..., v/ranks] sharded equally by class over a group.

    The result is equal on each rank, and 0 for labels [...] equal to `ignored`.
    """
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    shared = group if group.size() > 1 else None
    losses: Tensor
    losses, _ = cross_entropy_loss(logits.flatten(0, -2), labels.flatten(), ignore_index=ignored, process_group=shared)
    return losses


def _fused_rotary(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [b, heads, s, d] by angles whose cosines and sines [1, s, d] are two equal halves."""
    from flash_attn.layers.rotary import apply_rotary_emb

    cos, sin = (x[0, :, : x.shape[-1] // 2] for x in (cos, sin))
    turned = (apply_rotary_emb(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (queries, keys))
    return next(turned), next(turned)


def _forward_of(module: nn.Module) -> FunctionType | None:
    forward = inspect.unwrap(type(module).forward)
    return forward if isinstance(forward, FunctionType) else None


def _with_global(function: FunctionType | None, name: str, value: Callable[..., Any]) -> FunctionType:
    """Return a copy of a function with another value for a global name; the function itself is unchanged."""
    assert function is not None
    changed = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


def _turns_halves(module: nn.Module) -> bool:
    """Return whether a module is an attention that rotates one half of features against the other, like the kernel.

    Some models have a function of the same name, or a second one, that rotates even features against odd ones.
    """
    forward, config = _forward_of(module), getattr(module, "config", None)
    if forward is None or _ROTARY not in forward.__code__.co_names or getattr(config, "rope_interleave", False):
        return False
    x, angles = _numbers(1, 2, 3, 8), _numbers(1, 3, 4)
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    rotated, _ = forward.__globals__[_ROTARY](x, x, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
    return torch.allclose(rotated, expected)


def _norm_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the fused forward of a layer norm or an RMS norm; None for other modules."""
    if isinstance(module, nn.LayerNorm) and module.weight is not None and len(module.normalized_shape) == 1:
        return lambda x: _layer_norm(module, x)
    return (lambda x: _rms_norm(module, x)) if _is_rms_norm(module) else None


def _layer_norm(module: nn.Module, x: Tensor) -> Tensor:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    normed: Tensor = layer_norm_fn(x, module.weight, module.bias, eps=module.eps)
    return normed


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    normed: Tensor = rms_norm_fn(x, module.weight, None, eps=module.variance_epsilon)
    return normed


def _is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module divides by the root mean square and multiplies by its weight, without a gate."""
    held = dict(module.named_parameters())
    if list(held) != ["weight"] or held["weight"].dim() != 1 or not hasattr(module, "variance_epsilon"):
        return False
    tried = copy.deepcopy(module).to_empty(device="cpu").float()
    width = held["weight"].shape[0]
    x, weight = _numbers(2, width), _numbers(width)
    # It may draw a dropout, which would then not be computed.
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        tried.weight.copy_(weight)  # type: ignore[operator]
        expected = nn.functional.rms_norm(x, (width,), weight, float(module.variance_epsilon))  # type: ignore[arg-type]
        return torch.allclose(tried(x), expected, atol=1e-6)


def _numbers(*shape: int) -> Tensor:
    """Return numbers for a trial, without using the random generators."""
    count = torch.Size(shape).numel()
    return torch.arange(1, count + 1, dtype=torch.float32).sin().view(shape)
