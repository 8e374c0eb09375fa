"""Attention of a rank's positions to gathered keys and values of its context-parallel group (Llama team 2024).

Keys and values are small where many heads share them. The backward pass gathers them again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from shardwright_train.parallel.collectives import gather_dim, gathered_again_by, scatter_dim, with_transpose
from shardwright_train.parallel.context_shares import ContextShares, visible

_POSITIONS = 3
"""Dim of keys and values together [2, b, kv_heads, s, d]."""


@dataclass(frozen=True)
class GatherAttention:
    """Attention of this rank's positions to those of a group, whose keys and values are gathered."""

    shares: ContextShares
    group: dist.ProcessGroup
    causal: bool
    reduce: torch.dtype
    """Format in which gradients of keys and values are summed over the ranks."""
    device: torch.device
    keeps: bool = False
    """Whether gathered keys and values are kept for the backward pass, as where a replay has gathered them again."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, documents: Tensor | None = None
    ) -> Tensor:
        """Return the attention of queries [b, heads, s/n, d] to keys and values [b, kv_heads, s/n, d] of all ranks.

        Each rank gives its positions in memory order; `documents` [b, s] number those of all positions, in that order:
        none sees another document.
        """
        if documents is not None or not self.causal:
            seen = None if documents is None else self.seen(documents)
            with self.gathered(key, value) as (keys, values):
                return _attention(query, keys, values, seen, scale)
        query, runs = query.index_select(2, self._rising), self.shares.runs(self.group.rank())
        with self.gathered(key, value, in_order=True) as (keys, values):
            # Behind the last query of a run lies no key that it sees: the masks of both are aligned at the lower right.
            parts = [
                _attention(query[:, :, run], keys[:, :, :end], values[:, :, :end], _lower_right(run, end), scale)
                for run, end in runs
            ]
        return torch.cat(parts, 2).index_select(2, self._back)

    @contextmanager
    def gathered(self, key: Tensor, value: Tensor, *, in_order: bool = False) -> Iterator[Tensor]:
        """Yield keys and values [2, b, kv_heads, s, d] of all ranks, in memory order or that of their positions.

        Functions called inside keep only this rank's, and gather the others again in their backward passes, unless they
        are kept.
        """
        order = (self._natural, self._positions) if in_order else None

        def there(x: Tensor) -> Tensor:
            x = gather_dim(x, _POSITIONS, self.group)
            return x if order is None else x.index_select(_POSITIONS, order[0])

        def back(gradient: Tensor) -> Tensor:
            if order is not None:
                gradient = gradient.index_select(_POSITIONS, order[1])
            return scatter_dim(gradient.to(self.reduce), _POSITIONS, self.group).to(gradient.dtype)

        own = torch.stack([key, value])
        if self.keeps:
            yield with_transpose(own, there, back)
            return
        with gathered_again_by([own], lambda x: with_transpose(x, there, back)) as (gathered,):
            yield gathered

    def seen(self, documents: Tensor | None) -> Tensor:
        """Return which keys [b or 1, 1, s/n, s] this rank's positions see, both in memory order."""
        mine = slice(self.group.rank() * self.shares.length, (self.group.rank() + 1) * self.shares.length)
        numbers = None if documents is None else (documents[:, mine], documents)
        return visible(self._positions[mine], self._positions, self.causal, numbers)

    @cached_property
    def _positions(self) -> Tensor:
        return torch.as_tensor(self.shares.order, device=self.device)

    @cached_property
    def _natural(self) -> Tensor:
        return self.shares.natural.to(self.device)

    @cached_property
    def _rising(self) -> Tensor:
        return self.shares.rising(self.group.rank()).to(self.device)

    @cached_property
    def _back(self) -> Tensor:
        return self._rising.argsort()


def _lower_right(queries: slice, keys: int) -> Tensor:
    """Return the causal mask of queries the last of which is the last of the keys, as kernels take it."""
    mask: Tensor = causal_lower_right(queries.stop - queries.start, keys)
    return mask


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    groups = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups)
