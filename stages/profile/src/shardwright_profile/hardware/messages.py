"""Tasks for collectives at growing sizes and every link of a pipeline (only the ranks of a sweep import this)."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.semantics.sweep_plan import SIZE_STEP, CollectiveKind, PairRound
from shardwright_profile.hardware.collectives import collective_call, p2p_call
from shardwright_profile.hardware.profile import EntryKey, PairEntry, PointEntry
from shardwright_profile.hardware.session import Session, Task
from shardwright_profile.hardware.timing import WARM_UP_REPEATS


def point_tasks(session: Session, kinds: Sequence[CollectiveKind]) -> list[Iterator[Task]]:
    """Return tasks for every kind of collective at growing sizes, always to 1 MiB, then while the next fits its time.

    A kind that a killed sweep was done with grows no further.
    """
    done = _done_before(session, kinds)
    return [_points(session, kind, number >= done) for number, kind in enumerate(kinds)]


def _done_before(session: Session, kinds: Sequence[CollectiveKind]) -> int:
    """Return the number of kinds that a killed sweep was done with: those before the last one that it had begun."""
    if any(isinstance(key, tuple) and key[0] in ("pair", "overlap") for key in session.journal.entries):
        return len(kinds)
    sizes = session.identity.sizes
    begun = [
        number
        for number, kind in enumerate(kinds)
        for size in sizes.all(kind.key.group_size)
        if session.find("point", kind.key, size)
    ]
    return max(begun, default=0)


def _points(session: Session, kind: CollectiveKind, grows: bool) -> Iterator[Task]:
    sizes, always = (of(kind.key.group_size) for of in (session.identity.sizes.all, session.identity.sizes.always))
    needs_s = 0.0
    for number, size in enumerate(sizes):
        key = ("point", kind.key, size)
        limit_s = None if size in always else needs_s if grows else inf
        yield Task(kind, [key], partial(_timed_point, session, kind, size), 1 / (len(sizes) - number), limit_s)
        entry = session.find(*key)
        assert isinstance(entry, PointEntry)
        needs_s = SIZE_STEP * float(np.median(entry.times_s)) * (WARM_UP_REPEATS + session.min_repeats)


def _timed_point(session: Session, kind: CollectiveKind, message_bytes: int, share_s: float) -> list[PointEntry]:
    stopwatch = session.stopwatch
    stopwatch.doing = f"timing {message_bytes} bytes, {kind}"
    call = collective_call(kind, message_bytes, session.process_groups.of(kind), session.device)
    stopwatch.slowest_s(call, WARM_UP_REPEATS)
    times_s = stopwatch.repeated(lambda n: stopwatch.slowest_s(call, n)[None], share_s, session.max_repeats)
    return [PointEntry(**kind.key.columns, message_bytes=message_bytes, times_s=tuple(times_s[0].tolist()))]


def pair_tasks(session: Session, rounds: Sequence[PairRound]) -> list[list[Task]]:
    """Return the tasks of each round, which times all of its pairs at once."""

    def task(timed: PairRound) -> Task:
        keys: list[EntryKey] = [("pair", source, target, timed.message_bytes) for source, target in timed.pairs]
        return Task(timed, keys, partial(_timed_pairs, session, timed))

    return [[task(timed)] for timed in rounds]


def _timed_pairs(session: Session, timed: PairRound, share_s: float) -> list[PairEntry]:
    stopwatch = session.stopwatch
    stopwatch.doing = f"timing {timed.message_bytes} bytes, {timed}"
    pair = session.process_groups.pair(timed.pairs)
    call = p2p_call(timed.pairs, timed.message_bytes, pair, session.device)

    def measure(repeats: int) -> NDArray[Any]:
        """Return the seconds of each pair's message, which arrives when both its ranks are done: [pairs, repeats]."""
        times_s = stopwatch.rank_times_s(call, repeats)
        return np.stack([times_s[list(pair)].max(axis=0) for pair in timed.pairs])

    measure(WARM_UP_REPEATS)
    medians_s = np.median(stopwatch.repeated(measure, share_s, session.max_repeats), axis=1)
    return [
        PairEntry(source_rank=source, target_rank=target, message_bytes=timed.message_bytes, time_s=float(median_s))
        for (source, target), median_s in zip(timed.pairs, medians_s, strict=True)
    ]
