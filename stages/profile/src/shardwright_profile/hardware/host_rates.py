"""Rates between devices and their host (only the ranks of a sweep import this).

On a CPU there are none: a device's memory is the host's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from shardwright.launch.backend import on_accelerator
from shardwright.types import Cluster
from shardwright.types.hardware_profile import HOST_ALONE, HOST_COPIES, HOST_UPDATES
from shardwright_profile.hardware.session import WARM_UP_REPEATS, Stopwatch

Measure = Callable[[Stopwatch], tuple[float, ...]]
_REPEATS = 9


class _Sizes(NamedTuple):
    """Sizes of what is copied and updated."""

    copied_bytes: int
    updated: int
    """Float32 parameters."""


_SIZES = _Sizes(2**28, 2**24)


def host_measurements(cluster: Cluster, sizes: _Sizes = _SIZES) -> dict[str, Measure]:
    """Return functions that measure each rank's rates by name: medians, in rank order.

    Copies from and to pinned memory, by all ranks at once and by each while the other ranks of its node wait; and
    parameters that AdamW updates on the host, by all ranks at once.
    """
    places = _places(cluster)
    measured: dict[str, Measure] = {HOST_UPDATES: partial(_updated_per_s, sizes.updated)}
    for together, alone, inwards in zip(HOST_COPIES, HOST_ALONE, (True, False), strict=True):
        measured[together] = partial(_copied_per_s, sizes.copied_bytes, inwards, [0] * len(places))
        measured[alone] = partial(_copied_per_s, sizes.copied_bytes, inwards, places)
    return measured


def _places(cluster: Cluster) -> list[int]:
    """Return the number of each rank on its node."""
    nodes = cluster.node_of_rank
    return [rank - nodes.index(node) for rank, node in enumerate(nodes)]


def _copied_per_s(size: int, inwards: bool, turns: Sequence[int], stopwatch: Stopwatch) -> tuple[float, ...]:
    """Return the rates of copies; ranks with the same number in `turns` copy at once."""
    device, mine = stopwatch.device, turns[dist.get_rank()]
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=on_accelerator(device))
    source, target = (there, here) if inwards else (here, there)
    rates = [0.0] * len(turns)
    for turn in sorted(set(turns)):

        def copy(turn: int = turn) -> None:
            if turn == mine:
                target.copy_(source, non_blocking=True)

        per_rank = _rates(size, copy, stopwatch)
        rates = [new if each == turn else old for each, new, old in zip(turns, per_rank, rates, strict=True)]
    return tuple(rates)


def _updated_per_s(count: int, stopwatch: Stopwatch) -> tuple[float, ...]:
    parameter = nn.Parameter(torch.zeros(count))
    parameter.grad = torch.zeros(count)
    return _rates(count, torch.optim.AdamW([parameter], fused=True).step, stopwatch)


def _rates(amount: int, call: Callable[[], object], stopwatch: Stopwatch) -> tuple[float, ...]:
    stopwatch.rank_times_s(call, WARM_UP_REPEATS)
    return tuple((amount / np.median(stopwatch.rank_times_s(call, _REPEATS), axis=1)).tolist())
