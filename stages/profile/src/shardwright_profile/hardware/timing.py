"""Timing what several ranks do together (imports torch: only the ranks of a sweep import this)."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright_profile.hardware.statistics import LEAST_REPEATS, more_repeats, settled

__all__ = ["WARM_UP_REPEATS", "agreed", "aligned", "gathered", "rank_times", "repeated", "synchronise", "timed_repeats"]

WARM_UP_REPEATS = 3


def rank_times(call: Callable[[], object], repeats: int, device: torch.device) -> NDArray[Any]:
    """Seconds of each repeat of `call` on each rank: [ranks, repeats] float64, the same on every rank.

    Every rank of the world calls this. A barrier aligns the ranks before each repeat; on CUDA the device is
    synchronised on either side.
    """
    times_s = torch.zeros(repeats, dtype=torch.float64)
    for i in range(repeats):
        aligned(device)
        start = perf_counter()
        call()
        synchronise(device)
        times_s[i] = perf_counter() - start
    return gathered(times_s, device)


def timed_repeats(call: Callable[[], object], repeats: int, device: torch.device) -> NDArray[Any]:
    """Seconds of each repeat of `call` on the slowest rank: [repeats] float64, the same on every rank."""
    return np.asarray(rank_times(call, repeats, device).max(axis=0))


def repeated(measure: Callable[[int], NDArray[Any]], share_s: float, most: int, device: torch.device) -> NDArray[Any]:
    """Repeat in rounds until every series' median is settled, the share is spent, or there are `most` repeats.

    `measure` makes a number of repeats and returns their seconds, the same on every rank: [series, repeats] float64.
    The first round has 6 repeats, or `most` if that is less, however short the share is.
    """
    started = perf_counter()
    times_s = measure(min(LEAST_REPEATS, most))
    one_s = agreed(perf_counter() - started, device) / times_s.shape[1]
    while not all(map(settled, times_s)):
        left_s = share_s - agreed(perf_counter() - started, device)
        more = more_repeats(times_s.shape[1], most, left_s, one_s)
        if not more:
            break
        times_s = np.concatenate([times_s, measure(more)], axis=1)
    return times_s


def agreed(value: float, device: torch.device) -> float:
    """The largest of the ranks' values, so that all ranks decide alike."""
    shared = torch.tensor([value], dtype=torch.float64).to(device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared.cpu()[0])


def gathered(mine: torch.Tensor, device: torch.device) -> NDArray[Any]:
    """Every rank's numbers, stacked in rank order: [ranks, *mine.shape], the same on every rank."""
    parts = [torch.zeros_like(mine, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.to(device))
    return np.stack([part.cpu().numpy() for part in parts])


def aligned(device: torch.device) -> None:
    """Wait until every rank is here with nothing left to do."""
    dist.barrier()
    synchronise(device)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
