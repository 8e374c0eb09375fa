"""Timing what several ranks do together (imports torch: only the ranks of a sweep import this)."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

__all__ = ["LEAST_REPEATS", "MOST_REPEATS", "WARM_UP_REPEATS", "agreed", "repeats_within", "timed_repeats"]

WARM_UP_REPEATS = 3
LEAST_REPEATS = 5
MOST_REPEATS = 100


def timed_repeats(call: Callable[[], None], repeats: int, device: torch.device) -> NDArray[Any]:
    """Seconds of each repeat of `call` on the slowest rank: [repeats] float64, the same on every rank.

    Every rank of the world calls this. A barrier aligns the ranks before each repeat; on CUDA the device is
    synchronised on either side. The maximum over the ranks is taken once, after all repeats.
    """
    times_s = torch.zeros(repeats, dtype=torch.float64)
    for i in range(repeats):
        dist.barrier()
        _synchronise(device)
        start = perf_counter()
        call()
        _synchronise(device)
        times_s[i] = perf_counter() - start
    return np.asarray(_maximum(times_s, device).numpy())


def agreed(value: float, device: torch.device) -> float:
    """The largest of the ranks' values, so that all ranks decide alike."""
    return float(_maximum(torch.tensor([value], dtype=torch.float64), device)[0])


def repeats_within(share_s: float, one_s: float) -> int:
    """How often something of `one_s` seconds is repeated in `share_s` seconds: 5 to 100 times."""
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(share_s / one_s)))


def _maximum(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    shared = values.to(device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.cpu()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
