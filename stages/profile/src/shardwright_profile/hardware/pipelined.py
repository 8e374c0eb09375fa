"""The time of a layer by itself and in a pipeline between two halves of the ranks (only imported by a sweep's ranks).

Some runtimes and networks make a layer's collectives several times as slow while messages go between nodes. A layer
here is a product of two matrices and an all_reduce among neighbours inside a half, which stand for tensor parallelism.
"""

from collections.abc import Callable
from functools import partial
from math import gcd

import numpy as np
import torch
import torch.distributed as dist

from shardwright.launch.accelerator import CPU, GPU
from shardwright.plan.sweep_plan import Groups
from shardwright.types import Cluster
from shardwright_profile.hardware.measurements import p2p_call, random_numbers
from shardwright_profile.hardware.overlap import overlap_clock
from shardwright_profile.hardware.profile import RateEntry
from shardwright_profile.hardware.session import WARM_UP_REPEATS, Session, Task
from shardwright_profile.hardware.statistics import LAYERS_ALONE, LAYERS_IN_PIPELINE

_SIDES = {CPU: 256, GPU: 2048}
_MESSAGE_BYTES = 2**20
_LAYERS, _MICROBATCHES, _REPEATS = 4, 3, 9


def pipeline_tasks(session: Session) -> list[Task]:
    """The task that times layers by themselves and in a pipeline; none on one device, which has no second stage."""
    if dist.get_world_size() == 1:
        return []
    keys = [("rate", name) for name in (LAYERS_ALONE, LAYERS_IN_PIPELINE)]
    return [Task("layers", keys, partial(_entries, session))]


def _entries(session: Session, _: float) -> list[RateEntry]:
    """The layers per second of every rank, by themselves and in the pipeline, measured alternately: medians."""
    stopwatch = session.stopwatch
    stopwatch.doing = "timing layers alone and in a pipeline"
    half, layer = dist.get_world_size() // 2, _layer(session)
    pairs = tuple((rank, rank + half) for rank in range(half))
    exchange = p2p_call(pairs, _MESSAGE_BYTES, session.process_groups.pair(pairs), stopwatch.device)
    clock, receives = overlap_clock(stopwatch.device), dist.get_rank() >= half

    def step_s(pipelined: bool) -> float:
        """The seconds of the layers in a step, without messages."""
        stopwatch.align()
        time_s = 0.0
        for _ in range(_MICROBATCHES):
            if pipelined and receives:
                exchange()
            time_s += clock(None, layer, _LAYERS)[0]
            if pipelined and not receives:
                exchange()
        return time_s

    rounds = [(step_s(False), step_s(True)) for _ in range(WARM_UP_REPEATS + _REPEATS)][WARM_UP_REPEATS:]
    mine = torch.tensor(np.median(rounds, axis=0), dtype=torch.float64)
    per_s = _LAYERS * _MICROBATCHES / stopwatch.gathered(mine)
    return [
        RateEntry(name=name, values=tuple(per_s[:, column].tolist()))
        for column, name in enumerate((LAYERS_ALONE, LAYERS_IN_PIPELINE))
    ]


def _layer(session: Session) -> Callable[[], None]:
    """Return a function that runs this rank's part of a layer."""
    device, groups = session.stopwatch.device, _groups(session.identity.cluster)
    group = session.process_groups.mine(groups) if groups else None
    side = _SIDES[device.type]
    factor = random_numbers(side, side, dtype=torch.float32, device=device)
    numbers = torch.zeros(_MESSAGE_BYTES // 4, device=device)  # sums of zeros stay zeros
    product = torch.empty_like(factor)

    def layer() -> None:
        torch.mm(factor, factor, out=product)
        if group is not None:
            dist.all_reduce(numbers, group=group)

    return layer


def _groups(cluster: Cluster) -> Groups:
    """The largest equal groups of neighbours, each inside one node and one half; none if a group has one rank."""
    half = cluster.num_devices // 2
    size = gcd(half, *(cluster.node_types[group.node_type].devices_per_node for group in cluster.nodes))
    return tuple(tuple(range(start, start + size)) for start in range(0, 2 * half, size)) if size > 1 else ()
