"""The part that both ways to attend across the ranks of a context-parallel group have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import call

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_train.parallel.attention_blocks import Attended
from shardwright_train.parallel.context_shares import ContextShares


@dataclass(frozen=True)
class ContextAttention:
    """Attention of this rank's positions to those of a group; a subclass says how their keys and values come here."""

    shares: ContextShares
    group: dist.ProcessGroup
    causal: bool
    reduce: torch.dtype
    """Format in which gradients of keys and values go between ranks."""
    device: torch.device
    keep: Callable[[Callable[[], Attended]], Attended] = call
    """Function that calls another, or returns what that returned when it was called first: selective recomputation."""

    @cached_property
    def is_rising(self) -> bool:
        """Return whether this rank's positions lie in memory in rising order."""
        return self.shares.is_rising(self.group.rank())

    @cached_property
    def rising_order(self) -> Tensor:
        """Return the places inside this rank's share of its positions in rising order [s/n]."""
        return torch.tensor(self.shares.rising(self.group.rank()), device=self.device)

    @cached_property
    def memory_order(self) -> Tensor:
        """Return where positions in rising order lie in memory: the inverse of `rising_order` [s/n]."""
        return self.rising_order.argsort()
