"""The job of a hardware measurement, its journal entries, and the profile made from them."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from shardwright.display.units import bytes_text, seconds_text
from shardwright.io import Document, Value
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Table
from shardwright.launch.journal import JournalKind
from shardwright.plan.sweep_plan import SizeRange
from shardwright.types import Cluster
from shardwright.types.hardware_profile import (
    Collective,
    CollectiveKey,
    HardwareProfile,
    OverlapRow,
    PairRow,
    PointRow,
    RankRow,
    RateRow,
    RepeatRow,
)
from shardwright_profile.hardware.statistics import findings, median_interval, outliers

_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]

EntryKey = tuple[Hashable, ...]
"""Key that identifies an entry in a sweep."""


class SweepIdentity(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that must be the same for a killed sweep to be continued."""

    cluster: Cluster
    backend: str
    min_bytes: int
    max_bytes: int
    max_repeats: Annotated[int, Meta(ge=1)]
    versions: str
    """Versions of the software and of the device's driver that measure."""

    @property
    def sizes(self) -> SizeRange:
        """Return the range of message sizes."""
        return SizeRange(self.min_bytes, self.max_bytes)


class SweepJob(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job of a sweep, which all its ranks read."""

    FORMAT = "shardwright.sweep_job"

    identity: SweepIdentity
    time_budget_s: float
    started_s: float
    """Seconds on the node's monotonic clock when the ranks of this node were started."""
    out: str


class Progress(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="progress"):
    """A progress message; rank 0 writes it as a line of JSON."""

    step: int
    """Number of the sweep's current step, from 0."""
    steps: int
    text: str


class Remark(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="remark"):
    """A sentence for the user; rank 0 writes it as a line of JSON."""

    text: str


class StartEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="start"):
    """The seconds from starting the ranks until their first collective was over."""

    time_s: _Positive

    @property
    def key(self) -> EntryKey:
        """Return the entry's name in the journal, which has one such entry."""
        return ("start",)

    def __str__(self) -> str:
        return f"in {seconds_text(self.time_s)}"


class RateEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rate"):
    """A rate of every rank's device, in rank order, while all ranks work."""

    name: str
    values: Annotated[tuple[_Positive, ...], Meta(min_length=1)]

    @property
    def key(self) -> EntryKey:
        """Return the entry's name in the journal: its kind and the name of the rate."""
        return ("rate", self.name)

    def __str__(self) -> str:
        return f"{self.name} {min(self.values):.3g} on the slowest rank, {max(self.values):.3g} on the fastest"


class PointEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="point"):
    """The seconds of every repeat of one kind of collective at one size, on the slowest rank."""

    collective: Collective
    group_size: _Count
    ranks_per_node: _Count
    consecutive: bool
    message_bytes: _Count
    times_s: Annotated[tuple[_Positive, ...], Meta(min_length=1)]

    @property
    def kind(self) -> CollectiveKey:
        """Return the kind of message."""
        return CollectiveKey.from_fields(self)

    @property
    def key(self) -> EntryKey:
        """The kind of entry and of message, and the size."""
        return ("point", self.kind, self.message_bytes)

    def __str__(self) -> str:
        median = seconds_text(float(np.median(self.times_s)))
        spread = f"{len(self.times_s)} repeats, ± {median_interval(self.times_s):.0%}"
        return f"{bytes_text(self.message_bytes)} in {median} ({spread})"


class PairEntry(PairRow, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pair"):
    """The median time of a message from one rank to another."""

    source: Source = Source.MEASURED

    @property
    def key(self) -> EntryKey:
        """Return the entry's name in the journal: its kind, the ranks and the size."""
        return ("pair", self.source_rank, self.target_rank, self.message_bytes)

    def __str__(self) -> str:
        ranks = f"rank {self.source_rank} to rank {self.target_rank}"
        return f"{bytes_text(self.message_bytes)} from {ranks} in {seconds_text(self.time_s)}"


def overlap_key(kind: CollectiveKey | OverlapRow, message_bytes: int, compute_ratio: float) -> EntryKey:
    """The key of an overlap of a kind of collective, whether its ranks are neighbours or not."""
    return ("overlap", kind.collective, kind.group_size, kind.ranks_per_node, message_bytes, compute_ratio)


class OverlapEntry(OverlapRow, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="overlap"):
    """The times of a collective and a computation, each by itself and both at once; medians of the slowest rank."""

    compute_ratio: _Positive
    """Planned time of the computation by itself over that of the collective by itself."""
    source: Source = Source.MEASURED

    @property
    def key(self) -> EntryKey:
        """The kind of entry and of message, the size, and the length of the computation."""
        return overlap_key(self, self.collective_bytes, self.compute_ratio)

    def __str__(self) -> str:
        return (
            f"{bytes_text(self.collective_bytes)} of {seconds_text(self.collective_s)}: "
            f"{self.collective_slowdown:.3g} times, "
            f"computing of {seconds_text(self.compute_s)}: {self.compute_slowdown:.3g} times"
        )


Entry = StartEntry | RateEntry | PointEntry | PairEntry | OverlapEntry

JOURNAL: JournalKind[SweepIdentity, Entry] = JournalKind(
    format="shardwright.sweep_journal", run="sweep", identity=SweepIdentity, entry=Entry, key=lambda entry: entry.key
)
"""The journal of a sweep, from which a killed one continues."""


def profile_of(identity: SweepIdentity, entries: Sequence[Entry], date: str) -> HardwareProfile:
    """Return the hardware profile of these entries, in their order, with notes on suspicious measurements."""
    cluster = identity.cluster
    points = [entry for entry in entries if isinstance(entry, PointEntry)]
    rates = [entry for entry in entries if isinstance(entry, RateEntry)]
    once = [(entry.name, min(entry.values)) for entry in rates]
    once += [("startup_s", entry.time_s) for entry in entries if isinstance(entry, StartEntry)]
    profile = HardwareProfile(
        cluster=cluster.name,
        device=" + ".join(sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})),
        backend=identity.backend,
        provenance=Provenance(date=date, versions=identity.versions),
        points=Table.from_rows(PointRow, map(_point, points)),
        repeats=Table.from_rows(
            RepeatRow, (row for number, entry in enumerate(points) for row in _repeats(number, entry))
        ),
        pairs=Table.from_rows(PairRow, (entry for entry in entries if isinstance(entry, PairEntry))),
        overlap=Table.from_rows(OverlapRow, (entry for entry in entries if isinstance(entry, OverlapEntry))),
        ranks=Table.from_rows(RankRow, (row for entry in rates for row in _of_ranks(entry))),
        rates=Table.from_rows(RateRow, (RateRow(name=n, value=value, source=Source.MEASURED) for n, value in once)),
    )
    notes = "\n".join(findings(profile, cluster))
    return replace(profile, provenance=msgspec.structs.replace(profile.provenance, notes=notes))


def _point(entry: PointEntry) -> PointRow:
    interval = median_interval(entry.times_s)
    return PointRow(**entry.kind.columns, message_bytes=entry.message_bytes, interval=interval, source=Source.MEASURED)


def _repeats(number: int, entry: PointEntry) -> list[RepeatRow]:
    marked = zip(entry.times_s, outliers(entry.times_s).tolist(), strict=True)
    return [RepeatRow(point=number, time_s=time_s, outlier=outlier) for time_s, outlier in marked]


def _of_ranks(entry: RateEntry) -> Iterator[RankRow]:
    for rank, value in enumerate(entry.values):
        yield RankRow(rank=rank, name=entry.name, value=value, source=Source.MEASURED)
