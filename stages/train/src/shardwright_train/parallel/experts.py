"""Experts that each rank has: positions sorted by expert and back, and matrix products in groups of rows.

Both ways are permutations, and so are their gradients: nothing is added by atomics, so that a step repeats to the bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

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
        even, more = divmod(rows, len(counts))
        return [even + (i < more) for i in range(len(counts))]
    numbers: list[int] = counts.tolist()
    return numbers


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
