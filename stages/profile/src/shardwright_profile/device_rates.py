"""How fast the devices compute and copy, all at once (only the ranks of a sweep import this)."""

from collections.abc import Callable

import numpy as np
import torch

from shardwright_profile.timing import WARM_UP_REPEATS, timed_repeats

__all__ = ["device_rates"]

_REPEATS = 9


def device_rates(device: torch.device) -> dict[str, float]:
    """Median rates of the slowest rank's device while every rank works, by name with the SI unit in it.

    `matrix_flops_per_s`: product of two square float32 matrices (a multiply-add counts 2); on CUDA also
    `matrix_bfloat16_flops_per_s`. `memory_bytes_per_s`: a copy, which reads and writes each byte once.
    """
    on_gpu = device.type == "cuda"
    rates = {"matrix_flops_per_s": _matrix_flops_per_s(8192 if on_gpu else 1024, torch.float32, device)}
    if on_gpu:
        rates["matrix_bfloat16_flops_per_s"] = _matrix_flops_per_s(8192, torch.bfloat16, device)
    source = torch.zeros(2**30 if on_gpu else 2**26, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    rates["memory_bytes_per_s"] = 2 * source.numel() / _median_s(lambda: _drop(target.copy_(source)), device)
    return rates


def _matrix_flops_per_s(side: int, dtype: torch.dtype, device: torch.device) -> float:
    factor = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(factor)
    return 2 * side**3 / _median_s(lambda: _drop(torch.mm(factor, factor, out=product)), device)


def _median_s(call: Callable[[], None], device: torch.device) -> float:
    timed_repeats(call, WARM_UP_REPEATS, device)
    return float(np.median(timed_repeats(call, _REPEATS, device)))


def _drop(_: torch.Tensor) -> None:
    """Drop the result: only the time it took is of interest."""
