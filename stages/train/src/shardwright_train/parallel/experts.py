"""Experts that each rank has: positions sorted by expert and back, and matrix products in groups of rows.

Both ways are permutations, and so are their gradients: nothing is added by atomics, so that a step repeats to the bit.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.torch_private import FakeTensor

_ALIGNMENT = 8
"""Numbers of 16 bits that rows of grouped products must be a multiple of: 16 bytes."""


class Dispatch(NamedTuple):
    """The rows that positions are for their experts: `copies` of each position, sorted by expert."""

    order: Tensor
    """For each sorted row [rows], its number among the copies of all positions."""
    inverse: Tensor
    """For each copy of each position [rows], the number of its sorted row."""
    copies: int
    counts: Tensor
    """Rows of each expert [experts]."""

    def sort(self, x: Tensor) -> Tensor:
        """Return the sorted rows of positions x [positions, features]."""
        rows: Tensor = _Sorted.apply(x, self.order, self.inverse, self.copies)  # type: ignore[no-untyped-call]
        return rows

    def sort_copies(self, x: Tensor) -> Tensor:
        """Return the sorted numbers [rows] of what each copy has of its own, x [positions, copies]."""
        rows: Tensor = _Sorted.apply(x.reshape(-1), self.order, self.inverse, 1)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """Return the sums of the rows of each position [positions, features]."""
        collected: Tensor = _Collected.apply(rows, self.order, self.inverse, self.copies)  # type: ignore[no-untyped-call]
        return collected


def dispatch(index: Tensor, counts: Tensor) -> Dispatch:
    """Return the order of positions that go to the experts `index` [positions, copies]: each expert's by position.

    `counts` [experts] is how often each is named.
    """
    order = index.reshape(-1).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Dispatch(order, inverse, index.shape[1], counts)


class Exchange(NamedTuple):
    """The way of rows to the ranks of their experts and back; there, they are sorted by expert."""

    group: dist.ProcessGroup
    sent: Sequence[int]
    """Rows for each rank of the group."""
    received: Sequence[int]
    order: Tensor
    """For each row here that is sorted by expert, its number among those received."""
    inverse: Tensor
    counts: Tensor
    """Rows of each expert of this rank."""

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts, sorted, for sorted rows of all experts."""
        arrived = self._moved(rows, self.sent, self.received)
        sorted_rows: Tensor = _Sorted.apply(arrived, self.order, self.inverse, 1)  # type: ignore[no-untyped-call]
        return sorted_rows

    def back(self, rows: Tensor) -> Tensor:
        """Return the results of sorted rows of all experts, for those of this rank's experts."""
        arrived: Tensor = _Sorted.apply(rows, self.inverse, self.order, 1)  # type: ignore[no-untyped-call]
        return self._moved(arrived, self.received, self.sent)

    def _moved(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        there = partial(_all_to_all, sent=sent, received=received, group=self.group)
        back = partial(_all_to_all, sent=received, received=sent, group=self.group)
        return with_transpose(rows, there, back)


def exchange(counts: Tensor, rows: int, group: dist.ProcessGroup) -> Exchange:
    """Return the exchange of rows [rows, ...], sorted by expert, among ranks that share experts out.

    `counts` [experts] are this rank's rows of each. The host waits for how many rows go where.
    """
    ranks = group.size()
    here = counts.to(torch.int32).view(ranks, -1)
    arriving = torch.empty_like(here)
    dist.all_to_all_single(arriving.view(-1), here.contiguous().view(-1), group=group)
    sent, received = (_rows_of_ranks(each, rows) for each in (here, arriving))
    expert = torch.arange(here.shape[1], device=counts.device).repeat(ranks)
    order = expert.repeat_interleave(arriving.view(-1), output_size=sum(received)).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Exchange(group, sent, received, order, inverse, arriving.sum(0))


def _rows_of_ranks(counts: Tensor, rows: int) -> Sequence[int]:
    """Return the rows of each rank by its counts [ranks, experts]; without data, as many for each as for another."""
    if isinstance(counts, FakeTensor):
        return _even(rows, len(counts))
    numbers: list[int] = counts.sum(1).tolist()
    return numbers


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


def expert_products(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return sorted rows [rows, inputs] times the matrices [experts, outputs, inputs] of their experts.

    An expert without rows takes part: its gradient is zero. The host waits for the counts where the device has no
    grouped products.
    """
    if _has_grouped_products(rows, weights):
        return grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(_rows_of_experts(counts, len(rows)))
    return torch.cat([linear(part, matrix) for part, matrix in zip(parts, weights.unbind(), strict=True)])


def _has_grouped_products(rows: Tensor, weights: Tensor) -> bool:
    aligned = all(length % _ALIGNMENT == 0 for length in weights.shape[1:])
    return rows.is_cuda and rows.dtype is torch.bfloat16 and aligned


def _rows_of_experts(counts: Tensor, rows: int) -> Sequence[int]:
    """Return the rows of each expert; without data, as many for each as for another."""
    if isinstance(counts, FakeTensor):
        return _even(rows, len(counts))
    numbers: list[int] = counts.tolist()
    return numbers


def _even(rows: int, parts: int) -> list[int]:
    share, more = divmod(rows, parts)
    return [share + (i < more) for i in range(parts)]


class _Sorted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, order // copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _summed(gradient, inverse, ctx.copies), None, None, None


class _Collected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.copies = copies
        return _summed(rows, inverse, copies)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order // ctx.copies), None, None, None


def _summed(rows: Tensor, inverse: Tensor, copies: int) -> Tensor:
    back = rows.index_select(0, inverse)
    return back if copies == 1 else back.unflatten(0, (-1, copies)).sum(1)
