"""A short constant workload whose duration shows how fast the device is at that moment."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright_train.measurement.timing import clock_for


class _Workload(NamedTuple):
    """A workload like layers and optimizers: products of square matrices, then sums of vectors larger than caches."""

    dtype: torch.dtype
    side: int
    products: int
    numel: int
    sums: int


_WORKLOADS = {
    "cpu": _Workload(torch.float32, side=256, products=40, numel=1 << 20, sums=20),
    "cuda": _Workload(torch.float16, side=4096, products=40, numel=1 << 24, sums=100),
}
"""Workload by device type, about 15 ms on a processor core and on an H100; profiles compare with the same one only."""

_REPEATS = 4
"""Number of repeats, as long as a step of a small model: an interruption of 10 ms doubles 15 ms, but hardly a step."""


def reference_time_s(device: torch.device) -> float:
    """Return the seconds of the workload on this rank's device, mean of several, while all ranks run it; collective.

    Between training steps its tensors use memory that activations have freed.
    """
    work = _WORKLOADS[device.type]
    factor = torch.ones(work.side, work.side, dtype=work.dtype, device=device)
    product = torch.empty_like(factor)
    terms, total = torch.ones(work.numel, device=device), torch.zeros(work.numel, device=device)
    dist.barrier()
    clock = clock_for(device)
    clock.hook("start")
    for _ in range(_REPEATS):
        for _ in range(work.products):
            torch.mm(factor, factor, out=product)
        for _ in range(work.sums):
            torch.add(total, terms, out=total)
    clock.hook("reference")
    return sum(interval.time_s for interval in clock.intervals()) / _REPEATS
