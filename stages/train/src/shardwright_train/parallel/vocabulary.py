"""Embedding and cross entropy over a vocabulary that a tensor-parallel group shares (Shoeybi et al. 2019)."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

__all__ = ["sum_of_cross_entropy", "vocabulary_embedding"]


def vocabulary_embedding(tokens: Tensor, weight: Tensor, rank: int) -> Tensor:
    """Rows of this rank's slice [v/n, h] for the tokens it covers, zeros for the others: [b, s, h] to be summed."""
    index = tokens - rank * weight.shape[0]
    mine = (index >= 0) & (index < weight.shape[0])
    rows = F.embedding(index.where(mine, torch.zeros_like(index)), weight)
    return rows * mine[..., None].to(rows.dtype)


def sum_of_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over [b, s] of the cross entropy of logits [b, s, v/n] that lie over a group; the same on each rank.

    Computed in float32 at least. Labels are token numbers; every position counts.
    """
    total: Tensor = _CrossEntropy.apply(logits, labels, group)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.dtype = logits.dtype
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        highest = wide.amax(-1)
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        exponentials = (wide - highest[..., None]).exp_()
        index = labels - group.rank() * wide.shape[-1]
        mine = (index >= 0) & (index < wide.shape[-1])
        index = index.where(mine, torch.zeros_like(index))
        chosen = wide.gather(-1, index[..., None])[..., 0] - highest
        sums = torch.stack([exponentials.sum(-1), chosen.where(mine, torch.zeros_like(chosen))])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(exponentials.div_(sums[0][..., None]), index, mine)
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities, index, mine = ctx.saved_tensors
        one_hot = -mine[..., None].to(probabilities.dtype)
        return (probabilities.scatter_add(-1, index[..., None], one_hot) * grad).to(ctx.dtype), None, None
