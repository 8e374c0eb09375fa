"""Times of collectives from the hardware profile, and mutual slowdowns of collectives and computation."""

from collections.abc import Iterable
from functools import lru_cache
from math import log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.io import BadInput
from shardwright.io.table import median
from shardwright.plan.groups import nearest_measured, seconds_on
from shardwright.types.hardware_profile import Collective, CollectiveKey, GroupKind, HardwareProfile
from shardwright_search.cost_model.profiles import MADE_FROM, Profiles


class Duration(NamedTuple):
    """A time, and a warning if it is based on numbers that were not measured."""

    time_s: float
    warning: str | None = None


class Slowdowns(NamedTuple):
    """Slowdowns of a computation and a collective that overlap: the ratio to the time without overlap."""

    compute: float
    collective: float


def collective_time(
    profiles: Profiles, collective: Collective, kinds: Iterable[GroupKind], num_bytes: float
) -> Duration:
    """Return the time of a collective that groups of these kinds run at once: the slowest kind's.

    `num_bytes` is the full tensor, as defined by `Collective`. A group of one rank, or no bytes, takes no time.
    Raises BadInput when the hardware profile has neither such groups nor larger ones.
    """
    keys = (CollectiveKey(collective, *kind) for kind in kinds if num_bytes > 0 and kind.size > 1)
    return longest([Duration(0.0), *(_on_curve(profiles, key, num_bytes) for key in keys)])


def send_kind_time(profiles: Profiles, consecutive: bool, across_nodes: bool, num_bytes: float) -> Duration:
    """Return the time of a message from one rank to another; for two ranks, their distance makes no difference."""
    key = CollectiveKey(Collective.P2P, 2, 1 if across_nodes else 2, consecutive)
    if key not in profiles.hardware.curves:
        other = CollectiveKey.from_fields(key, consecutive=not consecutive)
        key = other if other in profiles.hardware.curves else key
    return _on_curve(profiles, key, num_bytes)


def exchange_time(profiles: Profiles, consecutive: bool, across_nodes: bool, num_bytes: float) -> Duration:
    """Return the time of a step of a ring, in which each rank sends a message and receives one.

    It is that of a message one way, times what a message each way was measured to take over it, at least 1 and linear
    in the logarithm of the bytes; 1 if overlap of sends was not measured.
    """
    one_way = send_kind_time(profiles, consecutive, across_nodes, num_bytes)
    log_bytes, factors = _both_ways(profiles.hardware, across_nodes)
    if not len(factors):
        return one_way
    factor = float(np.interp(log(max(1.0, num_bytes)), log_bytes, factors))
    return one_way._replace(time_s=one_way.time_s * factor)


