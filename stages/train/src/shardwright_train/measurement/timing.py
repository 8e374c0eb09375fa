"""Times of one step: the events that a step sets, the time between them, by segment and by pass."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch

from shardwright_formats.semantics.schedules.passes import Pass, middle
from shardwright_formats.types import PassTime
from shardwright_train.pipeline.runner import MicrobatchChunk

_FORWARD, _BACKWARD = ".forward", ".backward"


class Interval(NamedTuple):
    """The time from the event before to the event `name`."""

    name: str
    at: MicrobatchChunk | None
    start_s: float
    """Seconds since the first event."""
    time_s: float


class Clock(Protocol):
    """A clock that records events and returns the times between them."""

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Record an event."""

    def intervals(self) -> list[Interval]:
        """Return the seconds between the events so far; waits for the device."""


class _HostClock:
    """A clock for devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._events: list[tuple[str, MicrobatchChunk | None, float]] = []

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        self._events.append((name, at, time.perf_counter()))

    def intervals(self) -> list[Interval]:
        first = self._events[0][-1]
        return [
            Interval(name, at, before - first, after - before)
            for (*_, before), (name, at, after) in pairwise(self._events)
        ]


class _CudaClock:
    """A clock for CUDA: events on the current stream, read after it is done."""

    def __init__(self) -> None:
        self._events: list[tuple[str, MicrobatchChunk | None, torch.cuda.Event]] = []

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((name, at, event))

    def intervals(self) -> list[Interval]:
        torch.cuda.synchronize()
        first = self._events[0][-1]
        return [
            Interval(name, at, first.elapsed_time(before) / 1000, before.elapsed_time(after) / 1000)
            for (*_, before), (name, at, after) in pairwise(self._events)
        ]


def clock_for(device: torch.device) -> Clock:
    """Return a clock for a device."""
    return _CudaClock() if device.type == "cuda" else _HostClock()


@dataclass(frozen=True)
class StepTiming:
    """The times of one step of one rank; by segment they are means over middle microbatches (see `Segment`)."""

    reference_s: float
    """Seconds of the reference workload, right before."""
    step_s: float
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    gradient_reduction_s: float | None
    optimizer_s: float
    passes: tuple[PassTime, ...]


def timing_of_step(intervals: Sequence[Interval], reference_s: float) -> StepTiming:
    """Sort the times between the events of one step by segment and pass; a microbatch's chunks are added up."""
    forward, backward = _by_segment(intervals, _FORWARD), _by_segment(intervals, _BACKWARD)
    passes = [sum(times) for times in zip(*backward.values(), strict=True)]
    reduced_less_s = statistics.fmean(middle(passes, Pass.BACKWARD))
    # Reductions begin in the last backward pass and are waited for after it.
    waited_s = sum(i.time_s for i in intervals if i.name == "reduced")
    return StepTiming(
        reference_s=reference_s,
        step_s=sum(i.time_s for i in intervals),
        forward_s={name: statistics.fmean(middle(times, Pass.FORWARD)) for name, times in forward.items()},
        backward_s={name: statistics.fmean(middle(times, Pass.BACKWARD)) for name, times in backward.items()},
        gradient_reduction_s=passes[-1] - reduced_less_s + waited_s if len(passes) > 1 else None,
        optimizer_s=next(i.time_s for i in intervals if i.name == "optimizer"),
        passes=tuple(_passes(intervals)),
    )


def _by_segment(intervals: Sequence[Interval], suffix: str) -> dict[str, list[float]]:
    """Return the times of each segment, one per microbatch in the order of the microbatches."""
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
