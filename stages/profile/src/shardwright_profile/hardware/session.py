"""One rank's side of a sweep (only the ranks of a sweep import this)."""

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright_launch.journal import Journal
from shardwright_profile.hardware.job import SweepIdentity
from shardwright_profile.hardware.profile import Entry
from shardwright_profile.hardware.statistics import MIN_REPEATS
from shardwright_profile.hardware.sweep_plan import Groups
from shardwright_profile.hardware.timing import Stopwatch


class ProcessGroups:
    """This rank's process groups, each made when it is first asked for."""

    def __init__(self) -> None:
        self.mine = cache(self._made)

    def _made(self, groups: Groups) -> dist.ProcessGroup | None:
        """The one of `groups` that this rank is in, or None; all ranks of the world ask in the same order."""
        made = {group: dist.new_group(list(group)) for group in groups}
        return next((process_group for group, process_group in made.items() if dist.get_rank() in group), None)


class Session(NamedTuple):
    """What the parts of a sweep share."""

    identity: SweepIdentity
    stopwatch: Stopwatch
    journal: Journal[SweepIdentity, Entry]
    process_groups: ProcessGroups

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self.stopwatch.device

    @property
    def max_repeats(self) -> int:
        """The most repeats of a point."""
        return self.identity.max_repeats

    @property
    def min_repeats(self) -> int:
        """The fewest repeats of a point."""
        return min(MIN_REPEATS, self.max_repeats)

    def find(self, *key: Hashable) -> Entry | None:
        """What is known of an entry."""
        return self.journal.find(*key)
