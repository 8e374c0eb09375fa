"""The sweep: every kind of message at growing sizes within a time budget (only the ranks of a sweep import this)."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from shardwright_formats.hardware_profile import Collective
from shardwright_profile.collectives import message_call, my_process_group
from shardwright_profile.message_kinds import ALWAYS_BYTES, SIZE_STEP, Groups, MessageKind, message_sizes
from shardwright_profile.sweep_job import Progress
from shardwright_profile.timing import LEAST_REPEATS, WARM_UP_REPEATS, agreed, repeats_within, timed_repeats

__all__ = ["TimedMessage", "sweep"]


class TimedMessage(NamedTuple):
    """One kind of message at one size: seconds of every repeat on the slowest rank."""

    kind: MessageKind
    message_bytes: int
    times_s: NDArray[Any]


def sweep(
    kinds: Sequence[MessageKind],
    min_bytes: int,
    max_bytes: int,
    time_budget_s: float,
    device: torch.device,
    report: Callable[[Progress], None],
) -> list[TimedMessage]:
    """Time every kind of message; all ranks of the world call this and get the same times.

    The kinds share the budget evenly, and what one leaves over goes to those after it. Each kind grows its messages
    from `min_bytes`, and always to 1 MiB, until the next size would not fit its share or exceeds `max_bytes`.
    """
    started = perf_counter()
    found: list[TimedMessage] = []
    process_groups: dict[Groups, dist.ProcessGroup | None] = {}
    for number, kind in enumerate(kinds):
        if kind.key.collective is not Collective.P2P and kind.groups not in process_groups:
            process_groups[kind.groups] = my_process_group(kind.groups)
        left_s = time_budget_s - agreed(perf_counter() - started, device)
        share_s = max(0.0, left_s) / (len(kinds) - number)
        sizes = message_sizes(kind.key.group_size, min_bytes, max_bytes)
        for timed in _sweep_kind(kind, sizes, share_s, process_groups.get(kind.groups), device):
            found.append(timed)
            report(
                Progress(
                    kind=str(kind),
                    number=number,
                    kinds=len(kinds),
                    message_bytes=timed.message_bytes,
                    median_s=float(np.median(timed.times_s)),
                    repeats=len(timed.times_s),
                )
            )
    return found


def _sweep_kind(
    kind: MessageKind,
    sizes: Sequence[int],
    share_s: float,
    process_group: dist.ProcessGroup | None,
    device: torch.device,
) -> Iterator[TimedMessage]:
    started = perf_counter()
    expected_s, reached_bytes = 0.0, 0
    for number, message_bytes in enumerate(sizes):
        left_s = share_s - agreed(perf_counter() - started, device)
        if expected_s > left_s and reached_bytes >= ALWAYS_BYTES:
            return
        call = message_call(kind, message_bytes, process_group, device)
        times_s = _time_message(call, left_s / (len(sizes) - number), device)
        yield TimedMessage(kind, message_bytes, times_s)
        expected_s = SIZE_STEP * float(np.median(times_s)) * (WARM_UP_REPEATS + LEAST_REPEATS)
        reached_bytes = message_bytes


def _time_message(call: Callable[[], None], share_s: float, device: torch.device) -> NDArray[Any]:
    """Warm up, then repeat for about `share_s` seconds, barriers included, but at least 5 and at most 100 times."""
    timed_repeats(call, WARM_UP_REPEATS, device)
    started = perf_counter()
    first_s = timed_repeats(call, LEAST_REPEATS, device)
    one_s = agreed(perf_counter() - started, device) / LEAST_REPEATS
    more = repeats_within(share_s, one_s) - LEAST_REPEATS
    return np.concatenate([first_s, timed_repeats(call, more, device)]) if more else first_s
