"""Slowdowns of collectives, computations and pipelines that run at the same time; only measuring ranks import this.

The collectives are those of data parallelism, and sends in both directions at once as in ring attention. No test runs
the clock for CUDA streams: tests have only CPU ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from math import gcd
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright.launch.accelerator import CPU, GPU
from shardwright.launch.backend import on_accelerator
from shardwright.plan.sweep_plan import COMPUTE_RATIOS, CollectiveKind, Groups
from shardwright.types import Cluster
from shardwright.types.hardware_profile import Collective
from shardwright_profile.hardware.measurements import Exchange, collective_call, exchange_call, p2p_call, random_numbers
from shardwright_profile.hardware.profile import (
    LAYERS_ALONE,
    LAYERS_IN_PIPELINE,
    OverlapEntry,
    PointEntry,
    RateEntry,
    overlap_key,
)
from shardwright_profile.hardware.session import WARM_UP_REPEATS, Session, Task

CASE_MESSAGES = sum(ratio + 1 + max(1.0, ratio) for ratio in COMPUTE_RATIOS)
"""Time of one repeat of all ratios if nothing slows down, as a multiple of the collective's time.

Each side is timed by itself, and then both at once.
"""

_SIDES = {CPU: (32, 64, 128, 256, 512), GPU: (256, 512, 1024, 2048, 4096)}
_DTYPES = {CPU: torch.float32, GPU: torch.bfloat16}
_PRODUCTS_IN_MESSAGE = 8
_TRIES = 5


Start = Callable[[], dist.Work | Exchange | None]
"""A function that starts a collective and returns its work handle; it returns None if this rank does not take part."""

Clock = Callable[[Start | None, Callable[[], None], int], tuple[float, float]]
"""A function that starts a collective, if any, computes several times, and returns two durations in seconds.

