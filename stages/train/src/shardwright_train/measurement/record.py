"""Marks set on the way through a step, and the time between them."""

import resource
import time
from typing import NamedTuple, Protocol

import torch

__all__ = ["Clock", "Interval", "StepMark", "Turn", "clock_for", "peak_resident_bytes"]

Turn = tuple[int, int]
"""A microbatch and a chunk: a range of layers of the pipeline stage."""


class StepMark(Protocol):
    """What a step calls at each of its marks.

    A pass sets `<kind>.begin`, `<kind>.wait` once the messages are there that it begins with, `<segment>.<kind>` at the
    end of each segment (or of a part of it) and `<kind>.end`, where kind is `forward` or `backward`; outside of passes
    stand `start`, `reduced` and `optimizer`. An interval bears the name of the mark at its end.
    """

    def __call__(self, name: str, turn: Turn | None = None) -> None:
        """Set a mark now, in the pass of a turn or outside of passes."""


class Interval(NamedTuple):
    """The time from the mark before to the mark `name`."""

    name: str
    turn: Turn | None
    start_s: float
    """Since the first mark."""
    time_s: float


class Clock(Protocol):
    """Something that is given marks and tells the times between them."""

    def mark(self, name: str, turn: Turn | None = None) -> None:
        """Set a mark now."""

    def intervals(self) -> list[Interval]:
        """The times between the marks so far, in seconds; waits for the device."""


class _HostClock:
    """For devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Turn | None, float]] = []

    def mark(self, name: str, turn: Turn | None = None) -> None:
        self._marks.append((name, turn, time.perf_counter()))

    def intervals(self) -> list[Interval]:
        first = self._marks[0][-1]
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [Interval(name, turn, before - first, after - before) for (*_, before), (name, turn, after) in pairs]


class _CudaClock:
    """For CUDA: events on the current stream, read after it is done."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Turn | None, torch.cuda.Event]] = []

    def mark(self, name: str, turn: Turn | None = None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, turn, event))

    def intervals(self) -> list[Interval]:
        torch.cuda.synchronize()
        first = self._marks[0][-1]
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [
            Interval(name, turn, first.elapsed_time(before) / 1000, before.elapsed_time(after) / 1000)
            for (*_, before), (name, turn, after) in pairs
        ]


def clock_for(device: torch.device) -> Clock:
    """A clock that measures what the device does."""
    return _CudaClock() if device.type == "cuda" else _HostClock()


def peak_resident_bytes() -> int:
    """The most host memory that this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