@lru_cache(maxsize=16)
def _both_ways(hardware: HardwareProfile, across: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return log bytes, ascending [sizes], and the ratio of a simultaneous send and receive to a send alone [sizes].

    Both are of neighbours, inside a node or across nodes.
    """
    key = CollectiveKey(Collective.P2P, 2, 1 if across else 2, True)
    ratios: dict[int, list[float]] = {}
    for row in hardware.overlap.rows:
        alike = row.collective is Collective.P2P and row.ranks_per_node == key.ranks_per_node
        if alike and row.collective_bytes and row.collective_s and (nearest := nearest_measured(hardware, key)):
            one_way_s = seconds_on(hardware, nearest, row.collective_bytes)
            ratios.setdefault(row.collective_bytes, []).append(row.collective_s / one_way_s)
    sizes = sorted(ratios)
    return np.log(np.array(sizes)), np.array([max(1.0, median(np.array(ratios[size]))) for size in sizes])


def longest(durations: Iterable[Duration]) -> Duration:
    """Return the longest of several durations, all of which must be over."""
    return max(durations, key=lambda duration: duration.time_s)


def in_turn(durations: Iterable[Duration]) -> Duration:
    """Return the total of consecutive durations, with the first warning."""
    total_s, first = 0.0, None
    for time_s, warning in durations:
        total_s += time_s
        first = first or warning
    return Duration(total_s, first)


def slowdowns_of(
    profiles: Profiles, collective: Collective, kinds: Iterable[GroupKind], num_bytes: float
) -> Slowdowns | None:
    """Return the largest slowdowns among groups of these kinds, for a message of this size.

    Linear in the logarithm of the bytes between measured sizes, the nearest size's beyond. None if nothing was
    measured: then nothing overlaps.
    """
    curves = (_slowdown_curve(profiles.hardware, collective, kind.size, kind.across_nodes) for kind in kinds)
    return largest_slowdowns(None if curve is None else _slowdowns_at(curve, num_bytes) for curve in curves)


class _SlowdownCurve(NamedTuple):
    """Measured slowdowns, each at least 1 [sizes], and the logarithms of the messages' bytes, ascending."""

    log_bytes: NDArray[Any]
    compute: NDArray[Any]
    collective: NDArray[Any]


def _slowdowns_at(curve: _SlowdownCurve, num_bytes: float) -> Slowdowns:
    at = log(max(1.0, num_bytes))
    compute, collective = (float(np.interp(at, curve.log_bytes, values)) for values in curve[1:])
    return Slowdowns(compute, collective)


@lru_cache(maxsize=256)
def _slowdown_curve(
    hardware: HardwareProfile, collective: Collective, size: int, across: bool
) -> _SlowdownCurve | None:
    """Return the median slowdowns by message size, over the computations that were timed during the collective.

    They are of the rows of sends or of other collectives, this link, inside a node or across nodes, this collective and
    this group size, in that order of importance: what no row agrees in is passed over. Sizes that are not known count
    only where no other is.
    """
    table = hardware.overlap
    if not len(table):
        return None
    rows = np.ones(len(table), bool)
    sends = Collective.P2P.encode()
    for alike in (
        (table["collective"] == sends) == (collective is Collective.P2P),
        (table["ranks_per_node"] < table["group_size"]) == across,
        table["collective"] == collective.encode(),
        table["group_size"] == size,
        table["collective_bytes"] > 0,
    ):
        rows = rows & alike if (rows & alike).any() else rows
    sizes = np.unique(table["collective_bytes"][rows])
    medians = (
        [max(1.0, median(table[name][rows & (table["collective_bytes"] == size)])) for size in sizes]
        for name in ("compute_slowdown", "collective_slowdown")
    )
    return _SlowdownCurve(np.log(np.maximum(1, sizes)), *map(np.array, medians))


def largest_slowdowns(slowdowns: Iterable[Slowdowns | None]) -> Slowdowns | None:
    """Return the largest slowdowns of several messages; None if there are none or one is not known."""
    known = list(slowdowns)
    if not known or None in known:
        return None
    return Slowdowns(*map(max, zip(*filter(None, known), strict=True)))


def overlapped_time(compute_s: float, collective: Duration, slowdowns: Slowdowns | None) -> float:
    """Return the time that a collective adds to a computation if they start together.

    Each runs slowed down until the shorter is over, the other then continues alone. Without slowdowns they do not
    overlap.
    """
    collective_s = collective.time_s
    if slowdowns is None or collective_s == 0:
        return collective_s
    slow_compute, slow_collective = slowdowns
    if collective_s * slow_collective <= compute_s * slow_compute:
        return collective_s * slow_collective * (1 - 1 / slow_compute)
    return compute_s * slow_compute + collective_s - compute_s * slow_compute / slow_collective - compute_s


def _on_curve(profiles: Profiles, key: CollectiveKey, num_bytes: float) -> Duration:
    """Return the time of a kind of message, or of the measured kind nearest to it.

    A warning says if another kind is used, and if the size is beyond the measured ones.
    """
    hardware = profiles.hardware
    if (nearest := nearest_measured(hardware, key)) is None:
        problem = f"no {key.collective} among {key.group}, nor among more"
        is_imported = hardware.provenance.notes.startswith(MADE_FROM)
        remedy = "import a table that has it (--allreduce, --p2p, --sp-time)" if is_imported else "measure the hardware"
        raise BadInput(profiles.hardware_file, problem, f"{remedy} of this cluster")
    warnings = []
    if nearest != key:
        warnings.append(f"rounded up: {key.collective} among {key.group}: as measured among {nearest.group}")
    if num_bytes > (largest := hardware.curves[nearest][0][-1]):
        warnings.append(
            f"extrapolated: {key.collective} among {key.group_size} ranks of {num_bytes:.0f} bytes, "
            f"measured up to {largest}"
        )
    return Duration(seconds_on(hardware, nearest, num_bytes), "; ".join(warnings) or None)
