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
_BLACKWELL = (10, 0)
"""Compute capability from which gradients of matrices without rows are not written (PyTorch issue 172439)."""


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
    """The way of rows to the ranks of their experts and back; there, they are sorted by expert.

    Ranks that share the features of the same experts gather the rows that any of them receives, and sum the results.
    """

    experts: dist.ProcessGroup | None
    """Ranks that share experts out; None where each has all."""
    features: dist.ProcessGroup | None
    """Ranks that share each expert's features; None where each has all."""
    sent: Sequence[int]
    """Rows for each rank that shares experts out."""
    received: Sequence[int]
    gathered: Sequence[int]
    """Rows that each rank that shares features receives."""
    order: Tensor
    """For each row here that is sorted by expert, its number among those received."""
    inverse: Tensor
    counts: Tensor
    """Rows of each expert of this rank."""

    def there(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts, sorted, for sorted rows of all experts."""
        arrived = self._moved(rows, self.sent, self.received)
        if self.features is not None:
            arrived = with_transpose(arrived, self._gather, self._scatter)
        sorted_rows: Tensor = _Sorted.apply(arrived, self.order, self.inverse, 1)  # type: ignore[no-untyped-call]
        return sorted_rows

    def back(self, rows: Tensor) -> Tensor:
        """Return the results of sorted rows of all experts, for those of this rank's experts."""
        arrived: Tensor = _Sorted.apply(rows, self.inverse, self.order, 1)  # type: ignore[no-untyped-call]
        if self.features is not None:
            arrived = with_transpose(arrived, self._scatter, self._gather)
        return self._moved(arrived, self.received, self.sent)

    def _moved(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        if self.experts is None:
            return rows
        there = partial(_all_to_all, sent=sent, received=received, group=self.experts)
        back = partial(_all_to_all, sent=received, received=sent, group=self.experts)
        return with_transpose(rows, there, back)

    def _gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks that share features; they are padded to those of the fullest on their way."""
        ranks, most = len(self.gathered), max(self.gathered)
        if most == 0:
            return rows
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        stacked = rows.new_empty(ranks, *padded.shape)
        dist.all_gather_into_tensor(stacked.view(-1), padded.view(-1), group=self.features)
        return torch.cat([part[:length] for part, length in zip(stacked, self.gathered, strict=True)])

    def _scatter(self, rows: Tensor) -> Tensor:
        """Return the sums over the ranks that share features of the rows that this rank received."""
        assert self.features is not None
        ranks, most = len(self.gathered), max(self.gathered)
        if most == 0:
            return rows
        stacked = rows.new_zeros(ranks, most, *rows.shape[1:])
        for part, padded in zip(rows.split(list(self.gathered)), stacked, strict=True):
            padded[: len(part)] = part
        mine = torch.empty_like(stacked[0])
        dist.reduce_scatter_tensor(mine.view(-1), stacked.view(-1), group=self.features)
        return mine[: self.gathered[self.features.rank()]]


def exchange(
    counts: Tensor, rows: int, experts: dist.ProcessGroup | None, features: dist.ProcessGroup | None
) -> Exchange:
    """Return the exchange of rows [rows, ...], sorted by expert, among ranks that share experts and their features.

    `counts` [experts] are this rank's rows of each. The host waits for how many rows go where.
    """
    here = counts.to(torch.int32).view(1 if experts is None else experts.size(), -1).contiguous()
    arriving = torch.empty_like(here)
    if experts is None:
        arriving.copy_(here)
    else:
        dist.all_to_all_single(arriving.view(-1), here.view(-1), group=experts)
    together = arriving[None]
    if features is not None:
        together = arriving.new_empty(features.size(), *arriving.shape)
        dist.all_gather_into_tensor(together.view(-1), arriving.view(-1), group=features)
    sent, received, gathered = _rows_of_ranks(here, arriving, together, rows)
    expert = torch.arange(here.shape[1], device=counts.device).repeat(together.shape[0] * len(here))
    order = expert.repeat_interleave(together.view(-1), output_size=sum(gathered)).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Exchange(experts, features, sent, received, gathered, order, inverse, together.sum((0, 1)))


def _rows_of_ranks(here: Tensor, arriving: Tensor, together: Tensor, rows: int) -> Sequence[Sequence[int]]:
    """Return the rows that each rank gets and sends along experts, and those that each has along features.

    The counts are [ranks along experts, experts of a rank] here and arriving, and those of all ranks along features.
    Without data, as many are for each as for another.
    """
    ranks, along = len(here), len(together)
    if isinstance(here, FakeTensor):
        return _even(rows, ranks), _even(rows, ranks), [rows] * along
    numbers: list[int] = torch.cat([here.sum(1), arriving.sum(1), together.sum((1, 2))]).tolist()
    return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :]


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
        if torch.cuda.is_available() and torch.cuda.get_device_capability(rows.device) >= _BLACKWELL:
            weights = _with_gradients_of_rows(weights, counts)
        return grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(_rows_of_experts(counts, len(rows)))
    return torch.cat([linear(part, matrix) for part, matrix in zip(parts, weights.unbind(), strict=True)])


def with_biases(rows: Tensor, biases: Tensor, counts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return sorted rows [rows, features] plus the biases [experts, features] of their experts, times weights [rows].

    The gradient of the biases is a matrix product: nothing is added by atomics.
    """
    added: Tensor = _WithBiases.apply(rows, biases, counts, weights)  # type: ignore[no-untyped-call]
    return added


def _has_grouped_products(rows: Tensor, weights: Tensor) -> bool:
    """Return whether PyTorch computes products in groups; their gradients refuse matrices of no rows at all."""
    aligned = all(length % _ALIGNMENT == 0 for length in weights.shape[1:])
    return rows.is_cuda and rows.dtype is torch.bfloat16 and aligned and len(rows) > 0


def _with_gradients_of_rows(weights: Tensor, counts: Tensor) -> Tensor:
    """Return matrices [experts, outputs, inputs] whose gradients are 0 where experts have no rows, whatever arrives."""
    return with_transpose(
        weights, lambda x: x.view_as(x), lambda gradient: gradient.masked_fill((counts == 0)[:, None, None], 0)
    )


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


class _WithBiases(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, biases: Tensor, counts: Tensor, weights: Tensor | None) -> Tensor:
        numbers = torch.arange(len(biases), device=rows.device)
        expert = numbers.repeat_interleave(counts, output_size=len(rows))
        ctx.save_for_backward(biases, expert, weights)
        added = biases.index_select(0, expert)
        return rows + (added if weights is None else (added * weights[:, None]).to(rows.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:
        biases, expert, weights = ctx.saved_tensors
        share = expert == torch.arange(len(biases), device=gradient.device)[:, None]
        if weights is None:
            return gradient, share.to(gradient.dtype) @ gradient, None, None
        of_weights = (gradient * biases.index_select(0, expert)).sum(-1, dtype=weights.dtype)
        return gradient, (share * weights).to(gradient.dtype) @ gradient, None, of_weights


def _summed(rows: Tensor, inverse: Tensor, copies: int) -> Tensor:
    back = rows.index_select(0, inverse)
    return back if copies == 1 else back.unflatten(0, (-1, copies)).sum(1)
