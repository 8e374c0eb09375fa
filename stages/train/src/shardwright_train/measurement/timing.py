"""Times of one step, by segment and by pass."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwright_formats.types.measurement import PassTime
from shardwright_train.measurement.record import Interval

__all__ = ["StepTiming", "timing_of_step"]

_FORWARD, _BACKWARD = ".forward", ".backward"


@dataclass(frozen=True)
class StepTiming:
    """The times of one step of one rank; by segment they are means over microbatches (see `Segment`)."""

    step_s: float
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    gradient_reduction_s: float | None
    optimizer_s: float
    passes: tuple[PassTime, ...]


def timing_of_step(intervals: Sequence[Interval]) -> StepTiming:
    """Sort the times between the events of one step by segment and pass; a microbatch's chunks are added up."""
    forward, backward = _by_segment(intervals, _FORWARD), _by_segment(intervals, _BACKWARD)
    passes = [sum(times) for times in zip(*backward.values(), strict=True)]
    # Reductions begin in the last backward pass and are waited for after it.
    waited_s = sum(i.time_s for i in intervals if i.name == "reduced")
    return StepTiming(
        step_s=sum(i.time_s for i in intervals),
        forward_s={name: statistics.fmean(times[1:] or times) for name, times in forward.items()},
        backward_s={name: statistics.fmean(times[:-1] or times) for name, times in backward.items()},
        gradient_reduction_s=passes[-1] - statistics.fmean(passes[:-1]) + waited_s if len(passes) > 1 else None,
        optimizer_s=next(i.time_s for i in intervals if i.name == "optimizer"),
        passes=tuple(_passes(intervals)),
    )


def _by_segment(intervals: Sequence[Interval], suffix: str) -> dict[str, list[float]]:
    """Times of each segment, one per microbatch in the order of the microbatches."""
    found: dict[str, dict[int, float]] = {}
    for interval in intervals:
        if interval.name.endswith(suffix) and interval.at is not None:
            microbatch, _ = interval.at
            times = found.setdefault(interval.name.removesuffix(suffix), {})
            times[microbatch] = times.get(microbatch, 0.0) + interval.time_s
    return {name: [times[microbatch] for microbatch in sorted(times)] for name, times in found.items()}


def _passes(intervals: Sequence[Interval]) -> Iterator[PassTime]:
    waited: Interval | None = None
    for interval in intervals:
        match interval.name.partition("."):
            case ("forward" | "backward", _, "wait"):
                waited = interval
            case ("forward" | "backward" as kind, _, "end"):
                assert waited is not None and interval.at is not None
                start_s = waited.start_s + waited.time_s
                microbatch, chunk = interval.at
                yield PassTime(
                    kind=kind,
                    microbatch=microbatch,
                    chunk=chunk,
                    wait_s=waited.time_s,
                    start_s=start_s,
                    time_s=interval.start_s + interval.time_s - start_s,
                )
