"""Probes on one device whose samples are one rank's part of longer samples, with the keys of all parts."""

from shardwright.io import Value
from shardwright.types.limits import NonNegativeCount, SeveralRanks


class ContextProbe(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A probe whose samples represent one rank's part of longer samples (context parallelism)."""

    plan: NonNegativeCount
    """Place of the plan."""
    cp_size: SeveralRanks
    """Number of ranks over which a sample would be split; the rank of the plan stands for one, and its keys for all."""
