"""Clocks for a message and a computation that run at once (only the ranks of a sweep import this)."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch
import torch.distributed as dist

__all__ = ["Both", "Start", "both_clock"]

Start = Callable[[], dist.Work | None]
"""Starts a message and returns what it goes on behind; None where this rank has no part in it."""

Both = Callable[[Start | None, Callable[[], None], int], tuple[float, float]]
"""Starts a message, if any, computes so many times meanwhile, and returns the seconds of computing and of the message.

The message counts from before it is started, the computation from after, as a training step has them.
"""


def both_clock(device: torch.device) -> Both:
    """The clock of a device."""
    return _CudaClock(device) if device.type == "cuda" else _CpuClock()


class _CpuClock:
    """A thread waits for the message: not all of gloo's work says itself when it is done."""

    def __init__(self) -> None:
        self._waiter = ThreadPoolExecutor(max_workers=1)

    def __call__(self, start: Start | None, compute: Callable[[], None], times: int) -> tuple[float, float]:
        started = perf_counter()
        work = start() if start is not None else None
        arrival = self._waiter.submit(_arrived_at, work) if work is not None else None
        computing = perf_counter()
        for _ in range(times):
            compute()
        compute_s = perf_counter() - computing
        return compute_s, arrival.result() - started if arrival is not None else 0.0


def _arrived_at(work: dist.Work) -> float:
    work.wait()
    return perf_counter()


class _CudaClock:
    """Events on the device; the message has a stream of its own, and a third one waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting = torch.cuda.Stream(device)

    def __call__(self, start: Start | None, compute: Callable[[], None], times: int) -> tuple[float, float]:
        started, computing, computed, arrived = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        started.record()
        work = start() if start is not None else None
        computing.record()
        for _ in range(times):
            compute()
        computed.record()
        with torch.cuda.stream(self._waiting):
            self._waiting.wait_event(started)
            if work is not None:
                work.wait()
            arrived.record()
        torch.cuda.synchronize(self._device)
        message_s = started.elapsed_time(arrived) / 1e3 if work is not None else 0.0
        return computing.elapsed_time(computed) / 1e3, message_s
