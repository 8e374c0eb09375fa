"""Collectives inside a tensor-parallel group, each with its gradient (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["copy_to_group", "gather_sequence", "scatter_sequence", "sum_over_group", "sum_together"]

_SEQUENCE_DIM = 1


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[b, s/n, h] of each rank to [b, s, h] on all; the gradient is summed and scattered."""
    return x if group.size() == 1 else _apply(_GatherSequence, x, group)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [b, s, h] over the ranks and leave each its [b, s/n, h]; the gradient is gathered."""
    return x if group.size() == 1 else _apply(_ScatterSequence, x, group)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same tensor, used differently by each rank from here on; the gradient is summed over the ranks."""
    return x if group.size() == 1 else _apply(_CopyToGroup, x, group)


def sum_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks, the same on all; the gradient passes as it is."""
    return x if group.size() == 1 else _apply(_SumOverGroup, x, group)


def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks, in place, all in one message."""
    together = torch.cat([x.reshape(-1) for x in tensors])
    dist.all_reduce(together, group=group)
    for x, summed in zip(tensors, together.split([x.numel() for x in tensors]), strict=True):
        x.copy_(summed.view_as(x))


def _apply(function: type[torch.autograd.Function], x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = function.apply(x, group)
    return result


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    stacked = x.new_empty((group.size(), *x.shape))
    dist.all_gather_into_tensor(stacked.view(-1), x.contiguous().view(-1), group=group)
    return torch.cat(stacked.unbind(0), _SEQUENCE_DIM)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    stacked = torch.stack(x.chunk(group.size(), _SEQUENCE_DIM))
    mine = torch.empty_like(stacked[0])
    dist.reduce_scatter_tensor(mine.view(-1), stacked.view(-1), group=group)
    return mine


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad, ctx.group), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather(grad, ctx.group), None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
