"""What a sweep measures, one value each: the lines of its journal."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from shardwright_formats.display.units import bytes_text, seconds_text
from shardwright_formats.io.json import Value
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey
from shardwright_profile.hardware.statistics import median_interval

__all__ = ["Entry", "Key", "OverlapEntry", "PairEntry", "PointEntry", "RateEntry", "StartEntry"]

_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]
_Rank = Annotated[int, Meta(ge=0)]

Key = tuple[str | int | float, ...]
"""What tells an entry from all others of a sweep."""


class StartEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="start"):
    """From starting the ranks until their first collective was over."""

    time_s: _Positive

    @property
    def key(self) -> Key:
        """There is one."""
        return ("start",)

    def __str__(self) -> str:
        return f"in {seconds_text(self.time_s)}"


class RateEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rate"):
    """A rate of every rank's device, in rank order, while all of them work."""

    name: str
    values: Annotated[tuple[_Positive, ...], Meta(min_length=1)]

    @property
    def key(self) -> Key:
        """By its name."""
        return ("rate", self.name)

    def __str__(self) -> str:
        return f"{self.name} {min(self.values):.3g} on the slowest rank, {max(self.values):.3g} on the fastest"


class PointEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="point"):
    """One kind of message at one size: seconds of every repeat on the slowest rank."""

    collective: Collective
    group_size: _Count
    consecutive: bool
    across_nodes: bool
    message_bytes: _Count
    times_s: Annotated[tuple[_Positive, ...], Meta(min_length=1)]

    @property
    def kind(self) -> CollectiveKey:
        """The kind of message."""
        return CollectiveKey(self.collective, self.group_size, self.consecutive, self.across_nodes)

    @property
    def key(self) -> Key:
        """By kind and size."""
        return ("point", *self.kind, self.message_bytes)

    def __str__(self) -> str:
        median = seconds_text(float(np.median(self.times_s)))
        spread = f"{len(self.times_s)} repeats, ± {median_interval(self.times_s):.0%}"
        return f"{bytes_text(self.message_bytes)} in {median} ({spread})"


class PairEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pair"):
    """A message from one rank to another: the median."""

    source_rank: _Rank
    target_rank: _Rank
    message_bytes: _Count
    time_s: _Positive

    @property
    def key(self) -> Key:
        """By ranks and size."""
        return ("pair", self.source_rank, self.target_rank, self.message_bytes)

    def __str__(self) -> str:
        ranks = f"rank {self.source_rank} to rank {self.target_rank}"
        return f"{bytes_text(self.message_bytes)} from {ranks} in {seconds_text(self.time_s)}"


class OverlapEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="overlap"):
    """A collective and a computation, each alone and both at once; medians of the slowest rank."""

    collective: Collective
    group_size: _Count
    collective_bytes: _Count
    compute_ratio: _Positive
    """How long the computation was to take alone, over the message alone."""
    compute_s: _Positive
    collective_s: _Positive
    compute_slowdown: _Positive
    collective_slowdown: _Positive

    @property
    def key(self) -> Key:
        """By kind of message, size, and length of the computation."""
        return ("overlap", self.collective, self.group_size, self.collective_bytes, self.compute_ratio)

    def __str__(self) -> str:
        return (
            f"{bytes_text(self.collective_bytes)} of {seconds_text(self.collective_s)}: "
            f"{self.collective_slowdown:.3g} times, "
            f"computing of {seconds_text(self.compute_s)}: {self.compute_slowdown:.3g} times"
        )


Entry = StartEntry | RateEntry | PointEntry | PairEntry | OverlapEntry
