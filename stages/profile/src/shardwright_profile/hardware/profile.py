"""A hardware measurement: its job, its journal entries, the profile made from them, and warnings about it."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from math import comb
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

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
    """Versions of the software and of the device driver."""

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
    """Reading in seconds of the node's monotonic clock when the ranks of this node were started."""
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
    """The seconds from starting the ranks until their first collective was complete."""

    time_s: _Positive

    @property
    def key(self) -> EntryKey:
        """Return the entry's name in the journal, which has only one such entry."""
        return ("start",)

    def __str__(self) -> str:
        return f"in {seconds_text(self.time_s)}"


class RateEntry(Value, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="rate"):
    """A rate of every rank's device, in rank order, measured while all ranks work."""

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
        """Return the kind of collective."""
        return CollectiveKey.from_fields(self)

    @property
    def key(self) -> EntryKey:
        """Return the entry's name in the journal: its kind, the kind of collective and the size."""
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
    """Return the journal key of an overlap, which does not depend on whether the collective's ranks are neighbours."""
    return ("overlap", kind.collective, kind.group_size, kind.ranks_per_node, message_bytes, compute_ratio)


class OverlapEntry(OverlapRow, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="overlap"):
    """The times of a collective and a computation, each by itself and both at once; medians on the slowest rank."""

    compute_ratio: _Positive
    """Planned ratio of the computation's time to the collective's time, each by itself."""
    source: Source = Source.MEASURED

    @property
    def key(self) -> EntryKey:
        """Return the entry's name in the journal: its kind, the kind of collective, the size and the planned ratio."""
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


# Statistics of repeated times, and findings about a sweep: slow ranks, slow links, points that are not settled.


MIN_REPEATS = 6
"""Minimum number of repeats whose extremes enclose the median with a confidence of 95 %: 1 - 2 / 2**6 is 97 %."""
SETTLED = 0.03
"""Relative half width of the median's confidence interval up to which a time needs no more repeats."""

LAYERS_ALONE, LAYERS_IN_PIPELINE = "layers_alone_per_s", "layers_in_pipeline_per_s"
"""Names of the rates of a small layer: by itself, and in a pipeline between two halves of the ranks."""

_CONFIDENCE = 0.95
_OUTLYING = 3 * 1.4826
"""Three standard deviations, in median absolute deviations of a normal distribution."""


def median_interval(times_s: ArrayLike) -> float:
    """Return half of the 95 % confidence interval of the median, divided by the median; 0 for one repeat.

    The interval lies between two order statistics and assumes no distribution: the median of n independent times lies
    between the k-th smallest and the k-th largest with probability 1 - 2 P(B < k), B binomial of n and 1/2 (David and
    Nagaraja, Order Statistics, 3rd ed., section 7.1; Le Boudec, Performance Evaluation, theorem 2.1). The largest k
    with at least 95 % is taken. For fewer than 6 repeats no k reaches that: the interval is then the whole range, at
    a lower confidence.
    """
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    k = _order(len(ordered))
    return float((ordered[-k] - ordered[k - 1]) / 2 / np.median(ordered))


def _order(repeats: int) -> int:
    """Return the largest k with 2 P(B < k) <= 5 % for B binomial of `repeats` and 1/2, at least 1; sums are exact."""
    below, k = 0, 0
    while 2 * (below + comb(repeats, k)) <= (1 - _CONFIDENCE) * 2**repeats:
        below += comb(repeats, k)
        k += 1
    return max(1, k)


def settled(times_s: ArrayLike) -> bool:
    """Return whether the median of at least 6 repeats is known to within 3 %."""
    return np.size(times_s) >= MIN_REPEATS and median_interval(times_s) <= SETTLED


def outliers(times_s: ArrayLike) -> NDArray[np.bool_]:
    """Return which times exceed the median by more than 3 scaled median absolute deviations: [times] bool.

    With the scale of 1.4826 the deviation equals the standard deviation of a normal distribution (Leys et al. 2013,
    Detecting outliers). Times scatter only upwards: a short one is no outlier.
    """
    times = np.asarray(times_s, dtype=np.float64)
    median = np.median(times)
    return np.asarray(times > median + _OUTLYING * np.median(np.abs(times - median)))


