"""How long collectives and point-to-point messages take on a cluster, with every repeat kept."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.hdf5 import (
    SOURCES,
    Column,
    Provenance,
    Table,
    open_profile,
    read_attribute,
    read_table,
    write_profile,
    write_table,
)

__all__ = [
    "FORMAT",
    "TABLES",
    "VERSION",
    "Collective",
    "CollectiveKey",
    "HardwareProfile",
    "read_hardware_profile",
    "write_hardware_profile",
]

FORMAT = "shardwright.hardware_profile"
VERSION = 3


class Collective(StrEnum):
    """What was timed.

    `message_bytes` is the size of the full tensor on one rank: the input of all_reduce and reduce_scatter and
    all_to_all, the output of all_gather, the message of p2p.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"


_SOURCE = Column("S8", "name", among=SOURCES)

TABLES = {
    "points": {
        "collective": Column("S16", "name", among=tuple(Collective)),
        "group_size": Column("int64", "ranks", positive=True),
        "consecutive": Column("int8", "0 or 1"),
        "across_nodes": Column("int8", "0 or 1"),
        "message_bytes": Column("int64", "bytes", positive=True),
        "interval": Column(
            "float64", "half of the 95 % confidence interval of the median, over the median; 0 for one repeat"
        ),
        "source": _SOURCE,
    },
    "repeats": {
        "point": Column("int64", "row of points"),
        "time_s": Column("float64", "s", positive=True),
        "outlier": Column("int8", "0 or 1"),
    },
    "pairs": {
        "source_rank": Column("int64", "rank"),
        "target_rank": Column("int64", "rank"),
        "message_bytes": Column("int64", "bytes", positive=True),
        "time_s": Column("float64", "s, median", positive=True),
        "source": _SOURCE,
    },
    "overlap": {
        "collective": Column("S16", "name", among=tuple(Collective)),
        "group_size": Column("int64", "ranks", positive=True),
        "collective_bytes": Column("int64", "bytes; 0 where it is not known"),
        "compute_s": Column("float64", "s of the computation alone; 0 where it is not known"),
        "collective_s": Column("float64", "s of the collective alone; 0 where it is not known"),
        "compute_slowdown": Column("float64", "time overlapped with the collective over time alone", positive=True),
        "collective_slowdown": Column("float64", "time overlapped with the computation over time alone", positive=True),
        "source": _SOURCE,
    },
    "ranks": {
        "rank": Column("int64", "rank"),
        "name": Column("S32", "name"),
        "value": Column("float64", "SI unit in the name", positive=True),
        "source": _SOURCE,
    },
    "rates": {
        "name": Column("S32", "name"),
        "value": Column("float64", "SI unit in the name", positive=True),
        "source": _SOURCE,
    },
}
"""The tables of the file and their columns."""


class CollectiveKey(NamedTuple):
    """A kind of message: which collective, among how many ranks, and how these lie."""

    collective: Collective
    group_size: int
    consecutive: bool
    across_nodes: bool


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """What a cluster's links and devices do.

    `cluster` names what was measured, `device` and `backend` on what and through what. `points`: kinds of message at
    growing sizes, and `repeats`: every time of each. `pairs`: messages between neighbours in a pipeline, link by link.
    `overlap`: how computation and messages slow each other down. `ranks`: rates of each rank's device, and `rates`: of
    the slowest, with what is there once a launch.
    """

    cluster: str
    device: str
    backend: str
    provenance: Provenance
    points: Table
    repeats: Table
    rates: Table
    pairs: Table = field(default_factory=lambda: _empty("pairs"))
    overlap: Table = field(default_factory=lambda: _empty("overlap"))
    ranks: Table = field(default_factory=lambda: _empty("ranks"))

    @cached_property
    def curves(self) -> dict[CollectiveKey, tuple[NDArray[Any], NDArray[Any]]]:
        """Per kind of message: sizes in bytes, ascending, and the median time of each in seconds."""
        medians = np.array([np.median(self.times_s(i)) for i in range(len(self.points["collective"]))])
        rows: dict[CollectiveKey, list[int]] = {}
        for i in range(len(medians)):
            rows.setdefault(self.key(i), []).append(i)
        sizes = self.points["message_bytes"]
        return {
            key: (sizes[order], medians[order])
            for key, found in rows.items()
            for order in [sorted(found, key=lambda i: int(sizes[i]))]
        }

    def key(self, point: int) -> CollectiveKey:
        """The kind of message of one row of `points`."""
        p = self.points
        name = Collective(p["collective"][point].decode())
        return CollectiveKey(
            name, int(p["group_size"][point]), bool(p["consecutive"][point]), bool(p["across_nodes"][point])
        )

    def times_s(self, point: int) -> NDArray[Any]:
        """Every repeat of one row of `points`, in seconds."""
        return np.asarray(self.repeats["time_s"][self.repeats["point"] == point])


def write_hardware_profile(path: Path, profile: HardwareProfile) -> None:
    """Write the profile; the same measurements give the same bytes."""
    names = {"cluster": profile.cluster, "device": profile.device, "backend": profile.backend}
    with write_profile(path, FORMAT, VERSION, names | profile.provenance._asdict()) as file:
        for name, columns in TABLES.items():
            write_table(file, name, columns, getattr(profile, name))


def read_hardware_profile(path: Path) -> HardwareProfile:
    """Read a hardware profile; BadInput names whatever cannot be right in it."""
    with open_profile(path, FORMAT, VERSION) as file:
        tables = {name: read_table(path, file, name, columns) for name, columns in TABLES.items()}
        names = {name: read_attribute(path, file, name) for name in ("cluster", "device", "backend")}
        provenance = Provenance(**{name: read_attribute(path, file, name) for name in Provenance._fields})
    points, repeats = tables["points"], tables["repeats"]
    for flag in ("consecutive", "across_nodes"):
        if (points[flag] > 1).any():
            raise BadInput(path, f"table points: {flag} is {points[flag].max()}, not 0 or 1", "write the profile again")
    if set(repeats["point"].tolist()) != set(range(len(points["collective"]))):
        raise BadInput(path, "points without repeats, or repeats without a point", "measure again")
    if (repeats["outlier"] > 1).any():
        raise BadInput(path, "table repeats: outlier is neither 0 nor 1", "write the profile again")
    cluster, device, backend = names.values()
    return HardwareProfile(cluster=cluster, device=device, backend=backend, provenance=provenance, **tables)


def _empty(table: str) -> Table:
    return {name: np.zeros(0, dtype=column.dtype) for name, column in TABLES[table].items()}
