"""A short workload that never changes: how long it takes says how fast the device is at that moment."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright_train.measurement.timing import clock_for


class _Workload(NamedTuple):
    """Products of square matrices, then sums of vectors that no cache holds: what limits layers and optimizers."""

    dtype: torch.dtype
    side: int
    products: int
    numel: int
    sums: int


_WORKLOADS = {
    "cpu": _Workload(torch.float32, side=256, products=40, numel=1 << 20, sums=20),
    "cuda": _Workload(torch.float16, side=4096, products=40, numel=1 << 24, sums=100),
}
"""About 15 ms on a processor core and on an H100. A profile's times hold beside those of the very same workload."""

_REPEATS = 4
"""As long as a step of a small model: what takes a core away for 10 ms makes 15 ms twice as long, a step hardly."""


def reference_time_s(device: torch.device) -> float:
    """Seconds of the workload on this rank's device, mean of some in a row, while all ranks do theirs; collective.

    Between steps of training its tensors find room where activations were.
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
