"""From the entries of a sweep to its profile."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright_formats.io.hdf5 import Provenance, table_of
from shardwright_formats.types.hardware_profile import TABLES, HardwareProfile
from shardwright_profile.hardware.entries import Entry, OverlapEntry, PairEntry, PointEntry, RateEntry, StartEntry
from shardwright_profile.hardware.findings import findings
from shardwright_profile.hardware.job import SweepIdentity
from shardwright_profile.hardware.statistics import median_interval, outliers

__all__ = ["profile_of"]

_Row = dict[str, object]
_MEASURED = {"source": "measured"}


def profile_of(identity: SweepIdentity, entries: Sequence[Entry], date: str) -> HardwareProfile:
    """The profile of what was measured, in the order of the entries; its notes say what is amiss."""
    cluster = identity.cluster
    points = [entry for entry in entries if isinstance(entry, PointEntry)]
    rates = [entry for entry in entries if isinstance(entry, RateEntry)]
    rows: dict[str, list[_Row]] = {
        "points": [_point(entry) for entry in points],
        "repeats": [row for number, entry in enumerate(points) for row in _repeats(number, entry)],
        "pairs": [
            {name: getattr(entry, name) for name in PairEntry.__struct_fields__} | _MEASURED
            for entry in entries
            if isinstance(entry, PairEntry)
        ],
        "overlap": [
            {name: getattr(entry, name) for name in OverlapEntry.__struct_fields__ if name != "compute_ratio"}
            | _MEASURED
            for entry in entries
            if isinstance(entry, OverlapEntry)
        ],
        "ranks": [
            {"rank": rank, "name": entry.name, "value": value} | _MEASURED
            for entry in rates
            for rank, value in enumerate(entry.values)
        ],
        "rates": [
            *({"name": entry.name, "value": min(entry.values)} | _MEASURED for entry in rates),
            *({"name": "startup_s", "value": e.time_s} | _MEASURED for e in entries if isinstance(e, StartEntry)),
        ],
    }
    profile = HardwareProfile(
        cluster=cluster.name,
        device=" + ".join(sorted({cluster.node_types[group.node_type].device for group in cluster.nodes})),
        backend=identity.backend,
        provenance=Provenance(date, identity.versions),
        **{name: table_of(TABLES[name], found) for name, found in rows.items()},
    )
    notes = "\n".join(findings(profile, cluster))
    return replace(profile, provenance=profile.provenance._replace(notes=notes))


def _point(entry: PointEntry) -> _Row:
    named = dict(entry.kind._asdict(), message_bytes=entry.message_bytes)
    return named | {"collective": entry.collective.value, "interval": median_interval(entry.times_s)} | _MEASURED


def _repeats(number: int, entry: PointEntry) -> list[_Row]:
    marked = zip(entry.times_s, outliers(entry.times_s).tolist(), strict=True)
    return [{"point": number, "time_s": time_s, "outlier": outlier} for time_s, outlier in marked]
