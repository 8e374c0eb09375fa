"""Tasks that measure the rates of devices and hosts, collectives of growing sizes, and links.

Only the ranks of a sweep import this module.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from shardwright.launch.backend import on_accelerator
from shardwright.plan.sweep_plan import SIZE_STEP, CollectiveKind, Groups, PairRound
from shardwright.types import Cluster
from shardwright.types.hardware_profile import HOST_ALONE, HOST_COPIES, HOST_UPDATES, Collective
from shardwright_profile.hardware.profile import EntryKey, PairEntry, PointEntry, RateEntry
from shardwright_profile.hardware.session import WARM_UP_REPEATS, Session, Stopwatch, Task


def collective_call(
    kind: CollectiveKind,
    message_bytes: int,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    wait: bool = True,
) -> Callable[[], dist.Work | None]:
    """Return a function that runs this rank's part of one collective of `message_bytes`.

    The message is float32 zeros, whose sums stay zeros however often they are repeated. A rank outside all groups does
    nothing. These are the calls that FSDP2 and the tensor-parallel layers make. When the function returns, the
    collective is complete, or queued on the current stream; without `wait` it is only started, and the function
    returns its work handle.
    """
    if kind.key.collective is Collective.P2P:
        return p2p_call(kind.groups, message_bytes, process_group, device)
    if process_group is None:
        return lambda: None
    whole = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)
    match kind.key.collective:
        case Collective.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=process_group, async_op=not wait)
        case Collective.ALL_GATHER:
            part = torch.zeros(whole.numel() // kind.key.group_size, dtype=whole.dtype, device=device)
            return lambda: dist.all_gather_into_tensor(whole, part, group=process_group, async_op=not wait)
        case Collective.REDUCE_SCATTER:
            part = torch.zeros(whole.numel() // kind.key.group_size, dtype=whole.dtype, device=device)
            return lambda: dist.reduce_scatter_tensor(part, whole, group=process_group, async_op=not wait)
        case Collective.ALL_TO_ALL:
            other = torch.zeros_like(whole)
            return lambda: dist.all_to_all_single(other, whole, group=process_group, async_op=not wait)


def p2p_call(
    pairs: Groups, message_bytes: int, process_group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], None]:
    """Return a function that sends or receives a message of `message_bytes` from the first to the second of each pair.

    `process_group`: the process group of this rank's pair; None if the rank is in no pair.
    """
    if process_group is None:
        return lambda: None
    rank = dist.get_rank()
    targets = {source: target for source, target in pairs}
    sources = {target: source for source, target in pairs}
    message = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)
    if rank in targets:
        return lambda: _done(dist.send(message, targets[rank], process_group))
    return lambda: _done(dist.recv(message, sources[rank], process_group))


class Exchange(NamedTuple):
    """The two messages of a rank that are in transit: the one it sends, and the one it receives."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Wait until both messages have arrived, or make the current stream wait for that."""
        for work in self.works:
            work.wait()


