"""What the parts of a sweep share (imports torch: only the ranks of a sweep import this)."""

from typing import NamedTuple

import torch

from shardwright_formats.types.cluster import Cluster
from shardwright_profile.hardware.job import SweepJob
from shardwright_profile.hardware.journal import Journal
from shardwright_profile.hardware.process_groups import ProcessGroups
from shardwright_profile.hardware.statistics import LEAST_REPEATS

__all__ = ["Session"]


class Session(NamedTuple):
    """One rank's side of a sweep."""

    job: SweepJob
    device: torch.device
    journal: Journal
    process_groups: ProcessGroups

    @property
    def cluster(self) -> Cluster:
        """The cluster that is measured."""
        return self.job.identity.cluster

    @property
    def most_repeats(self) -> int:
        """The most repeats of a point."""
        return self.job.identity.max_repeats

    @property
    def least_repeats(self) -> int:
        """The fewest repeats of a point."""
        return min(LEAST_REPEATS, self.most_repeats)
