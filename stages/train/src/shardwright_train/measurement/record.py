"""Marks set on the way through a step, and the time between them."""

import resource
import time
from typing import NamedTuple, Protocol

import torch

from shardwright_train.pipeline.runner import MicrobatchChunk

__all__ = ["Clock", "Interval", "clock_for", "peak_resident_bytes"]


class Interval(NamedTuple):
    """The time from the event before to the event `name`."""

    name: str
    at: MicrobatchChunk | None
    start_s: float
    """Since the first event."""
    time_s: float


class Clock(Protocol):
    """Something that is given events and tells the times between them."""

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Set an event now."""

    def intervals(self) -> list[Interval]:
        """The times between the events so far, in seconds; waits for the device."""


class _HostClock:
    """For devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._events: list[tuple[str, MicrobatchChunk | None, float]] = []

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        self._events.append((name, at, time.perf_counter()))

    def intervals(self) -> list[Interval]:
        first = self._events[0][-1]
        pairs = zip(self._events, self._events[1:], strict=False)
        return [Interval(name, at, before - first, after - before) for (*_, before), (name, at, after) in pairs]


class _CudaClock:
    """For CUDA: events on the current stream, read after it is done."""

    def __init__(self) -> None:
        self._events: list[tuple[str, MicrobatchChunk | None, torch.cuda.Event]] = []

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append((name, at, event))

    def intervals(self) -> list[Interval]:
        torch.cuda.synchronize()
        first = self._events[0][-1]
        pairs = zip(self._events, self._events[1:], strict=False)
        return [
            Interval(name, at, first.elapsed_time(before) / 1000, before.elapsed_time(after) / 1000)
            for (*_, before), (name, at, after) in pairs
        ]


def clock_for(device: torch.device) -> Clock:
    """A clock that measures what the device does."""
    return _CudaClock() if device.type == "cuda" else _HostClock()


def peak_resident_bytes() -> int:
    """The most host memory that this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
