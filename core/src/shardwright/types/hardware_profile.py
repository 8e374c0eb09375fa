"""A hardware profile: times of collectives and point-to-point messages on a cluster, with every repeat kept."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from shardwright.io.hdf5 import Profile, Provenance, read_profile, write_profile
from shardwright.io.table import Row, Source, Table, median
from shardwright.key import Key
from shardwright.types.limits import (
    Bytes,
    NonNegativeCount,
    NonNegativeNumber,
    PositiveBytes,
    PositiveNumber,
    PositiveSeconds,
    Rank,
    Ranks,
    Rate,
    Seconds,
)


class Collective(StrEnum):
    """Kinds of messages that are timed.

    `message_bytes` is the size of the full tensor on one rank: the input of all_reduce and reduce_scatter and
    all_to_all, the output of all_gather, the message of p2p.
    """

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"


class GroupKind(NamedTuple):
    """A kind of group of ranks: how its ranks are placed on nodes.

    If all ranks of a node take part, the kind determines how many such groups share the node's network. For groups of
    neighbouring ranks these are the groups at either end of the node; for other groups their number is the node's
    devices divided by `ranks_per_node`.
    """

    size: int
    ranks_per_node: int
    """The largest number of the group's ranks on one node."""
    consecutive: bool
    """True if the ranks are neighbours."""

    @property
    def nodes(self) -> int:
        """Return the number of nodes that the group spans; all nodes except possibly the last are filled."""
        return -(-self.size // self.ranks_per_node)

    @property
    def across_nodes(self) -> bool:
        """Return whether the group spans several nodes."""
        return self.size > self.ranks_per_node

    def __str__(self) -> str:
        layout = "consecutive" if self.consecutive else "strided"
        place = f", {self.ranks_per_node} on a node" if self.across_nodes else " in a node"
        return f"{self.size} {layout} ranks{place}"


class CollectiveKey(Key, frozen=True, order=True):
    """The key of message times: the collective, and the kind of group."""

    collective: Collective
    group_size: int
    ranks_per_node: int
    consecutive: bool

    @property
    def group(self) -> GroupKind:
        """Return the kind of group."""
        return GroupKind(self.group_size, self.ranks_per_node, self.consecutive)


HOST_COPIES = "host_in_bytes_per_s", "host_out_bytes_per_s"
"""Names of the rates of a device's copies from and to pinned host memory, while all ranks copy."""
HOST_ALONE = "host_in_alone_bytes_per_s", "host_out_alone_bytes_per_s"
"""Names of the same rates, while the other ranks of the node wait."""
HOST_UPDATES = "host_updates_per_s"
"""Name of the rate of updates: parameters per second that the host updates by AdamW for one rank, while it does for
all."""
_RateName = Annotated[str, Meta(max_length=32)]
_Rate = Annotated[Rate, Meta(extra={"unit": "SI, in the name"})]
_Slowdown = Annotated[PositiveNumber, Meta(extra={"unit": "1"})]


class PointRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of message at one size; its times are in `repeats`."""

    collective: Collective
    """Collective that was timed."""
    group_size: Ranks
    """Number of ranks that take part."""
    ranks_per_node: Ranks
    """The largest number of the group's ranks on one node: all of them if the group is inside one node."""
    consecutive: bool
    """True if the ranks are neighbours."""
    message_bytes: PositiveBytes
    """Size of the full tensor on one rank."""
    interval: Annotated[NonNegativeNumber, Meta(extra={"unit": "1"})]
    """Half of the 95 % confidence interval of the median, over the median; 0 for one repeat."""
    source: Source
    """Source of the point's times."""

    @property
    def key(self) -> CollectiveKey:
        """Return the kind of message, without its size."""
        return CollectiveKey.from_fields(self)


class RepeatRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured time of a point, on the slowest rank."""

    point: Annotated[NonNegativeCount, Meta(extra={"unit": "row of points"})]
    """Row of the point in `points`."""
    time_s: PositiveSeconds
    """Time on the slowest rank."""
    outlier: bool
    """True if the time lies far from the point's other times."""


class PairRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message between two neighbours in a pipeline."""

    source_rank: Rank
    """Rank that sends."""
    target_rank: Rank
    """Rank that receives."""
    message_bytes: PositiveBytes
    """Size of the message."""
    time_s: PositiveSeconds
    """Median time of the message."""
    source: Source
    """Source of the time."""


class OverlapRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a collective and of a computation, each by itself and both at once."""

    collective: Collective
    """Collective that was timed; for p2p, one message in each direction at once, as in a step of a ring."""
    group_size: Ranks
    """Number of ranks that take part."""
    ranks_per_node: Ranks
    """The largest number of the group's ranks on one node."""
    collective_bytes: Bytes
    """Size of the full tensor on one rank; 0 if it is not known."""
    compute_s: Seconds
    """Time of the computation without the collective; 0 if it is not known."""
    collective_s: Seconds
    """Time of the collective without the computation; 0 if it is not known."""
    compute_slowdown: _Slowdown
    """Time of the computation overlapped with the collective, over its time without it."""
    collective_slowdown: _Slowdown
    """Time of the collective overlapped with the computation, over its time without it."""
    source: Source
    """Source of these numbers."""


class RankRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate of one rank's device, measured while all ranks work."""

    rank: Rank
    """Rank whose device it is."""
    name: _RateName
    """Name of the rate, such as `matrix_flops_per_s`."""
    value: _Rate
    """Value in the unit that the name ends with."""
    source: Source
    """Source of the value."""


class RateRow(Row, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rate of the slowest rank's device, or a time that occurs once per launch."""

    name: _RateName
    """Name of the rate or time, such as `matrix_flops_per_s` or `startup_s`."""
    value: _Rate
    """Value in the unit that the name ends with."""
    source: Source
    """Source of the value."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HardwareProfile(Profile):
    """The measured speeds of a cluster's links and devices.

    `cluster`: name of the cluster that was measured, `device`: its devices, `backend`: the collectives' backend.
    `points`: kinds of messages at growing sizes, and `repeats`: every time of each point. `pairs`: messages between
    neighbours in a pipeline, link by link. `overlap`: how computation and collectives slow each other down. `ranks`:
    rates of each rank's device. `rates`: rates of the slowest device, and times that occur once per launch.
    """

    FORMAT: ClassVar[str] = "shardwright.hardware_profile"
    VERSION: ClassVar[int] = 4

    cluster: str
    device: str
    backend: str
    provenance: Provenance
    points: Table[PointRow]
    repeats: Table[RepeatRow]
    pairs: Table[PairRow] = field(default_factory=lambda: Table.from_rows(PairRow, ()))
    overlap: Table[OverlapRow] = field(default_factory=lambda: Table.from_rows(OverlapRow, ()))
    ranks: Table[RankRow] = field(default_factory=lambda: Table.from_rows(RankRow, ()))
    rates: Table[RateRow] = field(default_factory=lambda: Table.from_rows(RateRow, ()))

    @property
    def problem(self) -> str | None:
        """Return a defect of the tables, such as points without repeats; None if there is none."""
        for table in (self.points, self.overlap):
            if (table["ranks_per_node"] > table["group_size"]).any():
                return "groups with more ranks on a node than they have"
        if set(self.repeats["point"].tolist()) != set(range(len(self.points))):
            return "points without repeats, or repeats without a point"
        return None

    def host_rate(self, name: str) -> float | None:
        """Return a measured rate of `NodeType` by its name, `host_bytes_per_s` or `host_updates_per_s`.

        None if it was not measured. `host_bytes_per_s` is the rate of the slower direction.
        """
        rates = {row.name: row.value for row in self.rates.rows}
        of = HOST_COPIES if name == "host_bytes_per_s" else (name,)
        return min((rates[each] for each in of if each in rates), default=None)

    @cached_property
    def times_s(self) -> tuple[NDArray[Any], ...]:
        """Return the repeats of each row of `points`, in seconds."""
        order = np.argsort(self.repeats["point"], kind="stable")
        bounds = np.searchsorted(self.repeats["point"][order], np.arange(1, len(self.points)))
        return tuple(np.split(self.repeats["time_s"][order], bounds))[: len(self.points)]

    @cached_property
    def curves(self) -> dict[CollectiveKey, tuple[NDArray[Any], NDArray[Any]]]:
        """Return ascending sizes in bytes and their median times in seconds, by kind of message."""
        sizes_and_medians: dict[CollectiveKey, list[tuple[int, float]]] = {}
        for row, times_s in zip(self.points.rows, self.times_s, strict=True):
            sizes_and_medians.setdefault(row.key, []).append((row.message_bytes, median(times_s)))
        curves = {}
        for key, points in sizes_and_medians.items():
            sizes, medians_s = zip(*sorted(points, key=lambda point: point[0]), strict=True)
            curves[key] = np.array(sizes), np.array(medians_s)
        return curves


def write_hardware_profile(path: Path, profile: HardwareProfile) -> None:
    """Write the profile; the same measurements give the same bytes."""
    write_profile(path, profile)


def read_hardware_profile(path: Path) -> HardwareProfile:
    """Read a hardware profile; raise BadInput if it is invalid."""
    return read_profile(path, HardwareProfile)
