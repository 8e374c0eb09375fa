"""Collectives at growing sizes, and every link of a pipeline (only the ranks of a sweep import this)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.types.hardware_profile import Collective
from shardwright_profile.hardware.collectives import collective_call, p2p_call
from shardwright_profile.hardware.profile import PairEntry, PointEntry
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.sweep_plan import SIZE_STEP, CollectiveKind, PairRound
from shardwright_profile.hardware.timing import WARM_UP_REPEATS


def point_entries(
    session: Session, kinds: Sequence[CollectiveKind], time_s: float
) -> Iterator[tuple[CollectiveKind, PointEntry]]:
    """Time every kind of collective for about `time_s` seconds; all ranks of the world call this and get the same.

    The kinds share the time evenly, and what one leaves over goes to those after it. Each kind grows its messages from
    the smallest, and always to 1 MiB, until the next size would not fit its share. A kind that a killed sweep was done
    with grows no further.
    """
    budget = session.stopwatch.budget(time_s)
    done = _done_before(session, kinds)
    for number, kind in enumerate(kinds):
        left_s = max(0.0, budget.left_s())
        for entry in _of_kind(session, kind, 0.0 if number < done else left_s / (len(kinds) - number)):
            yield kind, entry


def _done_before(session: Session, kinds: Sequence[CollectiveKind]) -> int:
    """How many kinds a killed sweep was done with: those before the last one that it had begun."""
    if any(isinstance(key, tuple) and key[0] in ("pair", "overlap") for key in session.journal.entries):
        return len(kinds)
    sizes = session.identity.sizes
    begun = [
        number
        for number, kind in enumerate(kinds)
        for size in sizes.all(kind.key.group_size)
        if session.find("point", *kind.key, size)
    ]
    return max(begun, default=0)


def _of_kind(session: Session, kind: CollectiveKind, share_s: float) -> Iterator[PointEntry]:
    budget = session.stopwatch.budget(share_s)
    sizes, always = (of(kind.key.group_size) for of in (session.identity.sizes.all, session.identity.sizes.always))
    expected_s = 0.0
    for number, message_bytes in enumerate(sizes):
        entry = session.find("point", *kind.key, message_bytes)
        if not isinstance(entry, PointEntry):
            left_s = budget.left_s()
            if expected_s > left_s and message_bytes not in always:
                return
            entry = _timed_point(session, kind, message_bytes, left_s / (len(sizes) - number))
        yield entry
        expected_s = SIZE_STEP * float(np.median(entry.times_s)) * (WARM_UP_REPEATS + session.min_repeats)


def _timed_point(session: Session, kind: CollectiveKind, message_bytes: int, share_s: float) -> PointEntry:
    stopwatch = session.stopwatch
    stopwatch.doing = f"timing {message_bytes} bytes, {kind}"
    p2p = kind.key.collective is Collective.P2P
    process_group = None if p2p else session.process_groups.mine(kind.groups)
    call = collective_call(kind, message_bytes, process_group, session.device)
    stopwatch.slowest_s(call, WARM_UP_REPEATS)
    times_s = stopwatch.repeated(lambda n: stopwatch.slowest_s(call, n)[None], share_s, session.max_repeats)
    return PointEntry(**kind.key._asdict(), message_bytes=message_bytes, times_s=tuple(times_s[0].tolist()))


def pair_entries(
    session: Session, rounds: Sequence[PairRound], time_s: float
) -> Iterator[tuple[PairRound, list[PairEntry]]]:
    """Time every link for about `time_s` seconds, the pairs of a round at once; all ranks get the same."""
    budget = session.stopwatch.budget(time_s)
    for number, timed in enumerate(rounds):
        kept = [session.find("pair", *pair, timed.message_bytes) for pair in timed.pairs]
        known = [entry for entry in kept if isinstance(entry, PairEntry)]
        if len(known) < len(kept):
            known = _timed_pairs(session, timed, budget.left_s() / (len(rounds) - number))
        yield timed, known


def _timed_pairs(session: Session, timed: PairRound, share_s: float) -> list[PairEntry]:
    stopwatch = session.stopwatch
    stopwatch.doing = f"timing {timed.message_bytes} bytes, {timed}"
    call = p2p_call(timed.pairs, timed.message_bytes, session.device)

    def measure(repeats: int) -> NDArray[Any]:
        """A message has arrived when both its ranks are done: [pairs, repeats]."""
        times_s = stopwatch.rank_times_s(call, repeats)
        return np.stack([times_s[list(pair)].max(axis=0) for pair in timed.pairs])

    measure(WARM_UP_REPEATS)
    medians_s = np.median(stopwatch.repeated(measure, share_s, session.max_repeats), axis=1)
    return [
        PairEntry(source_rank=source, target_rank=target, message_bytes=timed.message_bytes, time_s=float(median_s))
        for (source, target), median_s in zip(timed.pairs, medians_s, strict=True)
    ]
