"""Compute and copy rates of all devices at once (only the ranks of a sweep import this)."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from shardwright_profile.hardware.profile import RateEntry
from shardwright_profile.hardware.session import Session, Task
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, Stopwatch

_REPEATS = 9


def rate_tasks(session: Session) -> list[Task]:
    """Return tasks that measure each device's rates while all ranks work: medians, named with their SI units.

    `matrix_flops_per_s`: product of two square float32 matrices (a multiply-add counts 2); on CUDA also
    `matrix_bfloat16_flops_per_s`. `memory_bytes_per_s`: a copy, which reads and writes each byte once.
    """
    on_gpu = session.device.type == "cuda"
    side, copied_bytes = (8192, 2**30) if on_gpu else (1024, 2**26)
    measured: dict[str, Callable[[Stopwatch], tuple[float, ...]]] = {
        "matrix_flops_per_s": lambda stopwatch: _matrix_flops_per_s(side, torch.float32, stopwatch),
        "memory_bytes_per_s": lambda stopwatch: _memory_bytes_per_s(copied_bytes, stopwatch),
    }
    if on_gpu:
        measured["matrix_bfloat16_flops_per_s"] = lambda stopwatch: _matrix_flops_per_s(side, torch.bfloat16, stopwatch)

    def entry(name: str, _: float) -> list[RateEntry]:
        session.stopwatch.doing = f"measuring {name}"
        return [RateEntry(name=name, values=measured[name](session.stopwatch))]

    return [Task("devices", [("rate", name)], partial(entry, name)) for name in sorted(measured)]


def _matrix_flops_per_s(side: int, dtype: torch.dtype, stopwatch: Stopwatch) -> tuple[float, ...]:
    factor = torch.ones(side, side, dtype=dtype, device=stopwatch.device)
    product = torch.empty_like(factor)
    return _rates(2 * side**3, lambda: torch.mm(factor, factor, out=product), stopwatch)


def _memory_bytes_per_s(size: int, stopwatch: Stopwatch) -> tuple[float, ...]:
    source = torch.zeros(size, dtype=torch.uint8, device=stopwatch.device)
    target = torch.zeros_like(source)
    return _rates(2 * size, lambda: target.copy_(source), stopwatch)


def _rates(amount: int, call: Callable[[], object], stopwatch: Stopwatch) -> tuple[float, ...]:
    """Return an amount over the median time of each rank, in rank order."""
    stopwatch.rank_times_s(call, WARM_UP_REPEATS)
    return tuple(amount / time_s for time_s in np.median(stopwatch.rank_times_s(call, _REPEATS), axis=1).tolist())
