"""How fast the devices compute and copy, all at once (only the ranks of a sweep import this)."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from shardwright_profile.hardware.entries import RateEntry
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, rank_times

__all__ = ["rate_entries"]

_REPEATS = 9


def rate_entries(session: Session) -> Iterator[RateEntry]:
    """Rates of every rank's device while every rank works, of the median repeat, by name with the SI unit in it.

    `matrix_flops_per_s`: product of two square float32 matrices (a multiply-add counts 2); on CUDA also
    `matrix_bfloat16_flops_per_s`. `memory_bytes_per_s`: a copy, which reads and writes each byte once.
    """
    on_gpu = session.device.type == "cuda"
    measured: dict[str, Callable[[torch.device], tuple[float, ...]]] = {
        "matrix_flops_per_s": lambda device: _matrix_flops_per_s(8192 if on_gpu else 1024, torch.float32, device),
        "memory_bytes_per_s": lambda device: _memory_bytes_per_s(2**30 if on_gpu else 2**26, device),
    }
    if on_gpu:
        measured["matrix_bfloat16_flops_per_s"] = lambda device: _matrix_flops_per_s(8192, torch.bfloat16, device)
    for name, measure in sorted(measured.items()):
        kept = session.journal.find("rate", name)
        yield kept if isinstance(kept, RateEntry) else RateEntry(name=name, values=measure(session.device))


def _matrix_flops_per_s(side: int, dtype: torch.dtype, device: torch.device) -> tuple[float, ...]:
    factor = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(factor)
    return tuple(2 * side**3 / time_s for time_s in _medians_s(lambda: torch.mm(factor, factor, out=product), device))


def _memory_bytes_per_s(size: int, device: torch.device) -> tuple[float, ...]:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return tuple(2 * size / time_s for time_s in _medians_s(lambda: target.copy_(source), device))


def _medians_s(call: Callable[[], object], device: torch.device) -> list[float]:
    """The median of each rank, in rank order."""
    rank_times(call, WARM_UP_REPEATS, device)
    return [float(median) for median in np.median(rank_times(call, _REPEATS, device), axis=1)]
