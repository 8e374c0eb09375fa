"""Embedding and cross entropy over a vocabulary that a tensor-parallel group shares (Shoeybi et al. 2019)."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.plan.communication import LOSS_ELEMENTS
from shardwright_train.parallel.fused import fused_cross_entropy
from shardwright_train.parallel.tensor import TensorParallel

IGNORED = -100
"""Label of a position that does not count, as in transformers."""


def token_embedding(embedding: nn.Embedding, tokens: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """Look up tokens [b, s] in this rank's rows and sum over the group: [b, this rank's positions, h]."""
    weight, padding = embedding.weight, embedding.padding_idx
    tokens = tokens[:, tensor_parallel.positions_inside(tokens.shape[1])]
    index = tokens - tensor_parallel.rank * weight.shape[0]
    mine = (index >= 0) & (index < weight.shape[0])
    if padding is not None:  # The row of padding has no gradient, as in a stock model.
        padding -= tensor_parallel.rank * weight.shape[0]
        padding = padding if 0 <= padding < weight.shape[0] else None
    rows = F.embedding(index.where(mine, torch.zeros_like(index)), weight, padding)
    return tensor_parallel.leave(rows * mine[..., None].to(rows.dtype))


def positions_of(tokens: Tensor, tensor_parallel: TensorParallel, given: Tensor | None = None) -> Tensor:
    """The position numbers of tokens [b, s] that this rank holds between the matrix products.

    Positions count from 0 unless they are given [b, s] in the order in which ranks hold them.
    """
    held = tensor_parallel.positions(tokens.shape[1])
    if given is not None:
        return given[:, held]
    if tensor_parallel.order is not None:
        return tensor_parallel.order[held]
    return torch.arange(held.start, held.stop, device=tokens.device)


def loss_of_logits(logits: Tensor, labels: Tensor, classes: int, tensor_parallel: TensorParallel) -> Tensor:
    """The summed cross entropy of this rank's share [b, s, v/n] of `classes` logits; labels [b, s] are whole."""
    labels = labels[:, tensor_parallel.positions_inside(labels.shape[1])]
    if tensor_parallel.fused_loss:
        return fused_cross_entropy(logits, labels, IGNORED, tensor_parallel.group).sum()
    first = tensor_parallel.rank * -(-classes // tensor_parallel.size)
    return sum_of_cross_entropy(logits, labels, first, tensor_parallel.group)


def sum_of_cross_entropy(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """The sum over [b, s] of the cross entropy of logits [b, s, v/n] sharded over a group; equal on each rank.

    Computed in float32 at least. This rank has the classes from `first` on; labels that are IGNORED do not count. The
    backward pass overwrites the logits.
    """
    total: Tensor = _CrossEntropy.apply(logits, labels, first, group)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy that keeps the logits, whose gradient overwrites them, and widens some positions at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        rows, index, mine = logits.flatten(0, -2), *_index(labels.flatten(), first, logits.shape[-1])
        # A rank whose share of a padded vocabulary is empty takes part in the sums with nothing.
        highest = _wide(rows.new_full(index.shape, -torch.inf) if rows.shape[-1] == 0 else rows.amax(-1))
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        sums = highest.new_zeros(2, *index.shape)
        for part in _parts(rows):
            sums[0, part] = (_wide(rows[part]) - highest[part, None]).exp_().sum(-1)
        if rows.shape[-1]:
            chosen = _wide(rows.gather(-1, index[:, None])[:, 0]) - highest
            sums[1] = chosen.where(mine, sums[1])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        ctx.first = first
        ctx.save_for_backward(logits, labels, highest, sums[0].clone())
        return ((sums[0].log() - sums[1]) * (labels.flatten() != IGNORED)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, highest, total = ctx.saved_tensors
        rows, index, mine = logits.detach().flatten(0, -2), *_index(labels.flatten(), ctx.first, logits.shape[-1])
        scale = grad * (labels.flatten() != IGNORED)
        for part in _parts(rows):
            gradient = (_wide(rows[part]) - highest[part, None]).exp_().div_(total[part, None])
            gradient.scatter_add_(-1, index[part, None], -mine[part, None].to(gradient.dtype))
            rows[part] = gradient.mul_(scale[part, None])
        return rows.view_as(logits), None, None, None


def _index(labels: Tensor, first: int, classes: int) -> tuple[Tensor, Tensor]:
    """Each label's index among a rank's classes, or 0, and whether it is one of them."""
    index = labels - first
    mine = (index >= 0) & (index < classes)
    return index.where(mine, torch.zeros_like(index)), mine


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _parts(rows: Tensor) -> Iterator[slice]:
    """Yield the positions whose logits [n, v] are widened together; none if a rank has no classes."""
    count, classes = rows.shape
    size = max(1, LOSS_ELEMENTS // max(1, classes))
    return (slice(i, i + size) for i in range(0, count if classes else 0, size))
