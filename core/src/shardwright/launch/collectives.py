"""The first collective that some ranks of a hanging group have not entered, from PyTorch's flight recorder.

Each rank writes its flight recorder's trace as JSON when the launcher asks, while it hangs: see `Heartbeat.answer`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from shardwright.plan.group_names import described_ranks

_MAX_WAITING = 100
"""Largest number of unfinished collectives that are reported for a rank, the earliest first."""
_WORLD = "default_pg"
"""PyTorch's description of the process group of all ranks."""


class _Entry(msgspec.Struct, frozen=True):
    """A record of PyTorch's flight recorder: one collective."""

    record_id: int
    process_group: tuple[str, str]
    """Name (the same on all ranks) and description of the process group."""
    profiling_name: str
    """Backend and kind of the collective, such as `nccl:all_reduce`."""
    is_p2p: bool
    collective_seq_id: int
    p2p_seq_id: int
    time_created_ns: int
    state: str
    retired: bool

    @property
    def lane(self) -> tuple[str, str, bool]:
        """Return the process group and whether the record is a point-to-point message, which is numbered separately."""
        return *self.process_group, self.is_p2p

    @property
    def number(self) -> int:
        return self.p2p_seq_id if self.is_p2p else self.collective_seq_id


class _Trace(msgspec.Struct, frozen=True):
    entries: tuple[_Entry, ...] = ()


class Waiting(msgspec.Struct, frozen=True):
    """A collective that a rank has entered and that has not completed."""

    number: int
    name: str
    entered_ns: int
    """Wall-clock time in nanoseconds when the rank entered the collective."""


class Entered(msgspec.Struct, frozen=True):
    """The last collective that a rank has entered in a process group, and the collectives in which it waits."""

    group: str
    description: str
    p2p: bool
    """Whether this counts the group's point-to-point messages instead of its collectives."""
    last: int
    """Number of the last collective or message that the rank has entered."""
    waiting: tuple[Waiting, ...]


class RankCollectives(msgspec.Struct, frozen=True):
    """The progress of a rank in all its process groups."""

    groups: tuple[Entered, ...]
    whole: bool
    """Whether every collective that the rank has entered is still recorded."""


class Missing(NamedTuple):
    """A collective in which some ranks wait and that other ranks have not entered."""

    rank: int
    """Lowest rank that has not entered the collective."""
    text: str


def collectives_of(trace: bytes) -> RankCollectives:
    """Return a rank's progress from its flight recorder's trace; raise msgspec.MsgspecError if it is not a trace."""
    entries = msgspec.json.decode(trace, type=_Trace).entries
    lanes: dict[tuple[str, str, bool], list[_Entry]] = {}
    for entry in entries:
        lanes.setdefault(entry.lane, []).append(entry)
    groups = tuple(_entered(lane, recorded) for lane, recorded in lanes.items())
    return RankCollectives(groups, whole=min((entry.record_id for entry in entries), default=0) == 0)


def _entered(lane: tuple[str, str, bool], entries: Sequence[_Entry]) -> Entered:
    unfinished = [e for e in entries if not e.retired and e.state != "completed"][:_MAX_WAITING]
    waiting = tuple(Waiting(e.number, e.profiling_name.rpartition(":")[2], e.time_created_ns) for e in unfinished)
    return Entered(*lane, max(e.number for e in entries), waiting)


def first_missing(known: Mapping[int, RankCollectives]) -> Missing | None:
    """Return the earliest collective in which one rank waits and that another has not entered; None if there is none.

    If collectives wait for each other, they were entered one after the other: the others wait for the earliest one.
    """
    _, earliest = min(_missing(known), key=lambda entered: entered[0], default=(0, None))
    return earliest


def _missing(known: Mapping[int, RankCollectives]) -> Iterator[tuple[int, Missing]]:
    """Yield each collective that a rank has not entered, with the time at which a rank first entered it."""
    lanes: dict[tuple[str, str, bool], dict[int, Entered]] = {}
    for rank, progress in known.items():
        for entered in progress.groups:
            lanes.setdefault((entered.group, entered.description, entered.p2p), {})[rank] = entered
    for (_, description, _), members in lanes.items():
        group = sorted(known if description == _WORLD else described_ranks(description))  # empty if no plan made it
        last = {rank: members[rank].last if rank in members else 0 for rank in group if rank in known}
        seen = [rank for rank in last if rank in members or known[rank].whole]
        numbers = {waiting.number: waiting for entered in members.values() for waiting in entered.waiting}
        for number, waiting in numbers.items():
            if behind := [rank for rank in seen if last[rank] < number]:
                there = [(w.entered_ns, rank) for rank, e in members.items() for w in e.waiting if w.number == number]
                which = f"{waiting.name} {number} of {'all ranks' if description == _WORLD else description}"
                text = f"{_named(behind)} not entered {which}, in which {_waits(sorted(rank for _, rank in there))}"
                yield min(there)[0], Missing(behind[0], text)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {' '.join(map(str, ranks))} have"


def _waits(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {' '.join(map(str, ranks))} wait"
