"""Findings of a sweep: slow ranks, bad links, times that do not settle."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from shardwright_formats.display.units import bytes_text, seconds_text
from shardwright_formats.types import Cluster
from shardwright_formats.types.hardware_profile import HardwareProfile
from shardwright_profile.hardware.statistics import SETTLED

_SLOW_RATE = 0.8
_BAD_TIME = 1.5
_MIN_PAIRS = 3
"""Minimum number of comparable links among which one can be called slow."""
_MAX_SENTENCES = 20
"""Maximum number of sentences of each kind, so that a profile's notes do not list a thousand links."""


def findings(profile: HardwareProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence for everything amiss in a cluster's measurements, the worst of its kind first."""
    return (
        *_first(slow_ranks(profile, cluster)),
        *_first(bad_links(profile, cluster)),
        *unsettled_points(profile),
    )


def slow_ranks(profile: HardwareProfile, cluster: Cluster) -> tuple[str, ...]:
    """Return a sentence for each rank with a rate under 80 % of the median of the ranks on the same type of node."""
    rates: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in profile.ranks.rows:
        rates[row.name, cluster.node_type_of_rank[row.rank]][row.rank] = row.value
    found = []
    for (name, node_type), values in rates.items():
        median = float(np.median(list(values.values())))
        for rank, value in values.items():
            if value < _SLOW_RATE * median:
                verb = "computes" if name.startswith("matrix") else "copies memory"
                of = f"the median rate of the ranks on {node_type}"
                found.append((value / median, f"rank {rank} {verb} at {value / median:.0%} of {of} ({name})"))
    return tuple(sentence for _, sentence in sorted(found))


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
    found = []
    for (message_bytes, apart, inside, _), times_s in alike.items():
        median_s = float(np.median(list(times_s.values())))
        for (source, target), time_s in times_s.items():
            if len(times_s) >= _MIN_PAIRS and time_s > _BAD_TIME * median_s:
                factor = time_s / median_s
                place = "in a node" if inside else "across nodes"
                found.append(
                    (
                        -factor,
                        f"the link from rank {source} to rank {target} takes {seconds_text(time_s)} for "
                        f"{bytes_text(message_bytes)}, {factor:.1f} times the median of "
                        f"the {len(times_s)} pairs {apart} apart {place}",
                    )
                )
    return tuple(sentence for _, sentence in sorted(found))


def unsettled_points(profile: HardwareProfile) -> tuple[str, ...]:
    """Return a sentence on the points not known to within 3 %: their number and the worst; one repeat tells nothing."""
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
