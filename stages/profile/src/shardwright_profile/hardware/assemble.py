"""From the entries of a sweep to its profile."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Row, Source, Table
from shardwright_formats.types.hardware_profile import (
    HardwareProfile,
    OverlapRow,
    PairRow,
    PointRow,
    RankRow,
    RateRow,
    RepeatRow,
)
from shardwright_profile.hardware.entries import Entry, OverlapEntry, PairEntry, PointEntry, RateEntry, StartEntry
from shardwright_profile.hardware.findings import findings
from shardwright_profile.hardware.job import SweepIdentity
from shardwright_profile.hardware.statistics import median_interval, outliers

__all__ = ["profile_of"]

_MEASURED = Source.MEASURED
_EntryType = TypeVar("_EntryType", bound=Entry)
_RowType = TypeVar("_RowType", bound=Row)


def profile_of(identity: SweepIdentity, entries: Sequence[Entry], date: str) -> HardwareProfile:
    """The profile of what was measured, in the order of the entries; its notes say what is amiss."""
    cluster = identity.cluster
    points, rates = _of(PointEntry, entries), _of(RateEntry, entries)
    once = [(entry.name, min(entry.values)) for entry in rates]
    once += [("startup_s", entry.time_s) for entry in _of(StartEntry, entries)]
    profile = HardwareProfile(
        cluster=cluster.name,
        device=" + ".join(sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})),
        backend=identity.backend,
        provenance=Provenance(date=date, versions=identity.versions),
        points=Table.of(PointRow, map(_point, points)),
        repeats=Table.of(RepeatRow, (row for number, entry in enumerate(points) for row in _repeats(number, entry))),
        pairs=Table.of(PairRow, (_like(PairRow, entry) for entry in _of(PairEntry, entries))),
        overlap=Table.of(OverlapRow, (_like(OverlapRow, entry) for entry in _of(OverlapEntry, entries))),
        ranks=Table.of(RankRow, (row for entry in rates for row in _of_ranks(entry))),
        rates=Table.of(RateRow, (RateRow(name=n, value=value, source=_MEASURED) for n, value in once)),
    )
    notes = "\n".join(findings(profile, cluster))
    return replace(profile, provenance=msgspec.structs.replace(profile.provenance, notes=notes))


def _of(kind: type[_EntryType], entries: Sequence[Entry]) -> list[_EntryType]:
    return [entry for entry in entries if isinstance(entry, kind)]


def _like(row_type: type[_RowType], entry: Entry) -> _RowType:
    """The row whose fields are those of an entry."""
    names = (name for name in row_type.__struct_fields__ if name != "source")
    return row_type(**{name: getattr(entry, name) for name in names}, source=_MEASURED)


def _point(entry: PointEntry) -> PointRow:
    interval = median_interval(entry.times_s)
    return PointRow(**entry.kind._asdict(), message_bytes=entry.message_bytes, interval=interval, source=_MEASURED)


def _repeats(number: int, entry: PointEntry) -> list[RepeatRow]:
    marked = zip(entry.times_s, outliers(entry.times_s).tolist(), strict=True)
    return [RepeatRow(point=number, time_s=time_s, outlier=outlier) for time_s, outlier in marked]


def _of_ranks(entry: RateEntry) -> Iterator[RankRow]:
    for rank, value in enumerate(entry.values):
        yield RankRow(rank=rank, name=entry.name, value=value, source=_MEASURED)
