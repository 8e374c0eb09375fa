"""Attention of a rank's positions to keys of several ranks without these: for measurements on one device.

Keys and values of the rank itself stand for those of the others: it computes what one of these ranks does, without
their messages.
"""

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor

from shardwright_train.parallel.context_gather import GatherAttention


@dataclass(frozen=True)
class StandIn:
    """A rank that stands for one of several, whose share of longer samples its samples are."""

    ranks: int
    order: Tensor | None
    """Positions of a longer sample [s] in the order in which ranks would hold them; None where they keep theirs."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Return what attention takes for the group of these ranks: it has a rank and a size alone."""
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
    """Attention to keys and values that stand for those of a group."""

    def scattered(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's positions, of which no other rank has a part."""
        mine: Tensor = gradient.unflatten(-2, (self.group.size(), -1))[..., self.group.rank(), :, :]
        return mine

    def _gather(self, both: Tensor) -> Tensor:
        return both.repeat(*(1,) * (both.ndim - 2), self.group.size(), 1)
