"""The positions that each rank of a context-parallel group has, and which of them see which keys.

Positions lie in memory in the order of the plan, and ranks have equal contiguous shares of it. Whatever the order, a
rank's share is worked on in the rising order of its positions: then the keys of another rank that it sees are a
rectangle of queries and keys, if the order is in order or zig-zag.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Rectangle(NamedTuple):
    """Queries of one rank and keys of another, numbered in rising order of positions, that see one another in part."""

    queries: slice
    keys: slice
    is_square: bool
    """Whether they are the same positions, under a causal mask."""
    is_full: bool
    """Whether each of the queries sees each of the keys."""


@dataclass(frozen=True)
class ContextShares:
    """The shares of a sample's positions among the ranks of a context-parallel group."""

    order: Sequence[int]
    """Position at each place in memory; all positions, each once."""
    size: int
    """Number of ranks, which divides them."""

    @cached_property
    def _order(self) -> Tensor:
        return torch.as_tensor(self.order)

    @property
    def length(self) -> int:
        """Return the number of positions that each rank has."""
        return len(self.order) // self.size

    @cached_property
    def natural(self) -> Tensor:
        """Return the places in memory of positions 0, 1, ... [s]."""
        return self._order.argsort()

    def rising(self, rank: int) -> Tensor:
        """Return the places inside a rank's share of its positions in rising order [s/n]."""
        return self._share(rank).argsort()

    def positions(self, rank: int) -> Tensor:
        """Return a rank's positions in rising order [s/n]."""
        return self._share(rank).sort().values

    def places(self, rank: int) -> Tensor:
        """Return the places in memory of a rank's positions in rising order [s/n]."""
        return self.rising(rank) + rank * self.length

    def runs(self, rank: int) -> Iterator[tuple[slice, int]]:
        """Yield runs of neighbouring positions of a rank, numbered in rising order, and the position behind each."""
        positions = self.positions(rank)
        ends = [*((positions.diff() != 1).nonzero().view(-1) + 1).tolist(), self.length]
        for first, end in zip([0, *ends], ends, strict=False):
            yield slice(first, end), int(positions[end - 1]) + 1

    def rectangle(self, rank: int, source: int, causal: bool) -> Rectangle | None:
        """Return the least rectangle that holds all queries of a rank and keys of `source` that see one another."""
        queries, keys = self.positions(rank), self.positions(source)
        if not causal:
            return Rectangle(slice(0, self.length), slice(0, self.length), False, True)
        first, end = int((queries < keys[0]).sum()), int((keys <= queries[-1]).sum())
        if first == self.length:
            return None
        full = bool(queries[first] >= keys[end - 1])
        return Rectangle(slice(first, self.length), slice(0, end), rank == source, full)

    def _share(self, rank: int) -> Tensor:
        return self._order[rank * self.length : (rank + 1) * self.length]


def visible(queries: Tensor, keys: Tensor, causal: bool, documents: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return which keys each query sees [b, 1, q, k], or [1, 1, q, k] without documents.

    By their positions [q] and [k], and their numbers of documents [b, q] and [b, k].
    """
    seen = queries[:, None] >= keys if causal else queries.new_ones(len(queries), len(keys), dtype=torch.bool)
    if documents is None:
        return seen[None, None]
    mine, others = documents
    return (seen & (mine[:, :, None] == others[:, None]))[:, None]
