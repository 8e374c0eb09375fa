"""Context parallelism: attention of the positions of one rank to the keys of all ranks of its group.

Positions lie in memory in the order of the plan, and ranks hold equal contiguous shares of it. Whatever the order, a
rank computes its share in ascending order of positions: in natural or zig-zag order, the visible pairs of its queries
and another rank's keys then form a rectangle. Keys and values are gathered (Llama team 2024), or passed around a ring
(Liu et al. 2023); partial results are merged by their log-sum-exps.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import call
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_train.parallel.attention_blocks import Attended, Block, Piece, joined, nothing_attended, parted
from shardwright_train.parallel.collectives import gather_dim, gathered_again_by, scatter_dim, with_transpose
from shardwright_train.parallel.process_groups import pass_on

# Which positions each rank holds, and which of them see which keys.


class Rectangle(NamedTuple):
    """Queries of one rank and keys of another, in ascending order of positions, some of which attend to one another."""

    queries: slice
    keys: slice
    is_square: bool
    """Whether they are the same positions, under a causal mask."""
    is_full: bool
    """Whether each of the queries sees each of the keys."""


@dataclass(frozen=True)
class ContextShares:
    """The shares of a sample's positions on the ranks of a context-parallel group; plain numbers, no tensors."""

    order: Sequence[int]
    """Position at each place in memory; all positions, each once."""
    size: int
    """Number of ranks, which divides the number of positions."""

    @property
    def length(self) -> int:
        """Return the number of positions of each rank."""
        return len(self.order) // self.size

    @property
    def natural(self) -> list[int]:
        """The places in memory of positions 0, 1, ... [s]."""
        return _argsort(self.order)

    def rising(self, rank: int) -> list[int]:
        """Return the places, inside a rank's share, of its positions in ascending order [s/n]."""
        return _argsort(self._share(rank))

    def is_rising(self, rank: int) -> bool:
        """Return whether a rank's positions are in memory in ascending order, as with the largest cp_size."""
        return list(self._share(rank)) == self.positions(rank)

    def positions(self, rank: int) -> list[int]:
        """Return a rank's positions in ascending order [s/n]."""
        return sorted(self._share(rank))

    def places(self, rank: int) -> list[int]:
        """Return the places in memory of a rank's positions in ascending order [s/n]."""
        return [rank * self.length + place for place in self.rising(rank)]

    def runs(self, rank: int) -> Iterator[tuple[slice, int]]:
        """Yield runs of neighbouring positions of a rank, numbered in ascending order, and the position after each."""
        positions = self.positions(rank)
        ends = [i for i in range(1, self.length) if positions[i] != positions[i - 1] + 1]
        for first, end in zip([0, *ends], [*ends, self.length], strict=True):
            yield slice(first, end), positions[end - 1] + 1

    def rectangle(self, rank: int, source: int, causal: bool) -> Rectangle | None:
        """Return the smallest rectangle with all visible pairs of a rank's queries and keys of `source`, or None."""
        if not causal:
            return Rectangle(slice(0, self.length), slice(0, self.length), False, True)
        queries, keys = self.positions(rank), self.positions(source)
        first, end = bisect_left(queries, keys[0]), bisect_right(keys, queries[-1])
        if first == self.length:
            return None
        full = queries[first] >= keys[end - 1]
        return Rectangle(slice(first, self.length), slice(0, end), rank == source, full)

    def _share(self, rank: int) -> Sequence[int]:
        return self.order[rank * self.length : (rank + 1) * self.length]


def _argsort(numbers: Sequence[int]) -> list[int]:
    return sorted(range(len(numbers)), key=numbers.__getitem__)