def more_repeats(have: int, max_repeats: int, left_s: float, one_s: float) -> int:
    """Return the number of repeats of the next round: half of those made, within time and limit; 0 if none fits."""
    return max(0, min(max_repeats - have, max(MIN_REPEATS, have // 2), int(left_s / one_s)))


_SLOW_RATE = 0.8
_VERBS = {"matrix": "computes", "memory": "copies memory", "layers": "works on layers"}
_BAD_TIME = 1.5
_MIN_PAIRS = 3
"""Minimum number of comparable links among which one can be called slow."""
_MAX_SENTENCES = 20
"""Maximum number of sentences of each kind, so that a profile's notes do not list a thousand links."""


def findings(profile: HardwareProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence for each doubtful measurement of a cluster, for each kind of doubt the worst first."""
    bad = *_first(slow_ranks(profile, cluster)), *_first(bad_links(profile, cluster))
    return (*bad, *slowed_in_pipeline(profile), *unsettled_points(profile))


def slowed_in_pipeline(profile: HardwareProfile) -> tuple[str, ...]:
    """Return a sentence if, on the slowest rank, a layer takes over 1.5 times as long in a pipeline as by itself."""
    per_s = {row.name: row.value for row in profile.rates.rows}
    if not {LAYERS_ALONE, LAYERS_IN_PIPELINE} <= per_s.keys():
        return ()
    alone_s, pipelined_s = 1 / per_s[LAYERS_ALONE], 1 / per_s[LAYERS_IN_PIPELINE]
    if pipelined_s <= _BAD_TIME * alone_s:
        return ()
    times = f"{seconds_text(pipelined_s)} inside a pipeline and {seconds_text(alone_s)} alone"
    return (
        f"a layer takes {times}, {pipelined_s / alone_s:.1f} times as long: predictions of pipelines count it as alone",
    )


def slow_ranks(profile: HardwareProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence for each rank with a rate under 80 % of the median of the ranks on the same type of node."""
    rates: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in profile.ranks.rows:
        rates[row.name, cluster.node_type_of_rank[row.rank]][row.rank] = row.value
    slow = []
    for (name, node_type), values in rates.items():
        median = float(np.median(list(values.values())))
        verb = _VERBS[name.split("_")[0]]
        for rank, value in values.items():
            if value < _SLOW_RATE * median:
                usual = f"the median rate of the ranks on {node_type} ({name})"
                slow.append((value / median, f"rank {rank} {verb} at {value / median:.0%} of {usual}"))
    return tuple(sentence for _, sentence in sorted(slow))


def bad_links(profile: HardwareProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence for each pair that takes over 1.5 times the median of at least 3 comparable pairs.

    Pairs are comparable if they have the same message size, the same difference of ranks and the same two types of
    node, and are all inside a node or all across nodes.
    """
    alike: dict[tuple[int, int, bool, tuple[str, str]], dict[tuple[int, int], float]] = defaultdict(dict)
    for row in profile.pairs.rows:
        source, target = row.source_rank, row.target_rank
        inside = cluster.node_of_rank[source] == cluster.node_of_rank[target]
        node_types = cluster.node_type_of_rank[source], cluster.node_type_of_rank[target]
        alike[row.message_bytes, target - source, inside, node_types][source, target] = row.time_s
    slow = []
    for (message_bytes, apart, inside, _), times_s in alike.items():
        median_s = float(np.median(list(times_s.values())))
        others = f"the {len(times_s)} pairs {apart} apart {'in a node' if inside else 'across nodes'}"
        for (source, target), time_s in times_s.items():
            if len(times_s) >= _MIN_PAIRS and time_s > _BAD_TIME * median_s:
                link = f"the link from rank {source} to rank {target} takes {seconds_text(time_s)}"
                usual = f"{time_s / median_s:.1f} times the median of {others}"
                slow.append((-time_s / median_s, f"{link} for {bytes_text(message_bytes)}, {usual}"))
    return tuple(sentence for _, sentence in sorted(slow))


def unsettled_points(profile: HardwareProfile) -> tuple[str, ...]:
    """Return a sentence on the points not known to within 3 %: their number and the worst; one repeat is too few."""
    repeats = np.array([len(times_s) for times_s in profile.times_s])
    interval = np.where(repeats > 1, profile.points["interval"], np.inf)
    count = int((interval > SETTLED).sum())
    if not count:
        return ()
    worst = int(np.argmax(interval))
    point = profile.points.rows[worst]
    known = f"± {interval[worst]:.0%}" if np.isfinite(interval[worst]) else "one repeat"
    where = f"{point.collective} of {point.key.group}, {bytes_text(point.message_bytes)}: {known}"
    return (f"{count} of {len(interval)} points are not known to within {SETTLED:.0%} (the worst: {where})",)


def _first(sentences: Sequence[str]) -> tuple[str, ...]:
    more = len(sentences) - _MAX_SENTENCES
    return (*sentences[:_MAX_SENTENCES], *([f"and {more} more like these"] if more > 0 else []))
