"""The activation of gpt-oss's experts (OpenAI 2025): a SwiGLU of clamped inputs, one of which is one too small."""

from typing import Any

import torch
from torch import Tensor


def clamped_swiglu(gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
    """Return weighted activations [rows, features] of rows whose columns of gate and values alternate.

    `gate_up` [rows, 2 features] is cut off at `limit`, `alpha` is in the sigmoid; weights [rows].
    """
    inner: Tensor = _Gated.apply(gate_up, weights, limit, alpha)  # type: ignore[no-untyped-call]
    return inner


class _Gated(torch.autograd.Function):
    """An activation that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.numbers = limit, alpha
        return _gated(gate_up, weights, limit, alpha)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            of_input, of_weights = torch.autograd.grad(_gated(*inputs, *ctx.numbers), inputs, gradient)
        return of_input, of_weights, None, None


def _gated(gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return ((up + 1) * (gate * (gate * alpha).sigmoid()) * weights[:, None]).to(gate_up.dtype)
