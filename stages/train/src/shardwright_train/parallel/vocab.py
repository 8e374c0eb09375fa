"""Embedding and cross entropy over a vocabulary that a tensor-parallel group shares (Shoeybi et al. 2019)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright_train.parallel.fused import fused_cross_entropy
from shardwright_train.parallel.tensor import TensorParallel

__all__ = ["IGNORED", "loss_of_logits", "positions_of", "sum_of_cross_entropy", "token_embedding"]

IGNORED = -100
"""The label of a position that does not count, as in transformers."""


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


def positions_of(tokens: Tensor, tensor_parallel: TensorParallel) -> Tensor:
    """The numbers of the positions of tokens [b, s] that this rank holds between the matrix products."""
    own = tensor_parallel.positions(tokens.shape[1])
    return torch.arange(own.start, own.stop, device=tokens.device)


def loss_of_logits(logits: Tensor, labels: Tensor, classes: int, tensor_parallel: TensorParallel) -> Tensor:
    """Sum of cross entropy of this rank's share [b, s, v/n] of `classes` logits; labels [b, s] are of all positions."""
    labels = labels[:, tensor_parallel.positions_inside(labels.shape[1])]
    if tensor_parallel.fused_loss:
        return fused_cross_entropy(logits, labels, IGNORED, tensor_parallel.group).sum()
    first = tensor_parallel.rank * -(-classes // tensor_parallel.size)
    return sum_of_cross_entropy(logits, labels, first, tensor_parallel.group)


def sum_of_cross_entropy(logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over [b, s] of the cross entropy of logits [b, s, v/n] that lie over a group; the same on each rank.

    Computed in float32 at least. This rank has the classes from `first` on; labels that are IGNORED do not count.
    """
    total: Tensor = _CrossEntropy.apply(logits, labels, first, group)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dtype = logits.dtype
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        # A rank whose share of a padded vocabulary is empty takes part in the sums with nothing.
        empty = wide.shape[-1] == 0
        highest = wide.new_full(wide.shape[:-1], -torch.inf) if empty else wide.amax(-1)
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponentials = (wide - highest[..., None]).exp_()
        index = labels - first
        mine = (index >= 0) & (index < wide.shape[-1])
        index = index.where(mine, torch.zeros_like(index))
        nothing = torch.zeros_like(highest)
        chosen = nothing if empty else wide.gather(-1, index[..., None])[..., 0] - highest
        sums = torch.stack([exponentials.sum(-1), chosen.where(mine, nothing)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        counts = (labels != IGNORED).to(wide.dtype)
        ctx.save_for_backward(exponentials.div_(sums[0][..., None]), index, mine, counts)
        return ((sums[0].log() - sums[1]) * counts).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, mine, counts = ctx.saved_tensors
        # In place: nothing needs the probabilities again, and they are as large as the logits.
        if probabilities.shape[-1]:
            probabilities.scatter_add_(-1, index[..., None], -mine[..., None].to(probabilities.dtype))
        return probabilities.mul_(counts[..., None] * grad).to(ctx.dtype), None, None, None