The first is the computation's, counted from when the collective has been started; the second is the collective's,
counted from before it is started. A training step has them in this order.
"""


class _Computation(NamedTuple):
    """A matrix product of a square matrix with itself, and the seconds that one such product takes."""

    factor: torch.Tensor
    product: torch.Tensor
    time_s: float

    def once(self) -> None:
        torch.mm(self.factor, self.factor, out=self.product)


_Turn = tuple[Start | None, _Computation, int]
"""A measurement that alternates with others: a collective or None, a computation, and its number of matrix products."""


def overlap_tasks(session: Session, kinds: Sequence[CollectiveKind]) -> list[Iterator[Task]]:
    """Return the tasks that time each kind of collective while overlapped with computations of several lengths.

    Each size up to 1 MiB is timed, and larger ones while a kind's share of the time lasts. Sizes at which the kind was
    not timed by itself are left out.
    """
    timer = _Timer(session)
    return [_overlaps(session, timer, kind) for kind in kinds]


def _overlaps(session: Session, timer: "_Timer", kind: CollectiveKind) -> Iterator[Task]:
    always = session.identity.sizes.always(kind.key.group_size)
    for size in session.identity.sizes.overlapped(kind.key.group_size):
        point = session.journal.find("point", kind.key, size)
        if not isinstance(point, PointEntry):
            return
        subject = f"overlapped with a computation, {kind}"
        keys = [overlap_key(kind.key, size, ratio) for ratio in COMPUTE_RATIOS]
        needs_s = CASE_MESSAGES * (WARM_UP_REPEATS + session.min_repeats) * float(np.median(point.times_s))
        # Half of what is left: the sizes that follow take more.
        yield Task(subject, keys, partial(timer.entries, kind, point), 1 / 2, None if size in always else needs_s)


def _start_call(
    kind: CollectiveKind, message_bytes: int, group: dist.ProcessGroup | None, device: torch.device
) -> Start:
    """Return a function that starts a collective; for p2p, a send in each direction, as in a step of a ring."""
    if kind.key.collective is Collective.P2P:
        return exchange_call(kind.groups, message_bytes, group, device)
    return collective_call(kind, message_bytes, group, device, wait=False)


class _Timer:
    """A timer of collectives overlapped with computations."""

    def __init__(self, session: Session) -> None:
        self._session, self._clock = session, overlap_clock(session.stopwatch.device)

    def entries(self, kind: CollectiveKind, point: PointEntry, share_s: float) -> list[OverlapEntry]:
        """Return the measurements of a collective at one size, overlapped with a computation of each length."""
        session = self._session
        session.stopwatch.doing = f"timing {point.message_bytes} bytes overlapped, {kind}"
        group = session.process_groups.mine(kind.groups)
        start = _start_call(kind, point.message_bytes, group, session.stopwatch.device)
        point_s = float(np.median(point.times_s))
        fitting = [c for c in self._computations if c.time_s * _PRODUCTS_IN_MESSAGE <= point_s]
        computation = fitting[-1] if fitting else self._computations[0]
        entries = []
        for ratio in COMPUTE_RATIOS:
            # Each by itself and both at once, alternately: other load on the machine slows all of them alike.
            products = max(1, round(ratio * point_s / computation.time_s))
            turns = ((None, computation, products), (start, computation, 0), (start, computation, products))
            measure = partial(self._turns_s, turns)
            measure(WARM_UP_REPEATS)
            times_s = session.stopwatch.repeated(measure, share_s / len(COMPUTE_RATIOS), session.identity.max_repeats)
            compute_s, alone_s, slowed_compute_s, slowed_s = np.median(times_s, axis=1).tolist()
            entries.append(
                OverlapEntry(
                    collective=kind.key.collective,
                    group_size=kind.key.group_size,
                    ranks_per_node=kind.key.ranks_per_node,
                    collective_bytes=point.message_bytes,
                    compute_ratio=ratio,
                    compute_s=compute_s,
                    collective_s=alone_s,
                    compute_slowdown=slowed_compute_s / compute_s,
                    collective_slowdown=slowed_s / alone_s,
                )
            )
        return entries

    def _turns_s(self, turns: Sequence[_Turn], repeats: int) -> NDArray[Any]:
        """Return the seconds of each turn's computation and collective, if it has them, on the slowest rank.

        [series, repeats] float64, in the order of the turns; in each the computation comes before the collective.
        """
        stopwatch = self._session.stopwatch
        mine = torch.zeros(len(turns), 2, repeats, dtype=torch.float64)
        for repeat in range(repeats):
            for turn, (start, computation, products) in enumerate(turns):
                stopwatch.align()
                mine[turn, :, repeat] = torch.tensor(
                    self._clock(start, computation.once, products), dtype=torch.float64
                )
        there = np.array([[products > 0, start is not None] for start, _, products in turns])
        return np.asarray(stopwatch.gathered(mine).max(axis=0)[there])

    @cached_property
    def _computations(self) -> list[_Computation]:
        """Return matrix products of growing sizes; used is the largest of which 8 fit into the collective's time."""
        made, device = [], self._session.stopwatch.device
        for side in _SIDES[device.type]:
            factor = random_numbers(side, side, dtype=_DTYPES[device.type], device=device)
            untimed = _Computation(factor, torch.empty_like(factor), 0.0)
            turns = ((None, untimed, _TRIES),)
            self._turns_s(turns, 1)
            made.append(untimed._replace(time_s=float(np.median(self._turns_s(turns, _TRIES)[0])) / _TRIES))
        return made


def overlap_clock(device: torch.device) -> Clock:
    """Return the clock for a device: with events of streams on an accelerator, with a thread on a CPU."""
    return _DeviceClock(device) if on_accelerator(device) else _CpuClock()


class _CpuClock:
    """A clock with a thread that waits for the collective, because some of gloo's work handles report no completion."""

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


def _arrived_at(work: dist.Work | Exchange) -> float:
    work.wait()
    return perf_counter()


