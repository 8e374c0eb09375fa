"""Marks set on the way through a step, and the time or memory between them."""

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import Work
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Clock", "Interval", "MemoryInterval", "Recording", "clock_for", "peak_resident_bytes", "record_memory"]

_MARK = "shardwright.mark."


class Interval(NamedTuple):
    """The time from the mark before to the mark `name`."""

    name: str
    time_s: float


class MemoryInterval(NamedTuple):
    """Tensor memory between two marks, in bytes beyond what stood when the recording began."""

    name: str
    before: int
    after: int
    peak: int


class Clock(Protocol):
    """Something that is given marks and tells the times between them."""

    def mark(self, name: str) -> None:
        """Set a mark now."""

    def intervals(self) -> list[Interval]:
        """The times between the marks so far, in seconds; waits for the device."""


class _HostClock:
    """For devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        self._marks.append((name, time.perf_counter()))

    def intervals(self) -> list[Interval]:
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [Interval(name, after - before) for (_, before), (name, after) in pairs]


class _CudaClock:
    """For CUDA: events on the current stream, read after it is done."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((name, event))

    def intervals(self) -> list[Interval]:
        torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [Interval(name, before.elapsed_time(after) / 1000) for (_, before), (name, after) in pairs]


def clock_for(device: torch.device) -> Clock:
    """A clock that measures what the device does."""
    return _CudaClock() if device.type == "cuda" else _HostClock()


def peak_resident_bytes() -> int:
    """The most host memory that this process has had resident so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


@dataclass
class Recording:
    """Filled when the recording ends."""

    mark: Callable[[str], None]
    intervals: list[MemoryInterval]


@contextmanager
def record_memory(device: torch.device) -> Iterator[Recording]:
    """Record tensor memory between marks: the allocator's counters on CUDA, every recorded allocation on CPU."""
    with _record_on_cuda(device) if device.type == "cuda" else _record_on_cpu() as recording:
        yield recording


@contextmanager
def _record_on_cuda(device: torch.device) -> Iterator[Recording]:
    start = torch.cuda.memory_allocated(device)
    state = {"before": 0}
    recording = Recording(lambda _name: None, [])
    torch.cuda.reset_peak_memory_stats(device)

    def mark(name: str) -> None:
        after = torch.cuda.memory_allocated(device) - start
        peak = torch.cuda.max_memory_allocated(device) - start
        recording.intervals.append(MemoryInterval(name, state["before"], after, peak))
        state["before"] = after
        torch.cuda.reset_peak_memory_stats(device)

    recording.mark = mark
    yield recording


@contextmanager
def _record_on_cpu() -> Iterator[Recording]:
    # The CPU allocator has no peak counter; the profiler sees each of its allocations and frees.
    def mark(name: str) -> None:
        with record_function(_MARK + name):
            pass

    recording = Recording(mark, [])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, _CollectivesSettled():  # type: ignore[no-untyped-call]
        yield recording
    events = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith(_MARK)
    ]
    recording.intervals.extend(_intervals_of(sorted(events, key=lambda event: event[0])))


class _CollectivesSettled(TorchDispatchMode):
    """Let gloo's threads let go of a collective's tensors before the caller does.

    The profiler sees what is freed in the calling thread only; a buffer that gloo's thread is the last to hold would
    count as held for ever. Sends and receives are left alone: waiting for a send here could wait for each other.
    """

    _SETTLING_S = 0.002

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("c10d::") and not name.startswith(("c10d::send", "c10d::recv")):
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, torch.ScriptObject):
                    Work.unbox(part).wait()
            time.sleep(self._SETTLING_S)
        return result


def _intervals_of(events: Sequence[tuple[int, str, int]]) -> Iterator[MemoryInterval]:
    held = before = peak = 0
    for _, name, size in events:
        if name == "[memory]":
            held += size
            peak = max(peak, held)
        else:
            yield MemoryInterval(name.removeprefix(_MARK), before, held, peak)
            before = peak = held
