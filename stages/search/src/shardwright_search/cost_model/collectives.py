"""Time of collectives, read off the hardware profile, and how they and computation that overlap slow each other."""

from bisect import bisect
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.table import median
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.topology import GroupKind


class Duration(NamedTuple):
    """A time and what is doubtful about it."""

    time_s: float
    warning: str | None = None


class Slowdowns(NamedTuple):
    """Time beside the other over time alone."""

    compute: float
    collective: float


def collective_time(
    profiles: Profiles, collective: Collective, kinds: Iterable[GroupKind], num_bytes: float
) -> Duration:
    """Time of a collective that groups of these kinds do at once: that of the slowest kind.

    `num_bytes` is the full tensor, as defined by `Collective`. A group of one rank, or no bytes, takes no time.
    Raises BadInput when the hardware profile has no such group.
    """
    taken = Duration(0.0)
    for kind in kinds:
        if num_bytes > 0 and kind.size > 1:
            taken = max(taken, _on_curve(profiles, CollectiveKey(collective, *kind), num_bytes), key=_time)
    return taken


def send_kind_time(profiles: Profiles, consecutive: bool, across_nodes: bool, num_bytes: float) -> Duration:
    """Time of a message from one rank to another; neighbours or not makes no difference to two ranks."""
    key = CollectiveKey(Collective.P2P, 2, consecutive, across_nodes)
    if key not in profiles.hardware.curves:
        other = key._replace(consecutive=not consecutive)
        key = other if other in profiles.hardware.curves else key
    return _on_curve(profiles, key, num_bytes)


def slowdowns_of(profiles: Profiles, collective: Collective, group_size: int) -> Slowdowns | None:
    """The measured slowdowns, medians over those of this collective and group size if there are any.

    Else over those of this collective, else over all. None where nothing was measured: then nothing overlaps.
    """
    table = profiles.hardware.overlap
    if not len(table):
        return None
    same = table["collective"] == collective.encode()
    near = same & (table["group_size"] == group_size)
    rows = near if near.any() else same if same.any() else np.ones(len(same), bool)
    compute, other = (max(1.0, median(table[name][rows])) for name in ("compute_slowdown", "collective_slowdown"))
    return Slowdowns(compute, other)


def largest_slowdowns(found: Iterable[Slowdowns | None]) -> Slowdowns | None:
    """Of messages of several kinds the largest slowdowns; None where any of them is not known, or there are none."""
    every = list(found)
    known = [slowdowns for slowdowns in every if slowdowns is not None]
    if not known or len(known) < len(every):
        return None
    return Slowdowns(*(max(column) for column in zip(*known, strict=True)))


def overlapped_time(compute_s: float, collective: Duration, slowdowns: Slowdowns | None) -> float:
    """How much longer a computation and a collective take than the computation alone when both start at once.

    Each runs slowed down until the shorter is over, the other then goes on alone. Without slowdowns they do not
    overlap.
    """
    collective_s = collective.time_s
    if slowdowns is None or collective_s == 0:
        return collective_s
    slow_compute, slow_collective = slowdowns
    if collective_s * slow_collective <= compute_s * slow_compute:
        return collective_s * slow_collective * (1 - 1 / slow_compute)
    return compute_s * slow_compute + collective_s - compute_s * slow_compute / slow_collective - compute_s


def _time(duration: Duration) -> float:
    return duration.time_s


def _on_curve(profiles: Profiles, key: CollectiveKey, num_bytes: float) -> Duration:
    """Piecewise linear between measured sizes, constant below the smallest, the last segment's bandwidth above.

    Where noise makes the last segment fall, the largest size's own bandwidth stands in. A number of ranks that no sweep
    of the cluster measures, as stages of unequal width have, lies between the next smaller and the next larger one.
    """
    if (curve := profiles.hardware.curves.get(key)) is None:
        if (between := _between_sizes(profiles, key, num_bytes)) is not None:
            return between
        how = "neighbouring" if key.consecutive else "strided"
        where = "across nodes" if key.across_nodes else "inside a node"
        raise BadInput(
            profiles.hardware_file,
            f"no {key.collective} among {key.group_size} {how} ranks {where}",
            "measure the hardware of this cluster again",
        )
    sizes, times_s = curve
    if num_bytes <= sizes[-1]:
        return Duration(float(np.interp(num_bytes, sizes, times_s)))
    seconds_per_byte = times_s[-1] / sizes[-1]
    if len(sizes) > 1 and times_s[-1] > times_s[-2]:
        seconds_per_byte = (times_s[-1] - times_s[-2]) / (sizes[-1] - sizes[-2])
    time_s = float(times_s[-1] + (num_bytes - sizes[-1]) * seconds_per_byte)
    return Duration(
        time_s,
        f"extrapolated: {key.collective} among {key.group_size} ranks of {num_bytes:.0f} bytes, "
        f"measured up to {sizes[-1]}",
    )


def _between_sizes(profiles: Profiles, key: CollectiveKey, num_bytes: float) -> Duration | None:
    """Linear in the number of ranks; None where not both a smaller and a larger number were measured.

    And none where a multiple was measured of any collective: a sweep of the cluster would have such groups, too.
    """
    if any(other.group_size % key.group_size == 0 for other in profiles.hardware.curves):
        return None
    alike = (other for other in profiles.hardware.curves if other._replace(group_size=key.group_size) == key)
    known = sorted(other.group_size for other in alike)
    if not known or not known[0] < key.group_size < known[-1]:
        return None
    low, high = known[bisect(known, key.group_size) - 1 :][:2]
    times = [_on_curve(profiles, key._replace(group_size=size), num_bytes).time_s for size in (low, high)]
    warning = f"interpolated: {key.collective} among {key.group_size} ranks, measured among {low} and {high}"
    return Duration(float(np.interp(key.group_size, (low, high), times)), warning)
