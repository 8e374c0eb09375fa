"""Points of a hardware profile from bandwidths and single times."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shardwright_formats.io.hdf5 import Provenance
from shardwright_formats.io.table import Source, Table
from shardwright_formats.types.hardware_profile import (
    Collective,
    CollectiveKey,
    HardwareProfile,
    OverlapRow,
    PointRow,
    RepeatRow,
)
from shardwright_profile.importers.rows import noted

MIB = 1024**2

_SIZES = (1024, MIB, 1024 * MIB)
"""Message sizes in bytes at which a bandwidth is turned into times; between them the line is straight."""


class HardwarePoint(NamedTuple):
    """The time of one kind of collective at one size."""

    key: CollectiveKey
    message_bytes: int
    time_s: float
    source: Source


def link_points(
    key: CollectiveKey, bytes_per_s: float, source: Source, sizes: Sequence[int] = _SIZES
) -> Iterator[HardwarePoint]:
    """Yield times by bandwidth without latency: the link's for p2p, the bus bandwidth of nccl-tests for collectives.

    Among n ranks an all-reduce moves 2(n-1)/n of its message, the others (n-1)/n.
    """
    n = key.group_size
    shares = {Collective.ALL_REDUCE: 2 * (n - 1) / n, Collective.P2P: 1.0}
    for size in sizes:
        yield HardwarePoint(key, size, shares.get(key.collective, (n - 1) / n) * size / bytes_per_s, source)


def halves(reduce: HardwarePoint) -> Iterator[HardwarePoint]:
    """Yield the gather and the scatter that an all-reduce consists of on a ring (Patarasuk & Yuan 2009)."""
    for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        key = CollectiveKey.from_fields(reduce.key, collective=collective)
        yield HardwarePoint(key, reduce.message_bytes, reduce.time_s / 2, Source.DERIVED)


def hardware_profile(
    cluster: str,
    device: str,
    notes: Sequence[str],
    points: Sequence[HardwarePoint],
    overlap: tuple[CollectiveKey, float] | None,
) -> HardwareProfile:
    """Return the profile of these points, one time each, and of one slowdown of both sides of an overlap."""
    ordered = sorted(points)
    return HardwareProfile(
        cluster=cluster,
        device=device,
        backend="nccl",
        provenance=Provenance(date="unknown", versions="nccl, driver unknown", notes=noted(notes)),
        points=Table.from_rows(
            PointRow,
            (PointRow(**p.key.columns, message_bytes=p.message_bytes, interval=0.0, source=p.source) for p in ordered),
        ),
        repeats=Table.from_rows(
            RepeatRow, (RepeatRow(point=i, time_s=p.time_s, outlier=False) for i, p in enumerate(ordered))
        ),
        overlap=Table.from_rows(OverlapRow, [] if overlap is None else [_slowdown(*overlap)]),
    )


def _slowdown(key: CollectiveKey, factor: float) -> OverlapRow:
    return OverlapRow(
        collective=key.collective,
        group_size=key.group_size,
        ranks_per_node=key.ranks_per_node,
        collective_bytes=0,
        compute_s=0.0,
        collective_s=0.0,
        compute_slowdown=factor,
        collective_slowdown=factor,
        source=Source.MEASURED,
    )