def visible(queries: Tensor, keys: Tensor, causal: bool, documents: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return which keys each query sees [b, 1, q, k], or [1, 1, q, k] without documents.

    `queries` [q] and `keys` [k] are their positions; `documents` their document numbers [b, q] and [b, k].
    """
    seen = queries[:, None] >= keys if causal else queries.new_ones(len(queries), len(keys), dtype=torch.bool)
    if documents is None:
        return seen[None, None]
    mine, others = documents
    return (seen & (mine[:, :, None] == others[:, None]))[:, None]


# What both ways to attend have in common.


@dataclass(frozen=True)
class ContextAttention:
    """Attention of this rank's positions to its whole group's positions; subclasses communicate keys and values."""

    shares: ContextShares
    group: dist.ProcessGroup
    causal: bool
    reduce: torch.dtype
    """Format in which gradients of keys and values are sent between ranks."""
    device: torch.device
    keep: Callable[[Callable[[], Attended]], Attended] = call
    """Function that calls the given one; under selective recomputation a replay returns the first call's result."""

    @cached_property
    def is_rising(self) -> bool:
        """Return whether this rank's positions are in ascending order in memory."""
        return self.shares.is_rising(self.group.rank())

    @cached_property
    def rising_order(self) -> Tensor:
        """The places, inside this rank's share, of its positions in ascending order [s/n]."""
        return torch.tensor(self.shares.rising(self.group.rank()), device=self.device)

    @cached_property
    def memory_order(self) -> Tensor:
        """Where positions in ascending order are in memory: the inverse of `rising_order` [s/n]."""
        return self.rising_order.argsort()


# Gathered keys and values. They are small if many heads share them; the backward pass gathers them again.


_HEADS, _POSITIONS = 2, 3
"""Dims of keys and values together [1 or 2, b, kv_heads, s, features]."""


@dataclass(frozen=True)
class GatherAttention(ContextAttention):
    """Attention of this rank's positions to its group's positions, with gathered keys and values."""

    keeps: bool = False
    """Whether gathered keys and values are kept for the backward pass: useful if a replay gathers them just before."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Tensor | None = None
    ) -> Tensor:
        """Return the attention of queries [b, heads, s/n, d] to keys [b, kv_heads, s/n, d] and values of all ranks.

        Each rank gives its positions in memory order. `documents` [b, s]: the document numbers of all positions in that
        order; no position sees another document.
        """
        output: Tensor = _Gathered.apply(query, key, value, self, self.pieces(scale, documents))  # type: ignore[no-untyped-call]
        return output

    def pieces(self, scale: float, documents: Tensor | None = None) -> tuple[Piece, ...]:
        """Return the parts of attention, for queries in ascending order of positions and all keys in that order.

        A causal mask over more keys than queries would have to be aligned at the last of both, and kernels differ in
        where they align it. So each run of neighbouring positions attends to all keys before it without a mask, and to
        itself under a causal mask.
        """
        mine, everything = slice(0, self.shares.length), slice(0, len(self.shares.order))
        if documents is not None:
            return (Piece(mine, everything, Block(scale, seen=self._seen_in_order(documents))),)
        if not self.causal:
            return (Piece(mine, everything, Block(scale)),)
        return tuple(piece for run, end in self.shares.runs(self.group.rank()) for piece in _causal(run, end, scale))

    @contextmanager
    def gathered(self, key: Tensor, value: Tensor, repeat: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values [b, kv_heads, s, features] of all ranks in memory order, for any kernel called inside.

        Each head is repeated `repeat` times, for kernels that need as many heads as queries have. For the backward pass
        only this rank's keys and values are kept, and then gathered again, unless `keeps`.
        """

        def there(x: Tensor) -> Tensor:
            return self._gather(x).repeat_interleave(repeat, _HEADS)

        def back(gradient: Tensor) -> Tensor:
            return self.scattered(gradient.unflatten(_HEADS, (-1, repeat)).sum(_HEADS + 1))

        mine, features = joined(key, value), key.shape[-1]
        if self.keeps:
            yield parted(with_transpose(mine, there, back), features)
            return
        with gathered_again_by([mine], lambda x: with_transpose(x, there, back)) as (both,):
            yield parted(both, features)

    def seen(self, documents: Tensor | None) -> Tensor:
        """Return which keys [b or 1, 1, s/n, s] this rank's positions see, both in memory order."""
        first = self.group.rank() * self.shares.length
        mine = slice(first, first + self.shares.length)
        numbers = None if documents is None else (documents[:, mine], documents)
        return visible(self._positions[mine], self._positions, self.causal, numbers)

    def scattered(self, gradient: Tensor) -> Tensor:
        """Return the sum over the ranks of gradients of gathered keys and values, for this rank's positions."""
        if self.group.size() == 1:
            return gradient
        return scatter_dim(gradient.to(self.reduce), _POSITIONS, self.group).to(gradient.dtype)

    def gathered_in_order(self, key: Tensor, value: Tensor) -> Tensor:
        """Return all ranks' keys and values in one tensor, in ascending order of positions; without gradients."""
        both = self._gather(joined(key, value))
        return both.index_select(_POSITIONS, self._natural)

    def scattered_from_order(self, gradient: Tensor) -> Tensor:
        """Return the sum over the ranks of gradients in ascending order of positions, for this rank's positions."""
        return self.scattered(gradient.index_select(_POSITIONS, self._positions))

    def rising(self, x: Tensor) -> Tensor:
        """Return this rank's rows [b, heads, s/n, ...] in ascending order of positions."""
        return x if self.is_rising else x.index_select(2, self.rising_order)

    def in_memory_order(self, x: Tensor) -> Tensor:
        """Return this rank's rows in memory order, given in ascending order of positions."""
        return x if self.is_rising else x.index_select(2, self.memory_order)

    def _gather(self, both: Tensor) -> Tensor:
        return gather_dim(both, _POSITIONS, self.group) if self.group.size() > 1 else both

    def _seen_in_order(self, documents: Tensor) -> Tensor:
        positions, ordered = self._positions, documents.index_select(1, self._natural)
        mine = self._places
        queries = positions.index_select(0, mine)
        keys = torch.arange(len(positions), device=self.device)
        return visible(queries, keys, self.causal, (documents.index_select(1, mine), ordered))

    @cached_property
    def _positions(self) -> Tensor:
        return torch.tensor(self.shares.order, device=self.device)

    @cached_property
    def _natural(self) -> Tensor:
        return torch.tensor(self.shares.natural, device=self.device)

    @cached_property
    def _places(self) -> Tensor:
        return torch.tensor(self.shares.places(self.group.rank()), device=self.device)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, attention: GatherAttention, pieces: tuple[Piece, ...]
    ) -> Tensor:
        rising = attention.rising(query)

        gathered = [attention.gathered_in_order(key, value)] if attention.keeps else []

        def attend() -> Attended:
            total = nothing_attended(rising, value.shape[-1])
            (both,) = gathered or [attention.gathered_in_order(key, value)]
            for piece in pieces:
                piece.add(total, rising, both)
            return total.rounded(query.dtype)

        attended = attention.keep(attend)
        ctx.save_for_backward(rising, key, value, *attended, *gathered)
        ctx.attention, ctx.pieces = attention, pieces
        return attention.in_memory_order(attended.output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        rising, key, value, output, logsumexp, *gathered = ctx.saved_tensors
        attention, attended, gradient = ctx.attention, Attended(output, logsumexp), ctx.attention.rising(gradient)
        (both,) = gathered or [attention.gathered_in_order(key, value)]
        of_query = torch.zeros_like(rising, dtype=attended.logsumexp.dtype)
        of_both = torch.zeros_like(both, dtype=attention.reduce)
        for piece in ctx.pieces:
            piece.add_gradients(of_query, of_both, gradient, rising, both, attended)
        dk, dv = parted(attention.scattered_from_order(of_both).to(key.dtype), key.shape[-1])
        return attention.in_memory_order(of_query).to(rising.dtype), dk, dv, None, None


def _causal(run: slice, end: int, scale: float) -> Iterator[Piece]:
    """Yield the parts of a run of neighbouring positions that ends before `end`."""
    first = end - (run.stop - run.start)
    if first:
        yield Piece(run, slice(0, first), Block(scale))
    yield Piece(run, slice(first, end), Block(scale, is_causal=True))


# Keys and values that go around a ring.


_RING_POSITIONS = 2
"""Dim of queries, keys and values [b, heads, s, features]."""


class _Step(NamedTuple):
    source: int
    rectangle: Rectangle | None
    """The pairs of queries and keys of `source` to compute; None: there are none."""


@dataclass(frozen=True)
class RingAttention(ContextAttention):
    """Attention of this rank's positions to its group's positions, with keys and values passed around a ring."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Tensor | None = None
    ) -> Tensor:
        """Return the attention of queries [b, heads, s/n, d] to keys [b, kv_heads, s/n, d] and values of all ranks.

        Each rank gives its positions in memory order. `documents` [b, s]: the document numbers of all positions in that
        order; no position sees another document.
        """
        passes = _Passes(self, scale, documents)
        if self.is_rising:
            return self._attended(query, key, value, passes)
        query, key, value = (_permuted(x, self.rising_order, self.memory_order) for x in (query, key, value))
        return _permuted(self._attended(query, key, value, passes), self.memory_order, self.rising_order)

    @staticmethod
    def _attended(query: Tensor, key: Tensor, value: Tensor, passes: "_Passes") -> Tensor:
        output: Tensor = _Ring.apply(query, key, value, passes)  # type: ignore[no-untyped-call]
        return output

    @cached_property
    def steps(self) -> tuple[_Step, ...]:
        """Return, for each step, which rank's keys and values are here, and which of them this rank attends to."""
        rank, size = self.group.rank(), self.group.size()
        sources = [(rank - i) % size for i in range(size)]
        return tuple(_Step(source, self.shares.rectangle(rank, source, self.causal)) for source in sources)

    @cached_property
    def positions(self) -> tuple[Tensor, ...]:
        """Each rank's positions in ascending order, on the device."""
        ranks = range(self.shares.size)
        return tuple(torch.tensor(self.shares.positions(rank), device=self.device) for rank in ranks)

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        """The places in memory of each rank's positions in ascending order, on the device."""
        ranks = range(self.shares.size)
        return tuple(torch.tensor(self.shares.places(rank), device=self.device) for rank in ranks)


@dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass of one call of ring attention; tensors are in ascending order of positions."""

    ring: RingAttention
    scale: float
    documents: Tensor | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """Return the attention of this rank's queries to all ranks' keys, given this rank's keys and values."""
        here, total, steps = joined(key, value), nothing_attended(query, value.shape[-1]), self.ring.steps
        for left, step in zip(reversed(range(len(steps))), steps, strict=True):
            arriving = pass_on(here, self.ring.group) if left else None
            if step.rectangle is not None:
                self._piece(step.source, step.rectangle).add(total, query, here)
            here = here if arriving is None else arriving.wait()
        return total.rounded(query.dtype)

    def backward(self, gradient: Tensor, query: Tensor, here: Tensor, attended: Attended) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's queries, and of its keys and values joined in one tensor like `here`."""
        dq, behind, steps = torch.zeros_like(query, dtype=attended.logsumexp.dtype), None, self.ring.steps
        for left, step in zip(reversed(range(len(steps))), steps, strict=True):
            arriving = pass_on(here, self.ring.group) if left else None
            gradients = torch.zeros_like(here, dtype=self.ring.reduce)
            if step.rectangle is not None:
                piece = self._piece(step.source, step.rectangle)
                piece.add_gradients(dq, gradients, gradient, query, here, attended)
            if behind is not None:
                gradients += behind.wait()
            behind = pass_on(gradients, self.ring.group)
            here = here if arriving is None else arriving.wait()
        assert behind is not None
        return dq.to(query.dtype), behind.wait().to(query.dtype)

    def _piece(self, source: int, rectangle: Rectangle) -> Piece:
        queries, keys, is_square, is_full = rectangle
        if self.documents is None and (is_square or is_full):
            return Piece(queries, keys, Block(self.scale, is_causal=is_square))
        me, documents = self.ring.group.rank(), None
        if self.documents is not None:
            mine, others = (self.documents.index_select(1, self.ring.places[rank]) for rank in (me, source))
            documents = mine[:, queries], others[:, keys]
        positions = self.ring.positions[me][queries], self.ring.positions[source][keys]
        return Piece(queries, keys, Block(self.scale, seen=visible(*positions, self.ring.causal, documents)))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, passes: _Passes) -> Tensor:
        attended = passes.ring.keep(partial(passes.forward, query, key, value))
        ctx.save_for_backward(query, key, value, *attended)
        ctx.passes = passes
        return attended.output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *attended = ctx.saved_tensors
        dq, both = ctx.passes.backward(gradient, query, joined(key, value), Attended(*attended))
        dk, dv = parted(both, key.shape[-1])
        return dq, dk, dv, None


