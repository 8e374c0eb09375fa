"""Probes whose samples are a share of longer ones, and attend to the keys of all of these on one device."""

from shardwright.io import Value
from shardwright.types.limits import NonNegativeCount, SeveralRanks


class ContextProbe(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan among others whose samples stand for the share of one of several ranks (context parallelism)."""

    plan: NonNegativeCount
    """Place of the plan."""
    cp_size: SeveralRanks
    """Ranks that share a sample out, of which each rank of the plan is one: its keys stand for those of all."""
