"""Warnings about doubtful times of a profile: times that fall as the micro-batch grows, or have large errors."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import hypot

from shardwright.key import rows_by_key
from shardwright.plan.differences import MAX_RELATIVE_ERROR, Duration
from shardwright.types import EMBEDDING, HEAD
from shardwright.types.model_profile import LayerRow
from shardwright_profile.model.probe_results import ProbeResult
from shardwright_profile.model.replays import LIKELY


def falling_times(layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each time that is shorter than a smaller micro-batch's by more than three standard errors.

    The rows ascend in micro-batch size.
    """
    for key, points in rows_by_key(layers, "micro_batch_size").items():
        for small, large in pairwise(points):
            for way in ("forward", "backward"):
                times_s = [getattr(row, f"{way}_s") for row in (small, large)]
                error_s = hypot(*(getattr(row, f"{way}_error_s") for row in (small, large)))
                if times_s[0] - times_s[1] > LIKELY * error_s:
                    yield (
                        f"not monotone: {way} time of {key} falls from {times_s[0]:.4g} s to "
                        f"{times_s[1]:.4g} s as micro_batch_size grows from {small.micro_batch_size} to "
                        f"{large.micro_batch_size}"
                    )


def uncertain_times(probes: Sequence[ProbeResult], layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence on repeated measurements, if any, and one for each time with an error over a fifth."""
    again = {probe.in_turns: probe.measured_again for probe in probes if probe.in_turns}
    if any(again.values()):
        times = f"up to {max(again.values())} times" if max(again.values()) > 1 else "once"
        yield f"measured again: {sum(map(bool, again.values()))} of {len(again)} groups of probes in turns, {times}"
    for row in (row for row in layers if row.type not in (EMBEDDING, HEAD)):
        for way in ("forward", "backward"):
            time = Duration(getattr(row, f"{way}_s"), getattr(row, f"{way}_error_s"))
            if time.median_s > 0 and time.relative_error > MAX_RELATIVE_ERROR:
                yield (
                    f"uncertain: {way} time of {row.type} (tp_size {row.tp_size}, sequence_parallel "
                    f"{row.sequence_parallel}, recompute {row.recompute}, micro_batch_size {row.micro_batch_size}, "
                    f"sequence_length {row.sequence_length}) has a standard error of {time.relative_error:.0%}"
                )
