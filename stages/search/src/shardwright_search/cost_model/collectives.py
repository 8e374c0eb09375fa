"""Time of collectives, read off the hardware profile, and how they and computation that overlap slow each other."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_formats.io.table import median
from shardwright_formats.semantics.groups import nearest_measured, seconds_on
from shardwright_formats.types.hardware_profile import Collective, CollectiveKey, GroupKind
from shardwright_search.cost_model.profiles import Profiles


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
    Raises BadInput when the hardware profile has neither such groups nor larger ones.
    """
    taken = Duration(0.0)
    for kind in kinds:
        if num_bytes > 0 and kind.size > 1:
            taken = max(taken, _on_curve(profiles, CollectiveKey(collective, *kind), num_bytes), key=_time)
    return taken


def send_kind_time(profiles: Profiles, consecutive: bool, across_nodes: bool, num_bytes: float) -> Duration:
    """Time of a message from one rank to another; neighbours or not makes no difference to two ranks."""
    key = CollectiveKey(Collective.P2P, 2, 1 if across_nodes else 2, consecutive)
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
    """Of the kind itself, or of what stands for it; then a warning says so, as it does beyond the measured sizes."""
    hardware = profiles.hardware
    if (found := nearest_measured(hardware, key)) is None:
        what = f"no {key.collective} among {key.group}, nor among more"
        raise BadInput(profiles.hardware_file, what, "measure the hardware of this cluster")
    warnings = []
    if found != key:
        warnings.append(f"rounded up: {key.collective} among {key.group}: as measured among {found.group}")
    if num_bytes > (largest := hardware.curves[found][0][-1]):
        warnings.append(
            f"extrapolated: {key.collective} among {key.group_size} ranks of {num_bytes:.0f} bytes, "
            f"measured up to {largest}"
        )
    return Duration(seconds_on(hardware, found, num_bytes), "; ".join(warnings) or None)
