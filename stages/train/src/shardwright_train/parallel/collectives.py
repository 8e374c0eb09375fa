"""Collectives inside a tensor-parallel group, each with its gradient (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Move = Callable[[Tensor], Tensor]

_SEQUENCE_DIM = 1


class _WithTranspose(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def with_transpose(x: Tensor, there: Move, back: Move) -> Tensor:
    """Return a linear collective `there` of a tensor, whose gradient goes through its transpose `back`."""
    moved: Tensor = _WithTranspose.apply(x, there, back)  # type: ignore[no-untyped-call]
    return moved


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather [b, s/n, h] of each rank to [b, s, h] on all; the gradient is summed and scattered."""
    return _differentiable(x, group, _gather, _scatter)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum [b, s, h] over the ranks and leave each its [b, s/n, h]; the gradient is gathered."""
    return _differentiable(x, group, _scatter, _gather)


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor unchanged, for different use on each rank; the gradient is summed over the ranks."""
    return _differentiable(x, group, _same, _sum)


def sum_over_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, the same on all; the gradient passes unchanged."""
    return _differentiable(x, group, _sum, _same)


def exchange_dims(x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    """Split the dim `split` and gather the dim `gather` over the ranks; the gradient takes the reverse way."""
    there, back = (partial(_all_to_all, split=a, gather=b, group=group) for a, b in ((split, gather), (gather, split)))
    return with_transpose(x, there, back)


def all_reduce_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over the ranks in place, all in one collective."""
    together = torch.cat([x.reshape(-1) for x in tensors])
    dist.all_reduce(together, group=group)
    for x, summed in zip(tensors, together.split([x.numel() for x in tensors]), strict=True):
        x.copy_(summed.view_as(x))


GroupMove = Callable[[Tensor, dist.ProcessGroup], Tensor]


def _differentiable(x: Tensor, group: dist.ProcessGroup, there: GroupMove, back: GroupMove) -> Tensor:
    if group.size() == 1:
        return x
    return with_transpose(x, lambda x: there(x, group), lambda gradient: back(gradient, group))


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    stacked = x.new_empty((group.size(), *x.shape))
    dist.all_gather_into_tensor(stacked.view(-1), x.contiguous().view(-1), group=group)
    return torch.cat(stacked.unbind(0), _SEQUENCE_DIM)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    stacked = torch.stack(x.chunk(group.size(), _SEQUENCE_DIM))
    mine = torch.empty_like(stacked[0])
    dist.reduce_scatter_tensor(mine.view(-1), stacked.view(-1), group=group)
    return mine


def _same(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum in place: products, and gradients that only products produce, which nothing else reads."""
    # A compiled graph copies where it must. Of x itself autograd would make a view.
    total = x.clone() if torch.compiler.is_compiling() else x.detach().contiguous()
    dist.all_reduce(total, group=group)
    return total


def _all_to_all(x: Tensor, split: int, gather: int, group: dist.ProcessGroup) -> Tensor:
    outgoing = torch.stack(x.chunk(group.size(), split))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=group)
    return torch.cat(incoming.unbind(0), gather)
