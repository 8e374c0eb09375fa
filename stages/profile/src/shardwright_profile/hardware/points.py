"""Every kind of message at growing sizes (only the ranks of a sweep import this)."""

from collections.abc import Iterator, Sequence
from time import perf_counter

import numpy as np

from shardwright_formats.types.hardware_profile import Collective
from shardwright_profile.hardware.collectives import message_call
from shardwright_profile.hardware.entries import PointEntry
from shardwright_profile.hardware.message_kinds import SIZE_STEP, MessageKind, always_sizes, message_sizes
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, agreed, repeated, timed_repeats

__all__ = ["point_entries"]


def point_entries(
    session: Session, kinds: Sequence[MessageKind], time_s: float
) -> Iterator[tuple[MessageKind, PointEntry]]:
    """Time every kind of message for about `time_s` seconds; all ranks of the world call this and get the same.

    The kinds share the time evenly, and what one leaves over goes to those after it. Each kind grows its messages from
    the smallest, and always to 1 MiB, until the next size would not fit its share. A kind that a killed sweep was done
    with grows no further.
    """
    started = perf_counter()
    done = _done_before(session, kinds)
    for number, kind in enumerate(kinds):
        left_s = time_s - agreed(perf_counter() - started, session.device)
        share_s = 0.0 if number < done else max(0.0, left_s) / (len(kinds) - number)
        for entry in _of_kind(session, kind, share_s):
            yield kind, entry


def _done_before(session: Session, kinds: Sequence[MessageKind]) -> int:
    """How many kinds a killed sweep was done with: those before the last one that it had begun."""
    if session.journal.holds_any("pair", "overlap"):
        return len(kinds)
    identity = session.job.identity
    begun = [
        number
        for number, kind in enumerate(kinds)
        for size in message_sizes(kind.key.group_size, identity.min_bytes, identity.max_bytes)
        if session.journal.find("point", *kind.key, size)
    ]
    return max(begun, default=0)


def _of_kind(session: Session, kind: MessageKind, share_s: float) -> Iterator[PointEntry]:
    started = perf_counter()
    sizes = message_sizes(kind.key.group_size, session.job.identity.min_bytes, session.job.identity.max_bytes)
    always = always_sizes(kind.key.group_size, session.job.identity.min_bytes, session.job.identity.max_bytes)
    expected_s = 0.0
    for number, message_bytes in enumerate(sizes):
        entry = session.journal.find("point", *kind.key, message_bytes)
        if not isinstance(entry, PointEntry):
            left_s = share_s - agreed(perf_counter() - started, session.device)
            if expected_s > left_s and message_bytes not in always:
                return
            entry = _timed(session, kind, message_bytes, left_s / (len(sizes) - number))
        yield entry
        expected_s = SIZE_STEP * float(np.median(entry.times_s)) * (WARM_UP_REPEATS + session.least_repeats)


def _timed(session: Session, kind: MessageKind, message_bytes: int, share_s: float) -> PointEntry:
    device = session.device
    alone = kind.key.collective is Collective.P2P
    process_group = None if alone else session.process_groups.mine(kind.groups)
    call = message_call(kind, message_bytes, process_group, device)
    timed_repeats(call, WARM_UP_REPEATS, device)
    times_s = repeated(lambda n: timed_repeats(call, n, device)[None], share_s, session.most_repeats, device)
    return PointEntry(**kind.key._asdict(), message_bytes=message_bytes, times_s=tuple(times_s[0].tolist()))
