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

from shardwright_train.measurement.memory_account import Change, Counters, Holdings, MemoryMark
from shardwright_train.measurement.record import Turn

__all__ = ["MemoryRecord", "record_memory", "sizes_by_address"]

_MARK = "shardwright.mark."


@dataclass
class MemoryRecord:
    """Filled with the allocations between its marks when the recording ends."""

    device: torch.device
    holdings: Callable[[], Holdings]
    """Tells at each mark what tensors are known to hold."""
    items: list[Change | MemoryMark] = field(default_factory=list)
    _marks: list[MemoryMark] = field(default_factory=list)

    def mark(self, name: str, turn: Turn | None = None) -> None:
        """Set a mark now."""
        counters = None
        if self.device.type == "cuda":
            counters = Counters(torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
        with record_function(f"{_MARK}{len(self._marks)}"):
            self._marks.append(MemoryMark(name, turn, self.holdings(), counters))

    def fill(self, roots: Iterable[_ProfilerEvent]) -> None:
        """Put marks and the device's allocations in the order in which they came."""
        for event in sorted(_all_events(roots), key=lambda event: event.start_time_ns):
            kind, details = event.typed
            if kind == _EventType.Allocation:
                assert isinstance(details, _ExtraFields_Allocation)
                if details.device.type == self.device.type:
                    self.items.append(Change(details.ptr, details.alloc_size))
            elif event.name.startswith(_MARK):
                self.items.append(self._marks[int(event.name.removeprefix(_MARK))])


@contextmanager
def record_memory(device: torch.device, holdings: Callable[[], Holdings]) -> Iterator[MemoryRecord]:
    """Record what a device's allocator gives and takes back in this thread, and the marks that are set meanwhile.

    PyTorch's profiler sees every single allocation. That is the only way on CPU, whose allocator counts nothing; CUDA's
    own counts go with the marks.
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
