"""PyTorch's profile of a step: its tensor memory between events, and its Chrome trace with named passes."""

import gzip
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile, record_function

from shardwright.io import write_bytes
from shardwright.launch.backend import on_accelerator, profiled_activities, synchronize
from shardwright.launch.lock import scratch_folder
from shardwright.types import Plan, SegmentMemory
from shardwright_train.pipeline.runner import MicrobatchChunk, StepHook
from shardwright_train.torch_private import AllocationFields, EventType, ProfilerEvent, TorchDispatchMode

_FORWARD, _BACKWARD = ".forward", ".backward"
_EVENT = "shardwright.event."
_RANKS, _FLOWS = 1 << 20, 1 << 32
"""Strides of the numbers of ranks and of one rank's flows, so that numbers of two ranks never collide."""
_SETTLING_S = 0.002
_THREADS = Path("/proc/self/task")
_GLOO_THREAD = "pt_gloo_runloop"
"""The name, cut to 15 characters, of a thread of gloo that runs collectives."""
_NAMES_OF_PROCESSES = ("process_name", "process_labels", "process_sort_index")


class Event(NamedTuple):
    """A moment of a training step, such as the beginning of a layer's forward pass, by its name (see `StepHook`)."""

    name: str
    at: MicrobatchChunk | None


class Allocation(NamedTuple):
    """An allocation (bytes) or a release (negative bytes) of memory."""

    address: int
    size_bytes: int


class MemoryInterval(NamedTuple):
    """The tensor memory between two events, named after the later one."""

    name: str
    at: MicrobatchChunk | None
    before_bytes: int
    after_bytes: int
    peak_bytes: int


@dataclass
class MemoryRecord:
    """A recording of a step's events; the intervals between them are available when it has ended."""

    device: torch.device
    intervals: list[MemoryInterval] = field(default_factory=list)
    peak_reserved_bytes: int = 0
    """Peak bytes reserved by an accelerator's allocator; 0 on CPU."""
    _events: list[Event] = field(default_factory=list)
    _counted: list[tuple[int, int]] = field(default_factory=list)

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Record an event."""
        if on_accelerator(self.device):
            counts = torch.accelerator
            self._counted.append((counts.memory_allocated(self.device), counts.max_memory_allocated(self.device)))
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, counts.max_memory_reserved(self.device))
            counts.reset_peak_memory_stats(self.device)
        with record_function(f"{_EVENT}{len(self._events)}"):
            self._events.append(Event(name, at))

    def of_counters(self) -> list[MemoryInterval]:
        """Return the intervals by the accelerator's allocator, which counts allocated bytes and their peak."""
        pairs = zip(self._events[1:], pairwise(self._counted), strict=True)
        return [MemoryInterval(*event, before, after, peak) for event, ((before, _), (after, peak)) in pairs]

    def of_profile(self, roots: Iterable[ProfilerEvent], standing_bytes: int) -> list[MemoryInterval]:
        """Return the intervals by this thread's allocations in PyTorch's profile."""
        record: list[Event | Allocation] = []
        for event in sorted(_all_events(roots), key=lambda event: event.start_time_ns):
            kind, details = event.typed
            if kind == EventType.Allocation:
                assert isinstance(details, AllocationFields)
                record.append(Allocation(details.ptr, details.alloc_size))
            elif event.name.startswith(_EVENT):
                record.append(self._events[int(event.name.removeprefix(_EVENT))])
        return list(intervals_of(record, standing_bytes))


@contextmanager
def record_memory(device: torch.device, standing_bytes: int = 0) -> Iterator[MemoryRecord]:
    """Record the tensor memory inside the `with` block; `standing_bytes`: bytes allocated on CPU when it begins.

    On CPU PyTorch's profiler records every single allocation, because the CPU allocator counts nothing.
    """
    record = MemoryRecord(device)
    if on_accelerator(device):
        yield record
        record.intervals = record.of_counters()
        return
    settled = _CollectivesSettled()  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, settled:
        yield record
    record.intervals = record.of_profile(profiler.profiler.kineto_results.experimental_event_tree(), standing_bytes)


def intervals_of(record: Sequence[Event | Allocation], standing_bytes: int) -> Iterator[MemoryInterval]:
    """Yield the memory between the events of a record that begins with an event.

    Memory whose allocation was not recorded counts in `standing_bytes`, even after it is freed.
    """
    live: dict[int, int] = {}
    resident = before = peak = standing_bytes
    for number, item in enumerate(record):
        if isinstance(item, Event):
            if number:
                yield MemoryInterval(item.name, item.at, before, resident, peak)
            before = peak = resident
            continue
        # An earlier allocation at this address has ended, even if its release was not recorded.
        resident -= live.pop(item.address, 0)
        if item.size_bytes > 0:
            live[item.address] = item.size_bytes
            resident += item.size_bytes
        peak = max(peak, resident)


