"""Expert parallelism: rows sorted by expert, sent to the ranks of their experts, multiplied in groups, and returned.

Each position is copied k times, once for each expert chosen for it, and the copies are sorted by expert; an all-to-all
moves them to the experts' ranks (Lepikhin et al. 2021) and back. Sorting is a permutation and so is its gradient, so
nothing is added by atomics, and a step repeats bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

from shardwright.types import LayerType, Parameter
from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.torch_private import FakeTensor

_ALIGNMENT = 8
"""Rows of grouped matrix products must be a multiple of this many 16-bit numbers: 16 bytes."""
_BLACKWELL = (10, 0)
"""Compute capability from which gradients of matrices without rows are not written (PyTorch issue 172439)."""


class Counts:
    """The number of rows of each expert, on the device and on the host.

    A class, not a tuple, so that FSDP2 does not look for tensors in it.
    """

    def __init__(self, tensor: Tensor, read: Callable[[Tensor], list[int]] = Tensor.tolist) -> None:
        self.tensor = tensor
        """Rows of each expert [experts], on the device."""
        self._read = read

    def for_host(self, rows: int) -> list[int]:
        """Return the counts on the host; in a dry run without data, `rows` divided evenly."""
        return _even(rows, len(self.tensor)) if isinstance(self.tensor, FakeTensor) else self._numbers

    @cached_property
    def _numbers(self) -> list[int]:
        return self._read(self.tensor)


class ExpertOrder(NamedTuple):
    """The order of a layer's experts over the ranks that shard them, if ranks do not hold consecutive experts."""

    experts: Tensor
    """The expert at each place [experts]; each rank has equally many places."""
    places: Tensor
    """The place of each expert [experts]."""

    @classmethod
    def of(cls, experts: Sequence[int], device: torch.device) -> "ExpertOrder":
        """Return the order with these experts, the one at each place."""
        order = torch.tensor(experts, device=device)
        return cls(order, order.argsort())


class Dispatch(NamedTuple):
    """The order of positions for their experts: `copies` of each position, sorted by expert."""

    order: Tensor
    """For each sorted row [rows], its number among the copies of all positions."""
    inverse: Tensor
    """For each copy of each position [rows], the number of its sorted row."""
    copies: int
    counts: Tensor
    """Rows of each expert [experts]."""

    def sort(self, x: Tensor) -> Tensor:
        """Return the rows of x [positions, features] copied for their experts, sorted [rows, features]."""
        rows: Tensor = _Sorted.apply(x, self.order, self.inverse, self.copies)  # type: ignore[no-untyped-call]
        return rows

    def sort_copies(self, x: Tensor) -> Tensor:
        """Return the sorted values [rows] of x [positions, copies], which has one value for each copy."""
        rows: Tensor = _Sorted.apply(x.reshape(-1), self.order, self.inverse, 1)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """Return the sum of the sorted rows of each position [positions, features]."""
        collected: Tensor = _Collected.apply(rows, self.order, self.inverse, self.copies)  # type: ignore[no-untyped-call]
        return collected


def dispatch(index: Tensor, counts: Tensor) -> Dispatch:
    """Return the order of the copies of positions for the experts `index` [positions, copies] chosen for them.

    The rows of one expert are in the order of positions. `counts` [experts]: how often `index` has each expert.
    """
    order = index.reshape(-1).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return Dispatch(order, inverse, index.shape[1], counts)