def _permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return a tensor with its positions in another order; `back` is the inverse order."""
    return with_transpose(
        x, lambda x: x.index_select(_RING_POSITIONS, order), lambda x: x.index_select(_RING_POSITIONS, back)
    )


# One device in place of a group, for measurements: its keys and values stand for the other ranks' keys and values.


@dataclass(frozen=True)
class StandIn:
    """A rank that represents one of several in a measurement: its samples are that rank's part of longer samples."""

    ranks: int
    order: Tensor | None
    """Positions of a longer sample [s] in the order in which ranks would hold them; None if the order is unchanged."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Return a substitute for the group of these ranks that only has a rank and a size."""
        return cast(dist.ProcessGroup, _RankInTheMiddle(self.ranks))


@dataclass(frozen=True)
class _RankInTheMiddle:
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return (self.ranks - 1) // 2


@dataclass(frozen=True)
class StandInAttention(GatherAttention):
    """Attention to this rank's keys and values, repeated in place of the keys and values of a whole group."""

    def scattered(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's positions, to which no other rank contributes."""
        mine: Tensor = gradient.unflatten(-2, (self.group.size(), -1))[..., self.group.rank(), :, :]
        return mine

    def _gather(self, both: Tensor) -> Tensor:
        return both.repeat(*(1,) * (both.ndim - 2), self.group.size(), 1)
