"""Ring attention (Liu et al. 2023): keys and values go round the ranks, and each rank merges what it sees of them.

Causal shares in zig-zag order have equal work at each step (Brandon et al. 2023). Sends overlap with blocks. In the
backward pass keys and values go round again, and their gradients behind them, which are at home after the last step.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright_train.parallel.attention_blocks import Attended, Block, Piece, joined, nothing_attended, parted
from shardwright_train.parallel.collectives import with_transpose
from shardwright_train.parallel.context_attention import ContextAttention
from shardwright_train.parallel.context_shares import Rectangle, visible
from shardwright_train.parallel.ring_sends import Travelling, pass_on

_POSITIONS = 2
"""Dim of queries, keys and values [b, heads, s, features]."""


class _Step(NamedTuple):
    source: int
    rectangle: Rectangle | None
    """The pairs of queries and keys of `source` that are computed; None: there are none."""


@dataclass(frozen=True)
class RingAttention(ContextAttention):
    """Attention of this rank's positions to those of a group, whose keys and values go round."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Tensor | None = None
    ) -> Tensor:
        """Return the attention of queries [b, heads, s/n, d] to keys [b, kv_heads, s/n, d] and values of all ranks.

        Each rank gives its positions in memory order; `documents` [b, s] number those of all positions, in that order:
        none sees another document.
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
        """Return whose keys and values are here at each step, and what this rank sees of them."""
        rank, size = self.group.rank(), self.group.size()
        sources = [(rank - i) % size for i in range(size)]
        return tuple(_Step(source, self.shares.rectangle(rank, source, self.causal)) for source in sources)

    def positions(self, rank: int) -> Tensor:
        """Return a rank's positions in rising order, on the device."""
        return self._positions[rank]

    def documents_of(self, documents: Tensor, rank: int) -> Tensor:
        """Return the numbers of documents [b, s/n] of a rank's positions, in their rising order."""
        return documents.index_select(1, self._places[rank])

    def pass_on(self, x: Tensor) -> Travelling:
        """Send a tensor to the next rank of the ring, and return it on its way."""
        return pass_on(x, self.group)

    @cached_property
    def _positions(self) -> tuple[Tensor, ...]:
        ranks = range(self.shares.size)
        return tuple(torch.tensor(self.shares.positions(rank), device=self.device) for rank in ranks)

    @cached_property
    def _places(self) -> tuple[Tensor, ...]:
        ranks = range(self.shares.size)
        return tuple(torch.tensor(self.shares.places(rank), device=self.device) for rank in ranks)


@dataclass(frozen=True)
class _Passes:
    """The forward and the backward pass of one call of a ring; tensors are in rising order of positions."""

    ring: RingAttention
    scale: float
    documents: Tensor | None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Attended:
        """Return the attention of queries to the keys of all ranks, for the keys and values of this one."""
        here, total, steps = joined(key, value), nothing_attended(query, value.shape[-1]), self.ring.steps
        for left, step in zip(reversed(range(len(steps))), steps, strict=True):
            arriving = self.ring.pass_on(here) if left else None
            if step.rectangle is not None:
                self._piece(step.source, step.rectangle).add(total, query, here)
            here = here if arriving is None else arriving.wait()
        return total.rounded(query.dtype)

    def backward(self, gradient: Tensor, query: Tensor, here: Tensor, attended: Attended) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries, and of this rank's keys and values, together."""
        dq, behind, steps = torch.zeros_like(query, dtype=attended.logsumexp.dtype), None, self.ring.steps
        for left, step in zip(reversed(range(len(steps))), steps, strict=True):
            arriving = self.ring.pass_on(here) if left else None
            gradients = torch.zeros_like(here, dtype=self.ring.reduce)
            if step.rectangle is not None:
                piece = self._piece(step.source, step.rectangle)
                piece.add_gradients(dq, gradients, gradient, query, here, attended)
            if behind is not None:
                gradients += behind.wait()
            behind = self.ring.pass_on(gradients)
            here = here if arriving is None else arriving.wait()
        return dq.to(query.dtype), _arrived(behind).to(query.dtype)

    def _piece(self, source: int, rectangle: Rectangle) -> Piece:
        queries, keys, is_square, is_full = rectangle
        if self.documents is None and (is_square or is_full):
            return Piece(queries, keys, Block(self.scale, is_causal=is_square))
        me, documents = self.ring.group.rank(), None
        if self.documents is not None:
            mine, others = (self.ring.documents_of(self.documents, rank) for rank in (me, source))
            documents = mine[:, queries], others[:, keys]
        positions = self.ring.positions(me)[queries], self.ring.positions(source)[keys]
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


def _arrived(x: Travelling | None) -> Tensor:
    assert x is not None
    return x.wait()


def _permuted(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return a tensor with its positions in another order; `back` leads to the first."""
    return with_transpose(x, lambda x: x.index_select(_POSITIONS, order), lambda x: x.index_select(_POSITIONS, back))
