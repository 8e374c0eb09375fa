"""The positions that each rank of a context-parallel group has, and which of them see which keys.

Positions lie in memory in the order of the plan, and ranks have equal contiguous shares of it. Whatever the order, a
rank's share is worked on in the rising order of its positions: then the keys of another rank that it sees are a
rectangle of queries and keys, if the order is in order or zig-zag.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    """The shares of a sample's positions among the ranks of a context-parallel group; plain numbers, no tensors."""

    order: Sequence[int]
    """Position at each place in memory; all positions, each once."""
    size: int
    """Number of ranks, which divides them."""

    @property
    def length(self) -> int:
        """Return the number of positions that each rank has."""
        return len(self.order) // self.size

    @property
    def natural(self) -> list[int]:
        """Return the places in memory of positions 0, 1, ... [s]."""
        return _argsort(self.order)

    def rising(self, rank: int) -> list[int]:
        """Return the places inside a rank's share of its positions in rising order [s/n]."""
        return _argsort(self._share(rank))

    def is_rising(self, rank: int) -> bool:
        """Return whether a rank's positions lie in memory in rising order, as those of the largest cp_size do."""
        return list(self._share(rank)) == self.positions(rank)

    def positions(self, rank: int) -> list[int]:
        """Return a rank's positions in rising order [s/n]."""
        return sorted(self._share(rank))

    def places(self, rank: int) -> list[int]:
        """Return the places in memory of a rank's positions in rising order [s/n]."""
        return [rank * self.length + place for place in self.rising(rank)]

    def runs(self, rank: int) -> Iterator[tuple[slice, int]]:
        """Yield runs of neighbouring positions of a rank, numbered in rising order, and the position behind each."""
        positions = self.positions(rank)
        ends = [i for i in range(1, self.length) if positions[i] != positions[i - 1] + 1]
        for first, end in zip([0, *ends], [*ends, self.length], strict=True):
            yield slice(first, end), positions[end - 1] + 1

    def rectangle(self, rank: int, source: int, causal: bool) -> Rectangle | None:
        """Return the least rectangle that holds all queries of a rank and keys of `source` that see one another."""
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

    By their positions [q] and [k], and their numbers of documents [b, q] and [b, k].
    """
    seen = queries[:, None] >= keys if causal else queries.new_ones(len(queries), len(keys), dtype=torch.bool)
    if documents is None:
        return seen[None, None]
    mine, others = documents
    return (seen & (mine[:, :, None] == others[:, None]))[:, None]