def exchange_call(
    pairs: Groups, message_bytes: int, process_group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], Exchange | None]:
    """Return a function that starts messages of `message_bytes` in both directions between the ranks of every pair.

    This is a step of a ring of two ranks, with the calls of ring attention. `process_group`: the process group of this
    rank's pair; None if the rank is in no pair.
    """
    if process_group is None:
        return lambda: None
    (other,) = (a if b == dist.get_rank() else b for a, b in pairs if dist.get_rank() in (a, b))
    sent = torch.zeros(message_bytes // 4, dtype=torch.float32, device=device)
    arriving = torch.empty_like(sent)

    def start() -> Exchange:
        ways = [
            dist.P2POp(dist.isend, sent, other, process_group),
            dist.P2POp(dist.irecv, arriving, other, process_group),
        ]
        return Exchange(dist.batch_isend_irecv(ways))

    return start


def _done(_: object) -> None:
    """Discard torch's return value; these calls are complete, or queued on the current stream, when they return."""


_REPEATS = 9


def random_numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return normally distributed random numbers, the same at each call.

    For matrix products of ones a GPU switches fewer transistors, so that its clock stays higher than in training.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


def rate_tasks(session: Session) -> list[Task]:
    """Return the tasks that measure each device's rates while all ranks work: medians, named with their SI units.

    `matrix_flops_per_s`: the matrix product of two square float32 matrices (a multiply-add counts 2); on CUDA also
    `matrix_bfloat16_flops_per_s` and the rates of `host_measurements`. `memory_bytes_per_s`: a copy, which reads and
    writes each byte once.
    """
    on_gpu = on_accelerator(session.stopwatch.device)
    side, copied_bytes = (8192, 2**30) if on_gpu else (1024, 2**26)
    measured: dict[str, Callable[[Stopwatch], tuple[float, ...]]] = {
        "matrix_flops_per_s": lambda stopwatch: _matrix_flops_per_s(side, torch.float32, stopwatch),
        "memory_bytes_per_s": lambda stopwatch: _memory_bytes_per_s(copied_bytes, stopwatch),
    }
    if on_gpu:
        measured["matrix_bfloat16_flops_per_s"] = lambda stopwatch: _matrix_flops_per_s(side, torch.bfloat16, stopwatch)
        measured |= host_measurements(session.identity.cluster)

    def entry(name: str, _: float) -> list[RateEntry]:
        session.stopwatch.doing = f"measuring {name}"
        return [RateEntry(name=name, values=measured[name](session.stopwatch))]

    return [Task("devices", [("rate", name)], partial(entry, name)) for name in sorted(measured)]


def _matrix_flops_per_s(side: int, dtype: torch.dtype, stopwatch: Stopwatch) -> tuple[float, ...]:
    factor = random_numbers(side, side, dtype=dtype, device=stopwatch.device)
    product = torch.empty_like(factor)
    return _rates(2 * side**3, lambda: torch.mm(factor, factor, out=product), stopwatch)


def _memory_bytes_per_s(size: int, stopwatch: Stopwatch) -> tuple[float, ...]:
    source = random_numbers(size // 4, dtype=torch.float32, device=stopwatch.device).view(torch.uint8)
    target = torch.zeros_like(source)
    return _rates(2 * size, lambda: target.copy_(source), stopwatch)


def _rates(amount: int, call: Callable[[], object], stopwatch: Stopwatch) -> tuple[float, ...]:
    """Return `amount` divided by the median seconds of `call` on each rank, in rank order."""
    stopwatch.rank_times_s(call, WARM_UP_REPEATS)
    return tuple(amount / time_s for time_s in np.median(stopwatch.rank_times_s(call, _REPEATS), axis=1).tolist())


def point_tasks(session: Session, kinds: Sequence[CollectiveKind]) -> list[Iterator[Task]]:
    """Return the tasks of every kind of collective at growing sizes: always up to 1 MiB, then while time is left.

    If a killed sweep had finished with a kind, its sizes grow no further.
    """
    done = _done_before(session, kinds)
    return [_points(session, kind, number >= done) for number, kind in enumerate(kinds)]


def _done_before(session: Session, kinds: Sequence[CollectiveKind]) -> int:
    """Return the number of kinds that a killed measurement had finished: all before the last one that it began."""
    if any(isinstance(key, tuple) and key[0] in ("pair", "overlap") for key in session.journal.entries):
        return len(kinds)
    sizes = session.identity.sizes
    begun = [
        number
        for number, kind in enumerate(kinds)
        for size in sizes.all(kind.key.group_size)
        if session.journal.find("point", kind.key, size)
    ]
    return max(begun, default=0)


def _points(session: Session, kind: CollectiveKind, grows: bool) -> Iterator[Task]:
    sizes = session.identity.sizes.all(kind.key.group_size)
    always = session.identity.sizes.always(kind.key.group_size)
    needs_s = 0.0
    for number, size in enumerate(sizes):
        key = ("point", kind.key, size)
        limit_s = None if size in always else needs_s if grows else inf
        yield Task(kind, [key], partial(_timed_point, session, kind, size), 1 / (len(sizes) - number), limit_s)
        entry = session.journal.find(*key)
        assert isinstance(entry, PointEntry)
        needs_s = SIZE_STEP * float(np.median(entry.times_s)) * (WARM_UP_REPEATS + session.min_repeats)


def _timed_point(session: Session, kind: CollectiveKind, message_bytes: int, share_s: float) -> list[PointEntry]:
    stopwatch = session.stopwatch
    stopwatch.doing = f"timing {message_bytes} bytes, {kind}"
    call = collective_call(kind, message_bytes, session.process_groups.group_for(kind), session.stopwatch.device)
    stopwatch.slowest_s(call, WARM_UP_REPEATS)
    times_s = stopwatch.repeated(lambda n: stopwatch.slowest_s(call, n)[None], share_s, session.identity.max_repeats)
    return [PointEntry(**kind.key.columns, message_bytes=message_bytes, times_s=tuple(times_s[0].tolist()))]


def pair_tasks(session: Session, rounds: Sequence[PairRound]) -> list[list[Task]]:
    """Return the one task of each round; it times all pairs of the round at once."""

    def task(timed: PairRound) -> Task:
        keys: list[EntryKey] = [("pair", source, target, timed.message_bytes) for source, target in timed.pairs]
        return Task(timed, keys, partial(_timed_pairs, session, timed))

    return [[task(timed)] for timed in rounds]


def _timed_pairs(session: Session, timed: PairRound, share_s: float) -> list[PairEntry]:
    stopwatch = session.stopwatch
    stopwatch.doing = f"timing {timed.message_bytes} bytes, {timed}"
    pair = session.process_groups.pair(timed.pairs)
    call = p2p_call(timed.pairs, timed.message_bytes, pair, session.stopwatch.device)

    def measure(repeats: int) -> NDArray[Any]:
        """Return the seconds of each pair's message, until both its ranks are done: [pairs, repeats]."""
        times_s = stopwatch.rank_times_s(call, repeats)
        return np.stack([times_s[list(pair)].max(axis=0) for pair in timed.pairs])

    measure(WARM_UP_REPEATS)
    medians_s = np.median(stopwatch.repeated(measure, share_s, session.identity.max_repeats), axis=1)
    return [
        PairEntry(source_rank=source, target_rank=target, message_bytes=timed.message_bytes, time_s=float(median_s))
        for (source, target), median_s in zip(timed.pairs, medians_s, strict=True)
    ]


# Rates between devices and their host. A CPU has none: a device's memory is the host's memory.


Measure = Callable[[Stopwatch], tuple[float, ...]]


class _Sizes(NamedTuple):
    """How many bytes are copied, and how many parameters are updated."""

    copied_bytes: int
    updated: int
    """Number of float32 parameters."""


_SIZES = _Sizes(2**28, 2**24)


def host_measurements(cluster: Cluster, sizes: _Sizes = _SIZES) -> dict[str, Measure]:
    """Return functions that measure each rank's rates by name: medians, in rank order.

    Bytes per second of copies from and to pinned memory, by all ranks at once and by each rank while the other ranks of
    its node wait; and parameters per second that AdamW updates on the host, by all ranks at once.
    """
    places = _places(cluster)
    measured: dict[str, Measure] = {HOST_UPDATES: partial(_updated_per_s, sizes.updated)}
    for together, alone, inwards in zip(HOST_COPIES, HOST_ALONE, (True, False), strict=True):
        measured[together] = partial(_copied_per_s, sizes.copied_bytes, inwards, [0] * len(places))
        measured[alone] = partial(_copied_per_s, sizes.copied_bytes, inwards, places)
    return measured


def _places(cluster: Cluster) -> list[int]:
    """Return the index of each rank on its node, by rank."""
    nodes = cluster.node_of_rank
    return [rank - nodes.index(node) for rank, node in enumerate(nodes)]


def _copied_per_s(size: int, inwards: bool, turns: Sequence[int], stopwatch: Stopwatch) -> tuple[float, ...]:
    """Return each rank's copied bytes per second; ranks with the same number in `turns` copy at the same time."""
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
