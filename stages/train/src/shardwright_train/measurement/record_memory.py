"""A record of every allocation of tensor memory while something runs."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch._C._profiler import _EventType, _ExtraFields_Allocation, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright_train.measurement.memory_account import Change, Counters, Holdings, MemoryEvent
from shardwright_train.pipeline.runner import MicrobatchChunk

__all__ = ["MemoryRecord", "record_memory", "sizes_by_address"]

_EVENT = "shardwright.hook."


@dataclass
class MemoryRecord:
    """Filled with the allocations between its events when the recording ends."""

    device: torch.device
    holdings: Callable[[], Holdings]
    """Tells at each event what tensors are known to hold."""
    items: list[Change | MemoryEvent] = field(default_factory=list)
    _events: list[MemoryEvent] = field(default_factory=list)

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Set an event now."""
        counters = None
        if self.device.type == "cuda":
            counters = Counters(torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        with record_function(f"{_EVENT}{len(self._events)}"):
            self._events.append(MemoryEvent(name, at, self.holdings(), counters))

    def fill(self, roots: Iterable[_ProfilerEvent]) -> None:
        """Put events and the device's allocations in the order in which they came."""
        for event in sorted(_all_events(roots), key=lambda event: event.start_time_ns):
            kind, details = event.typed
            if kind == _EventType.Allocation:
                assert isinstance(details, _ExtraFields_Allocation)
                if details.device.type == self.device.type:
                    self.items.append(Change(details.ptr, details.alloc_size))
            elif event.name.startswith(_EVENT):
                self.items.append(self._events[int(event.name.removeprefix(_EVENT))])


@contextmanager
def record_memory(device: torch.device, holdings: Callable[[], Holdings]) -> Iterator[MemoryRecord]:
    """Record what a device's allocator gives and takes back in this thread, and the events that are set meanwhile.

    PyTorch's profiler sees every single allocation. That is the only way on CPU, whose allocator counts nothing; CUDA's
    own counts go with the events.
    """
    record = MemoryRecord(device, holdings)
    settled = _CollectivesSettled() if device.type == "cpu" else nullcontext()  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, settled:
        yield record
    record.fill(profiler.profiler.kineto_results.experimental_event_tree())


def sizes_by_address(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory that tensors hold, by its address: views of the same memory count once, empty ones not."""
    storages = (x.untyped_storage() for x in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _all_events(events: Iterable[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


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