def segments_of_memory(intervals: Sequence[MemoryInterval]) -> tuple[SegmentMemory, ...]:
    """Return the memory saved by the second micro-batch (or the only one), and its workspace, in each segment.

    The first microbatch also gathers parameters and creates gradients, which are counted as states. Saved memory is
    summed over the chunks of a pipeline stage; of the workspaces the largest counts.
    """
    second = min(1, max(i.at[0] for i in intervals if i.at is not None))
    mine = [i for i in intervals if i.at is not None and i.at[0] == second]
    segments = []
    for name in dict.fromkeys(i.name.removesuffix(_FORWARD) for i in mine if i.name.endswith(_FORWARD)):
        forward = [i for i in mine if i.name == name + _FORWARD]
        backward = [i for i in mine if i.name == name + _BACKWARD]
        segments.append(
            SegmentMemory(
                name=name,
                activation_bytes=sum(max(0, i.after_bytes - i.before_bytes) for i in forward),
                forward_workspace_bytes=max(i.peak_bytes - max(i.before_bytes, i.after_bytes) for i in forward),
                backward_workspace_bytes=max(i.peak_bytes - i.before_bytes for i in backward),
            )
        )
    return tuple(segments)


def _all_events(events: Iterable[ProfilerEvent]) -> Iterator[ProfilerEvent]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


class _CollectivesSettled(TorchDispatchMode):
    """A mode in which gloo's threads release a collective's tensors before the caller does.

    The profiler sees only what is freed in the calling thread; a buffer that a thread of gloo is the last to hold would
    count as resident forever. Sends and receives are not waited for: two ranks could wait for each other.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("c10d::") and not name.startswith(("c10d::send", "c10d::recv")):
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, torch.ScriptObject):
                    Work.unbox(part).wait()
            settle(_THREADS)
        return result


def settle(threads: Path) -> None:
    """Wait until gloo's threads have released the tensors of the collectives that they have done.

    `threads`: the folder of this process's threads in /proc (proc(5)). A busy machine may take long to run a thread
    that is ready, so no fixed time is enough. The first pause is for a thread that has not begun to release them.
    """
    time.sleep(_SETTLING_S)
    while any(map(_is_at_work, threads.iterdir())):
        time.sleep(_SETTLING_S)


def _is_at_work(thread: Path) -> bool:
    """Return whether a thread belongs to gloo, and is running or ready to run."""
    try:
        if (thread / "comm").read_text().strip() != _GLOO_THREAD:
            return False
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
    except FileNotFoundError:  # it has ended
        return False


def trace_file(folder: Path, plan: Plan, rank: int) -> Path:
    """Return the file of a rank's trace of a plan; plans with equal names are distinguished by their hash."""
    name = re.sub(r"[^\w.-]+", "-", plan.name, flags=re.ASCII)[:80]
    return folder / f"{name}-{plan.sha256[:8]}.rank{rank}.json.gz"


@contextmanager
def traced(device: torch.device, rank: int, file: Path) -> Iterator[StepHook]:
    """Profile a step that calls the yielded hook, and write its trace.

    Each pass, and the wait before it, is a separate span, such as `forward microbatch 0 chunk 0`. The processes in the
    trace are named by rank, and their numbers differ from those in other ranks' traces, so that traces can be merged.
    """
    spans = _Spans()
    with profile(activities=profiled_activities(device)) as profiler:
        yield spans.hook
        synchronize(device)
    with scratch_folder() as scratch:
        raw = scratch / "trace.json"
        profiler.export_chrome_trace(str(raw))
        trace = json.loads(raw.read_bytes())
    # No time in the header: the same trace gives the same bytes.
    write_bytes(file, gzip.compress(json.dumps(_of_rank(trace, rank)).encode(), compresslevel=4, mtime=0))


class _Spans:
    """A hook that opens and closes named spans at the events of a step."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        kind, _, point = name.partition(".")
        which = "" if at is None else f" microbatch {at[0]} chunk {at[1]}"
        match point or name:
            case "begin":
                self._change(f"wait for {kind}{which}")
            case "wait":
                self._change(f"{kind}{which}")
            case "end":
                self._change("between passes")
            case "start":
                self._change("step")
            case "reduced":
                self._change("optimizer")
            case "optimizer":
                self._change(None)

    def _change(self, name: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = None if name is None else record_function(name)
        if self._open is not None:
            self._open.__enter__()


def _of_rank(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the trace with processes and flows numbered differently on each rank, and processes named by rank.

    The rank's process on the host gets the rank as its number. The profiler's own spans, whose process is not a number,
    are left out.
    """
    host = os.getpid()
    happened = {e["pid"] for e in trace["traceEvents"] if e["ph"] != "M" and isinstance(e.get("pid"), int)}
    numbers = {
        pid: rank + _RANKS * number for number, pid in enumerate(sorted(happened, key=lambda pid: (pid != host, pid)))
    }
    events = []
    for event in trace["traceEvents"]:
        if event.get("pid") not in numbers or event["name"] in _NAMES_OF_PROCESSES:
            continue
        apart = {"pid": numbers[event["pid"]]}
        if "id" in event:
            apart["id"] = rank * _FLOWS + event["id"]
        events.append(event | apart)
    for pid, number in numbers.items():
        name = f"rank {rank}" if pid == host else f"rank {rank}, device {pid}"
        order = rank * len(numbers) + number // _RANKS
        for kind, arguments in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": order})):
            events.append({"name": kind, "ph": "M", "pid": number, "tid": 0, "args": arguments})
    return trace | {"traceEvents": events, "traceName": f"rank {rank}"}