class Exchange(NamedTuple):
    """The exchange of rows with the ranks of their experts, for rows sorted by expert.

    Ranks that split the features of the same experts gather the rows that any of them receives, and sum the results.
    """

    experts: dist.ProcessGroup | None
    """Ranks over which whole experts are distributed; None if each rank has all."""
    features: dist.ProcessGroup | None
    """Ranks over which each expert's features are split; None if each rank has all."""
    sent: Sequence[int]
    """Number of rows sent to each rank of `experts`."""
    received: Sequence[int]
    gathered: Sequence[int]
    """Number of rows that each rank of `features` receives."""
    order: Tensor
    """For each row here, sorted by expert, its index among the received rows."""
    inverse: Tensor
    counts: Counts
    """Rows of each expert of this rank."""

    def there(self, rows: Tensor) -> Tensor:
        """Send sorted rows of all experts to the experts' ranks; return the rows of this rank's experts, sorted."""
        arrived = self._moved(rows, self.sent, self.received)
        if self.features is not None:
            arrived = with_transpose(arrived, self._gather, self._scatter)
        sorted_rows: Tensor = _Sorted.apply(arrived, self.order, self.inverse, 1)  # type: ignore[no-untyped-call]
        return sorted_rows

    def back(self, rows: Tensor) -> Tensor:
        """Send the results for sorted rows of this rank's experts back to the rows' ranks."""
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
        """Gather the rows of all ranks that split the same experts' features, padded to the fullest rank's number."""
        ranks, most = len(self.gathered), max(self.gathered)
        if most == 0:
            return rows
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        stacked = rows.new_empty(ranks, *padded.shape)
        dist.all_gather_into_tensor(stacked.view(-1), padded.view(-1), group=self.features)
        return torch.cat([part[:length] for part, length in zip(stacked, self.gathered, strict=True)])

    def _scatter(self, rows: Tensor) -> Tensor:
        """Return the rows that this rank received, summed over the ranks that split the same experts' features."""
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
    counts: Tensor,
    rows: int,
    experts: dist.ProcessGroup | None,
    features: dist.ProcessGroup | None,
    read: Callable[[Tensor], list[int]],
) -> Exchange:
    """Return the exchange of rows [rows, ...], sorted by expert, among ranks that shard experts and their features.

    `counts` [experts]: this rank's number of rows for each. `read` copies numbers from the device to the host, which
    waits for them once: how many rows go where, and how many each expert of this rank has.
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
    sent, received, gathered, computed = _rows_of_ranks(here, together, rows, features, read)
    expert = torch.arange(here.shape[1], device=counts.device).repeat(together.shape[0] * len(here))
    order = expert.repeat_interleave(together.view(-1), output_size=sum(gathered)).argsort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    on_device = together.sum((0, 1))
    return Exchange(experts, features, sent, received, gathered, order, inverse, Counts(on_device, lambda _: computed))


def _rows_of_ranks(
    here: Tensor, together: Tensor, rows: int, features: dist.ProcessGroup | None, read: Callable[[Tensor], list[int]]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the number of rows to and from each rank along experts, of each rank along features, and of each expert.

    `here` [ranks along experts, experts of a rank] counts the rows that leave this rank, `together` [ranks along
    features, ranks along experts, experts of a rank] the rows that arrive. Without data, rows are divided evenly.
    """
    along, ranks, experts = together.shape
    if isinstance(here, FakeTensor):
        return _even(rows, ranks), _even(rows, ranks), [rows] * along, _even(rows * along, experts)
    numbers = read(torch.cat([here.view(-1), together.view(-1)]))
    rank_sums = [sum(numbers[i : i + experts]) for i in range(0, len(numbers), experts)]
    sent, arriving = rank_sums[:ranks], [rank_sums[i : i + ranks] for i in range(ranks, len(rank_sums), ranks)]
    mine = 0 if features is None else features.rank()
    computed = [sum(numbers[ranks * experts + expert :: experts]) for expert in range(experts)]
    return sent, arriving[mine], list(map(sum, arriving)), computed


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


def expert_products(rows: Tensor, weights: Tensor, counts: Counts) -> Tensor:
    """Return the matrix products of sorted rows [rows, inputs] and their experts' matrices [experts, outputs, inputs].

    The gradient of an expert without rows is zero. The host reads the counts if the device has no grouped matrix
    products.
    """
    if _has_grouped_products(rows, weights):
        if torch.cuda.is_available() and torch.cuda.get_device_capability(rows.device) >= _BLACKWELL:
            weights = _with_gradients_of_rows(weights, counts.tensor)
        return grouped_mm(rows, weights.transpose(1, 2), offs=counts.tensor.cumsum(0, dtype=torch.int32))
    parts = rows.split(counts.for_host(len(rows)))
    return torch.cat([linear(part, matrix) for part, matrix in zip(parts, weights.unbind(), strict=True)])


def with_biases(rows: Tensor, biases: Tensor, counts: Counts, weights: Tensor | None = None) -> Tensor:
    """Return sorted rows [rows, features] plus their experts' biases [experts, features] times `weights` [rows].

    `weights` multiply only the biases; None: they are added as they are.

    The gradient of the biases is a matrix product: nothing is added by atomics.
    """
    added: Tensor = _WithBiases.apply(rows, biases, counts.tensor, weights)  # type: ignore[no-untyped-call]
    return added


def _has_grouped_products(rows: Tensor, weights: Tensor) -> bool:
    """Return whether PyTorch has grouped matrix products for these; their backward pass refuses `rows` of length 0."""
    aligned = all(length % _ALIGNMENT == 0 for length in weights.shape[1:])
    return rows.is_cuda and rows.dtype is torch.bfloat16 and aligned and len(rows) > 0


def _with_gradients_of_rows(weights: Tensor, counts: Tensor) -> Tensor:
    """Return matrices [experts, outputs, inputs], with gradients set to 0 for experts that have no rows."""
    return with_transpose(
        weights, lambda x: x.view_as(x), lambda gradient: gradient.masked_fill((counts == 0)[:, None, None], 0)
    )


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


# Router biases, which each step corrects by how often each expert was chosen (Wang et al. 2024).


def corrected_bias(kind: LayerType) -> Parameter | None:
    """Return a layer type's router bias that steps correct; None if there is none, or it is frozen."""
    return next((p for p in kind.parameters if p.is_buffer and p.frozen is not True), None)


class RouterBias(NamedTuple):
    """The bias of a layer's router [experts], which is added to scores when experts are chosen."""

    bias: Tensor
    """Bias [experts], the same on all ranks of the layer."""
    experts: slice
    """Slice of the layer's experts among all layers' experts."""


class RouterBiases(NamedTuple):
    """The router biases on this rank."""

    of_layer: Mapping[str, RouterBias]

    def correct(self, assignments: Tensor, rate: Tensor) -> None:
        """Add rate x sign(mean - count) to the biases, by the counts of all layers' experts, summed over all ranks.

        Counts are whole numbers in float64, so that the sum is exact under any plan. Ranks that hold replicas of
        positions count them several times, but equally often for all experts, which leaves the signs unchanged.
        """
        for bias, experts in self.of_layer.values():
            counts = assignments[experts]
            bias.add_(rate * (counts.sum() - len(counts) * counts).sign())
