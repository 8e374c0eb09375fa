"""Messages between neighbours in a pipeline, link by link (only the ranks of a sweep import this)."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright_profile.hardware.collectives import p2p_call
from shardwright_profile.hardware.entries import PairEntry
from shardwright_profile.hardware.message_kinds import PairRound
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, agreed, rank_times, repeated

__all__ = ["pair_entries"]


def pair_entries(
    session: Session, rounds: Sequence[PairRound], time_s: float
) -> Iterator[tuple[PairRound, list[PairEntry]]]:
    """Time every link for about `time_s` seconds, the pairs of a round at once; all ranks get the same."""
    started = perf_counter()
    for number, timed in enumerate(rounds):
        kept = [session.journal.find("pair", *pair, timed.message_bytes) for pair in timed.pairs]
        known = [entry for entry in kept if isinstance(entry, PairEntry)]
        if len(known) < len(kept):
            left_s = time_s - agreed(perf_counter() - started, session.device)
            known = _timed(session, timed, left_s / (len(rounds) - number))
        yield timed, known


def _timed(session: Session, timed: PairRound, share_s: float) -> list[PairEntry]:
    device = session.device
    call = p2p_call(timed.pairs, timed.message_bytes, device)

    def measure(repeats: int) -> NDArray[Any]:
        """A message has arrived when both its ranks are done: [pairs, repeats]."""
        times_s = rank_times(call, repeats, device)
        return np.stack([times_s[list(pair)].max(axis=0) for pair in timed.pairs])

    measure(WARM_UP_REPEATS)
    medians_s = np.median(repeated(measure, share_s, session.most_repeats, device), axis=1)
    return [
        PairEntry(source_rank=source, target_rank=target, message_bytes=timed.message_bytes, time_s=float(median_s))
        for (source, target), median_s in zip(timed.pairs, medians_s, strict=True)
    ]
