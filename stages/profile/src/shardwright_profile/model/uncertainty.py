"""Notes of a profile on its own times that few or scattered steps have left uncertain."""

from collections.abc import Iterable, Iterator, Sequence

from shardwright_formats.semantics.differences import MAX_RELATIVE_ERROR, Duration
from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_formats.types.model_profile import LayerRow
from shardwright_profile.model.probe_results import ProbeResult


def uncertain_times(probes: Sequence[ProbeResult], layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence on what was measured again, if anything, and one for each time with an error over a fifth."""
    again = {probe.in_turns: probe.measured_again for probe in probes if probe.in_turns}
    if any(again.values()):
        times = f"up to {max(again.values())} times" if max(again.values()) > 1 else "once"
        yield f"measured again: {sum(map(bool, again.values()))} of {len(again)} groups of probes in turns, {times}"
    for row in (row for row in layers if row.type not in (EMBEDDING, HEAD)):
        for way in ("forward", "backward"):
            time = Duration(getattr(row, f"{way}_s"), getattr(row, f"{way}_error_s"))
            if time.relative_error > MAX_RELATIVE_ERROR:
                yield (
                    f"uncertain: {way} time of {row.type} (tp_size {row.tp_size}, sequence_parallel "
                    f"{row.sequence_parallel}, recompute {row.recompute}, micro_batch_size {row.micro_batch_size}, "
                    f"sequence_length {row.sequence_length}) has a standard error of {time.relative_error:.0%}"
                )
