"""The statistics of repeated times, and findings about a sweep: slow ranks, bad links, unsettled points."""

from collections import defaultdict
from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.display.units import bytes_text, seconds_text
from shardwright.types import Cluster
from shardwright.types.hardware_profile import HardwareProfile

MIN_REPEATS = 6
"""Minimum number of repeats whose extremes hold the median with a confidence of 95 %: 1 - 2 / 2**6 is 97 %."""
SETTLED = 0.03
"""Relative half width of the median's confidence interval below which a time needs no more repeats."""

LAYERS_ALONE, LAYERS_IN_PIPELINE = "layers_alone_per_s", "layers_in_pipeline_per_s"
"""Names of the rates of a small layer by itself, and in a pipeline between two halves of the ranks."""

_CONFIDENCE = 0.95
_OUTLYING = 3 * 1.4826
"""Three standard deviations, in median absolute deviations of a normal distribution."""


def median_interval(times_s: ArrayLike) -> float:
    """Return half of the 95 % confidence interval of the median, divided by the median; 0 for one repeat.

    The interval lies between two order statistics and assumes no distribution: the median of n independent times lies
    between the k-th smallest and the k-th largest with probability 1 - 2 P(B < k), B binomial of n and 1/2 (David and
    Nagaraja, Order Statistics, 3rd ed., section 7.1; Le Boudec, Performance Evaluation, theorem 2.1). The largest such
    k is taken. Under 6 repeats no k reaches 95 %: the interval is then their whole range, which covers less.
    """
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    k = _order(len(ordered))
    return float((ordered[-k] - ordered[k - 1]) / 2 / np.median(ordered))


def _order(repeats: int) -> int:
    """The largest k with 2 P(B < k) <= 5 % for B binomial of `repeats` and 1/2, at least 1; sums are exact."""
    below, k = 0, 0
    while 2 * (below + comb(repeats, k)) <= (1 - _CONFIDENCE) * 2**repeats:
        below += comb(repeats, k)
        k += 1
    return max(1, k)


def settled(times_s: ArrayLike) -> bool:
    """Whether the median of at least 6 repeats is known to within 3 %."""
    return np.size(times_s) >= MIN_REPEATS and median_interval(times_s) <= SETTLED


def outliers(times_s: ArrayLike) -> NDArray[np.bool_]:
    """Which times are above the median by more than 3 scaled median absolute deviations: [times] bool.

    The scale 1.4826 makes that deviation a normal distribution's standard deviation (Leys et al. 2013, Detecting
    outliers). Times scatter upwards only: a fast one is no outlier.
    """
    times = np.asarray(times_s, dtype=np.float64)
    median = np.median(times)
    return np.asarray(times > median + _OUTLYING * np.median(np.abs(times - median)))


def more_repeats(have: int, max_repeats: int, left_s: float, one_s: float) -> int:
    """Return the number of repeats of the next round: half as many again, within time and limit; 0 if none fits."""
    return max(0, min(max_repeats - have, max(MIN_REPEATS, have // 2), int(left_s / one_s)))


_SLOW_RATE = 0.8
_VERBS = {"matrix": "computes", "memory": "copies memory", "layers": "works on layers"}
_BAD_TIME = 1.5
_MIN_PAIRS = 3
"""Minimum number of comparable links among which one can be called slow."""
_MAX_SENTENCES = 20
"""Maximum number of sentences of each kind, so that a profile's notes do not list a thousand links."""


def findings(profile: HardwareProfile, cluster: Cluster) -> tuple[str, ...]:
    """A sentence for everything amiss in a cluster's measurements, the worst of its kind first."""
    bad = *_first(slow_ranks(profile, cluster)), *_first(bad_links(profile, cluster))
    return (*bad, *slowed_in_pipeline(profile), *unsettled_points(profile))


def slowed_in_pipeline(profile: HardwareProfile) -> tuple[str, ...]:
    """A sentence if a layer takes over 1.5 times as long in a pipeline as by itself, on the slowest rank."""
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
    """A sentence for each rank with a rate under 80 % of the median of the ranks on the same type of node."""
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

    Pairs are comparable if they have one message size, are equally far apart, between the same types of node, and all
    inside a node or all across nodes.
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
    """A sentence on the points not known to within 3 %: their number and the worst; single repeats do not count."""
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
