"""Routers of experts, which choose as the stock ones do, to the bit in float32 and narrower formats."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Choice(NamedTuple):
    """The choice of a router."""

    probabilities: Tensor
    """Probabilities of all experts [positions, experts], in float32 or wider."""
    experts: Tensor
    """Experts of each position [positions, top_k]."""
    weights: Tensor
    """Weights of their results [positions, top_k], in the format of the probabilities."""


def chosen(x: Tensor, matrix: Tensor, top_k: int, normed: bool) -> Choice:
    """Return the experts of the highest probabilities for positions x [positions, hidden].

    By a matrix [experts, hidden]. `normed`: whether weights are divided by their sum.
    """
    logits = linear(x, matrix)
    probabilities = logits.softmax(-1, dtype=_wide_format(logits))
    weights, index = probabilities.topk(top_k, -1)
    return Choice(probabilities, index, weights / weights.sum(-1, keepdim=True) if normed else weights)


def scored(x: Tensor, router: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities by a router with weight, bias and `top_k`, and scores and numbers of the best experts.

    Probabilities [positions, experts] and scores [positions, top_k] are in float32 or wider.
    """
    logits = linear(x, router.weight, getattr(router, "bias", None))
    scores, index = logits.topk(router.top_k, -1)
    return logits.softmax(-1, dtype=_wide_format(logits)), scores.to(_wide_format(logits)), index


def wide_logits(x: Tensor, matrix: Tensor) -> Tensor:
    """Return the scores [positions, experts] of a matrix, computed in float32 or wider."""
    logits: Tensor = _Widened.apply(x, matrix)  # type: ignore[no-untyped-call]
    return logits


def wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, or as it is where its format is wider."""
    return x.to(_wide_format(x))


def in_best_groups(best: Tensor, number: int, scores: Tensor) -> Tensor:
    """Return which experts [positions, experts] are in the `number` groups with the best scores [positions, groups]."""
    index = best.topk(number, -1, sorted=False).indices
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, index, True)
    return chosen.repeat_interleave(scores.shape[-1] // best.shape[-1], -1)


def _wide_format(x: Tensor) -> torch.dtype:
    return torch.promote_types(torch.float32, x.dtype)


class _Widened(torch.autograd.Function):
    """A product in float32 or wider, which keeps its inputs as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return linear(wide(x), wide(matrix))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, matrix = ctx.saved_tensors
        return (gradient @ wide(matrix)).to(x.dtype), (gradient.T @ wide(x)).to(matrix.dtype)