class _DeviceClock:
    """A clock that uses device events: the collective runs on its own stream, and a third stream waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting = torch.Stream(device)

    def __call__(self, start: Start | None, compute: Callable[[], None], times: int) -> tuple[float, float]:
        started, computing, computed, arrived = (torch.Event(enable_timing=True) for _ in range(4))
        started.record()
        work = start() if start is not None else None
        computing.record()
        for _ in range(times):
            compute()
        computed.record()
        with self._waiting:
            self._waiting.wait_event(started)
            if work is not None:
                work.wait()
            arrived.record()
        torch.accelerator.synchronize(self._device)
        collective_s = started.elapsed_time(arrived) / 1e3 if work is not None else 0.0
        return computing.elapsed_time(computed) / 1e3, collective_s


# The time of a layer by itself and in a pipeline between two halves of the ranks.
#
# With some runtimes and networks a layer's collectives are several times as slow while messages go between nodes. A
# layer here is a matrix product and an all_reduce among neighbours inside a half: it stands for a tensor-parallel
# layer.


_LAYER_SIDES = {CPU: 256, GPU: 2048}
_MESSAGE_BYTES = 2**20
_LAYERS, _MICROBATCHES, _STEPS = 4, 3, 9


def pipeline_tasks(session: Session) -> list[Task]:
    """Return the task that times layers by themselves and in a pipeline; none for one device (no second stage)."""
    if dist.get_world_size() == 1:
        return []
    keys = [("rate", name) for name in (LAYERS_ALONE, LAYERS_IN_PIPELINE)]
    return [Task("layers", keys, partial(_entries, session))]


def _entries(session: Session, _: float) -> list[RateEntry]:
    """Return the median layers per second of every rank, by themselves and in the pipeline, measured alternately."""
    stopwatch = session.stopwatch
    stopwatch.doing = "timing layers alone and in a pipeline"
    half, layer = dist.get_world_size() // 2, _layer(session)
    pairs = tuple((rank, rank + half) for rank in range(half))
    exchange = p2p_call(pairs, _MESSAGE_BYTES, session.process_groups.pair(pairs), stopwatch.device)
    clock, receives = overlap_clock(stopwatch.device), dist.get_rank() >= half

    def step_s(pipelined: bool) -> float:
        """Return the seconds of the layers in a step, without the messages between the halves."""
        stopwatch.align()
        time_s = 0.0
        for _ in range(_MICROBATCHES):
            if pipelined and receives:
                exchange()
            time_s += clock(None, layer, _LAYERS)[0]
            if pipelined and not receives:
                exchange()
        return time_s

    rounds = [(step_s(False), step_s(True)) for _ in range(WARM_UP_REPEATS + _STEPS)][WARM_UP_REPEATS:]
    mine = torch.tensor(np.median(rounds, axis=0), dtype=torch.float64)
    per_s = _LAYERS * _MICROBATCHES / stopwatch.gathered(mine)
    return [
        RateEntry(name=name, values=tuple(per_s[:, column].tolist()))
        for column, name in enumerate((LAYERS_ALONE, LAYERS_IN_PIPELINE))
    ]


def _layer(session: Session) -> Callable[[], None]:
    """Return a function that runs this rank's part of a layer: a matrix product, and an all_reduce if in a group."""
    device, groups = session.stopwatch.device, _groups(session.identity.cluster)
    group = session.process_groups.mine(groups) if groups else None
    side = _LAYER_SIDES[device.type]
    factor = random_numbers(side, side, dtype=torch.float32, device=device)
    numbers = torch.zeros(_MESSAGE_BYTES // 4, device=device)  # sums of zeros stay zeros
    product = torch.empty_like(factor)

    def layer() -> None:
        torch.mm(factor, factor, out=product)
        if group is not None:
            dist.all_reduce(numbers, group=group)

    return layer


def _groups(cluster: Cluster) -> Groups:
    """Return the largest equal groups of neighbours, each in one node and one half; none if a group has one rank."""
    half = cluster.num_devices // 2
    size = gcd(half, *(cluster.node_types[group.node_type].devices_per_node for group in cluster.nodes))
    return tuple(tuple(range(start, start + size)) for start in range(0, 2 * half, size)) if size > 1 else ()
