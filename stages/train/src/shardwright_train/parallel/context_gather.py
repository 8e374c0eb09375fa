"""Attention of a rank's positions to gathered keys and values of its context-parallel group (Llama team 2024).

Keys and values are small where many heads share them. The backward pass gathers them again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwright_train.parallel.attention_blocks import Attended, Block, Piece, joined, nothing_attended, parted
from shardwright_train.parallel.collectives import gather_dim, gathered_again_by, scatter_dim, with_transpose
from shardwright_train.parallel.context_attention import ContextAttention
from shardwright_train.parallel.context_shares import visible

_HEADS, _POSITIONS = 2, 3
"""Dims of keys and values together [1 or 2, b, kv_heads, s, features]."""


@dataclass(frozen=True)
class GatherAttention(ContextAttention):
    """Attention of this rank's positions to those of a group, whose keys and values are gathered."""

    keeps: bool = False
    """Whether gathered keys and values are kept for the backward pass: where a replay gathers them right before it."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Tensor | None = None
    ) -> Tensor:
        """Return the attention of queries [b, heads, s/n, d] to keys [b, kv_heads, s/n, d] and values of all ranks.

        Each rank gives its positions in memory order; `documents` [b, s] number those of all positions, in that order:
        none sees another document.
        """
        output: Tensor = _Gathered.apply(query, key, value, self, self.pieces(scale, documents))  # type: ignore[no-untyped-call]
        return output

    def pieces(self, scale: float, documents: Tensor | None = None) -> tuple[Piece, ...]:
        """Return the parts of attention, of queries in rising order of positions and of all keys in that order.

        A mask of more keys than queries would have to end at the last of both, and kernels differ in where theirs do.
        So each run of positions attends to all keys before it, and to itself under a mask.
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

        Each head is repeated, for kernels that take as many as of queries. The kernel keeps only this rank's, and
        gathers the others again in its backward pass, unless gathered ones are kept.
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
        """Return the sum over the ranks of gradients of gathered keys and values, of this rank's positions."""
        if self.group.size() == 1:
            return gradient
        return scatter_dim(gradient.to(self.reduce), _POSITIONS, self.group).to(gradient.dtype)

    def gathered_in_order(self, key: Tensor, value: Tensor) -> Tensor:
        """Return keys and values of all ranks together, in the order of their positions; without gradients."""
        both = self._gather(joined(key, value))
        return both.index_select(_POSITIONS, self._natural)

    def scattered_from_order(self, gradient: Tensor) -> Tensor:
        """Return the sum over the ranks of gradients, in that order, of this rank's positions."""
        return self.scattered(gradient.index_select(_POSITIONS, self._positions))

    def rising(self, x: Tensor) -> Tensor:
        """Return this rank's rows [b, heads, s/n, ...] in rising order of positions."""
        return x if self.is_rising else x.index_select(2, self.rising_order)

    def in_memory_order(self, x: Tensor) -> Tensor:
        """Return rows in rising order of positions as they lie in memory."""
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
    """Yield the parts of a run of neighbouring positions, the last of which is before `end`."""
    first = end - (run.stop - run.start)
    if first:
        yield Piece(run, slice(0, first), Block(scale))
    yield Piece(run, slice(first, end), Block(scale, is_causal=True))
