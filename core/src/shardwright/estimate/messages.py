"""Time of messages by the alpha-beta model: a latency for each step of a ring, and bytes over a bandwidth.

Hockney (1994) for the model; Patarasuk and Yuan (2009) for the ring: all_reduce takes 2 (n-1) steps that move
2 (n-1)/n of the message through every rank's link, all_gather and reduce_scatter half of that. The latencies are
rounded from NCCL's own cost model (src/graph/tuning.cc, protocol Simple).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.plan.communication import Message
from shardwright.types.hardware_profile import Collective

START_S = 10e-6
"""Time that any message takes before its first byte."""
NETWORK_STEP_S = 14e-6
"""Latency of one step between two nodes, as NCCL's own cost model has it for a ring over a network."""


class Link(NamedTuple):
    """The link between the ranks of a group."""

    bytes_per_s: float
    """Bandwidth in one direction, as reached."""
    step_s: float
    all_reduce: tuple[tuple[float, float], ...] = ()
    """Bytes that each rank moves in an all_reduce, ascending, with the published time; empty: none was published."""


def steps(collective: Collective, group_size: int) -> int:
    """Return the number of consecutive messages: a ring's steps, or one if each pair has a separate link."""
    match collective:
        case Collective.ALL_REDUCE:
            return 2 * (group_size - 1)
        case Collective.P2P | Collective.ALL_TO_ALL:
            return 1
        case _:
            return group_size - 1


def moved_bytes(collective: Collective, group_size: int, message_bytes: float) -> float:
    """Return the bytes that each rank sends, for a message as `Collective` counts it."""
    if collective is Collective.P2P:
        return message_bytes
    parts = 2 * (group_size - 1) if collective is Collective.ALL_REDUCE else group_size - 1
    return parts / group_size * message_bytes


def message_time_s(collective: Collective, group_size: int, message_bytes: float, link: Link) -> float:
    """Return the time of a message: the published one of an all_reduce that moves as many bytes, if there is one.

    Others take the start, a latency for each step, and the bytes that a rank sends over the link's bandwidth.
    """
    moved = moved_bytes(collective, group_size, message_bytes)
    if collective is Collective.ALL_REDUCE and link.all_reduce:
        return float(published_times_s(np.array(moved), link))
    return START_S + steps(collective, group_size) * link.step_s + moved / link.bytes_per_s


def published_times_s(moved: NDArray[Any], link: Link) -> NDArray[Any]:
    """Interpolate between the published times of a link's all_reduce.

    Beyond them the largest message's rate applies.
    """
    sizes, times_s = (np.array(column) for column in zip(*link.all_reduce, strict=True))
    inside = np.clip(moved, sizes[0], sizes[-1])
    times: NDArray[Any] = np.interp(inside, sizes, times_s) + (moved - inside) * times_s[-1] / sizes[-1]
    return times


def messages_time_s(messages: Iterable[Message], link: Link) -> float:
    """Return the total time of messages that are sent one after another."""
    return sum(m.times * message_time_s(m.collective, m.group_size, m.bytes, link) for m in messages)
