"""The sweep: rates, messages, links and overlap within a time budget (only the ranks of a sweep import this)."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from shardwright_formats.types.hardware_profile import Collective
from shardwright_profile.hardware.collectives import message_call
from shardwright_profile.hardware.device_rates import rate_entries
from shardwright_profile.hardware.entries import Entry, OverlapEntry, PairEntry
from shardwright_profile.hardware.estimate import Line, Workload, estimate_words, least_s, line_through
from shardwright_profile.hardware.job import Progress, Remark
from shardwright_profile.hardware.message_kinds import (
    ALWAYS_BYTES,
    MessageKind,
    PairRound,
    always_sizes,
    message_kinds,
    overlap_kinds,
    overlap_sizes,
    pair_rounds,
)
from shardwright_profile.hardware.overlap import CASE_MESSAGES, overlap_entries
from shardwright_profile.hardware.pairs import pair_entries
from shardwright_profile.hardware.points import point_entries
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, agreed, timed_repeats

__all__ = ["sweep"]

_POINTS_SHARE = 0.7
"""Of the time that is left after the rates; the larger messages take most of it."""
_PAIRS_SHARE = 1 / 3
"""Of what is left then; overlap has the rest."""
_PAIR_BYTES = {"cpu": ALWAYS_BYTES, "cuda": 16 * ALWAYS_BYTES}
"""The larger message of a pair: on GPUs 1 MiB takes hardly longer than nothing."""


class _Agenda(NamedTuple):
    """What there is to time."""

    kinds: tuple[MessageKind, ...]
    rounds: tuple[PairRound, ...]
    overlapped: tuple[MessageKind, ...]

    @property
    def steps(self) -> int:
        return 1 + len(self.kinds) + len(self.rounds) + len(self.overlapped)


class _Timed(NamedTuple):
    step: int
    what: object
    entries: Sequence[Entry]


def sweep(session: Session, say: Callable[[Progress | Remark], None]) -> list[Entry]:
    """Measure everything; all ranks of the world call this and get the same entries, in the same order.

    Each entry is in the journal before the next is measured; what is there already is not measured again.
    """
    agenda = _agenda(session)
    found: list[Entry] = []
    for timed in _timed(session, agenda, say):
        if session.journal.add(timed.entries):
            words = f"{timed.what}: {max(timed.entries, key=_worst)}"
            say(Progress(step=timed.step, steps=agenda.steps, words=words))
        found.extend(timed.entries)
    return found


def _agenda(session: Session) -> _Agenda:
    identity = session.job.identity
    kinds = message_kinds(session.cluster)
    small = min(-(-size // 4) * 4 for size in (identity.min_bytes, identity.max_bytes))
    large = max(small, min(identity.max_bytes, _PAIR_BYTES[session.device.type]) // 4 * 4)
    return _Agenda(kinds, pair_rounds(session.cluster, sorted({small, large})), overlap_kinds(kinds))


def _timed(session: Session, agenda: _Agenda, say: Callable[[Progress | Remark], None]) -> Iterator[_Timed]:
    started = perf_counter()
    for rate in rate_entries(session):
        yield _Timed(0, "devices", [rate])
    work = _workload(session, agenda)
    line = _calibrated(session, agenda) if agenda.kinds else Line(0.0, 0.0)

    def left_s() -> float:
        return session.job.time_budget_s - agreed(perf_counter() - started, session.device)

    needed_s = session.job.time_budget_s - left_s() + least_s(work, line)
    words = estimate_words(work, session.journal.kept_count, needed_s, session.job.time_budget_s)
    say(Remark(words=words))
    for kind, point in point_entries(session, agenda.kinds, _POINTS_SHARE * left_s()):
        yield _Timed(1 + agenda.kinds.index(kind), kind, [point])
    step = 1 + len(agenda.kinds)
    for timed, pairs in pair_entries(session, agenda.rounds, _PAIRS_SHARE * left_s()):
        yield _Timed(step + agenda.rounds.index(timed), timed, pairs)
    step += len(agenda.rounds)
    for kind, overlaps in overlap_entries(session, agenda.overlapped, left_s()):
        yield _Timed(step + agenda.overlapped.index(kind), f"beside a computation, {kind}", overlaps)


def _workload(session: Session, agenda: _Agenda) -> Workload:
    """What is timed however short the budget is, less what the journal has."""
    lowest, highest = session.job.identity.min_bytes, session.job.identity.max_bytes
    find = session.journal.find

    def always(kind: MessageKind) -> tuple[int, ...]:
        return always_sizes(kind.key.group_size, lowest, highest)

    def beside(kind: MessageKind) -> tuple[int, ...]:
        return overlap_sizes(kind.key.group_size, lowest, highest)

    return Workload(
        points=[size for kind in agenda.kinds for size in always(kind) if not find("point", *kind.key, size)],
        pairs=[r.message_bytes for r in agenda.rounds if not find("pair", *r.pairs[0], r.message_bytes)],
        overlap=[
            size
            for kind in agenda.overlapped
            for size in beside(kind)
            if size in always(kind) and not find("overlap", *kind.key[:2], size, 1.0)
        ],
        case_messages=CASE_MESSAGES,
        least_repeats=session.least_repeats,
        warm_up_repeats=WARM_UP_REPEATS,
    )


def _calibrated(session: Session, agenda: _Agenda) -> Line:
    """What a message takes by its size: an all_reduce of the largest group, at the smallest size and at 1 MiB."""
    (kind, *_) = (k for k in agenda.overlapped if k.key.collective is Collective.ALL_REDUCE)
    sizes = always_sizes(kind.key.group_size, session.job.identity.min_bytes, session.job.identity.max_bytes)
    found = []
    for size in (sizes[0], sizes[-1]):
        call = message_call(kind, size, session.process_groups.mine(kind.groups), session.device)
        timed_repeats(call, WARM_UP_REPEATS, session.device)
        found.append((size, float(np.median(timed_repeats(call, WARM_UP_REPEATS, session.device)))))
    return line_through(*found)


def _worst(entry: Entry) -> float:
    """Of the entries that are measured together this one is told."""
    match entry:
        case PairEntry():
            return entry.time_s
        case OverlapEntry():
            return entry.compute_slowdown
        case _:
            return 0.0
