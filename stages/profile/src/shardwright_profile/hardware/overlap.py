"""How a collective and a computation slow each other down (only the ranks of a sweep import this)."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardwright_profile.hardware.both import Both, Start, both_clock
from shardwright_profile.hardware.collectives import message_call
from shardwright_profile.hardware.entries import OverlapEntry, PointEntry
from shardwright_profile.hardware.message_kinds import COMPUTE_RATIOS, MessageKind, always_sizes, overlap_sizes
from shardwright_profile.hardware.session import Session
from shardwright_profile.hardware.timing import WARM_UP_REPEATS, agreed, aligned, gathered, repeated

__all__ = ["CASE_MESSAGES", "overlap_entries"]

CASE_MESSAGES = sum(ratio + 1 + max(1.0, ratio) for ratio in COMPUTE_RATIOS)
"""How many times a message's own time one repeat of all ratios takes that does not slow down: each alone, and both."""

_SIDES = {"cpu": (32, 64, 128, 256, 512), "cuda": (256, 512, 1024, 2048, 4096)}
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_PRODUCTS_IN_MESSAGE = 8
_TRIES = 5


class _Computation(NamedTuple):
    """A product of two square matrices, and how long one takes."""

    factor: torch.Tensor
    product: torch.Tensor
    time_s: float

    def once(self) -> None:
        torch.mm(self.factor, self.factor, out=self.product)


def overlap_entries(
    session: Session, kinds: Sequence[MessageKind], time_s: float
) -> Iterator[tuple[MessageKind, list[OverlapEntry]]]:
    """Time each kind of message beside computations of several lengths, for about `time_s` seconds.

    Each size up to 1 MiB is timed, and larger ones while a kind's share of the time lasts; none that the kind was not
    timed at alone. All ranks call this and get the same.
    """
    started = perf_counter()
    clock = both_clock(session.device)
    identity = session.job.identity
    computations: list[_Computation] = []
    for number, kind in enumerate(kinds):
        always = always_sizes(kind.key.group_size, identity.min_bytes, identity.max_bytes)
        for message_bytes in overlap_sizes(kind.key.group_size, identity.min_bytes, identity.max_bytes):
            point = session.journal.find("point", *kind.key, message_bytes)
            if not isinstance(point, PointEntry):
                break
            keys = [("overlap", *kind.key[:2], message_bytes, ratio) for ratio in COMPUTE_RATIOS]
            kept = [entry for key in keys if isinstance(entry := session.journal.find(*key), OverlapEntry)]
            if len(kept) < len(keys):
                left_s = (time_s - agreed(perf_counter() - started, session.device)) / (len(kinds) - number)
                repeats = WARM_UP_REPEATS + session.least_repeats
                if message_bytes not in always and left_s < CASE_MESSAGES * repeats * float(np.median(point.times_s)):
                    break
                computations = computations or _computations(clock, session.device)
                kept = _timed(session, clock, computations, kind, point, left_s / 2)
            yield kind, kept


def _timed(
    session: Session,
    clock: Both,
    computations: Sequence[_Computation],
    kind: MessageKind,
    point: PointEntry,
    share_s: float,
) -> list[OverlapEntry]:
    """The message beside computations of each length."""
    device = session.device
    start = message_call(kind, point.message_bytes, session.process_groups.mine(kind.groups), device, wait=False)
    point_s = float(np.median(point.times_s))
    fitting = [c for c in computations if c.time_s * _PRODUCTS_IN_MESSAGE <= point_s]
    computation = fitting[-1] if fitting else computations[0]
    entries = []
    for ratio in COMPUTE_RATIOS:
        # Alone and at once by turns: what else the machine does meanwhile slows all of them alike.
        products = max(1, round(ratio * point_s / computation.time_s))
        turns = _Turns(
            clock, device, ((None, computation, products), (start, computation, 0), (start, computation, products))
        )
        turns.measure(WARM_UP_REPEATS)
        times_s = repeated(turns.measure, share_s / len(COMPUTE_RATIOS), session.most_repeats, device)
        compute_s, message_s, slowed_compute_s, slowed_message_s = np.median(times_s, axis=1).tolist()
        entries.append(
            OverlapEntry(
                collective=kind.key.collective,
                group_size=kind.key.group_size,
                collective_bytes=point.message_bytes,
                compute_ratio=ratio,
                compute_s=compute_s,
                collective_s=message_s,
                compute_slowdown=slowed_compute_s / compute_s,
                collective_slowdown=slowed_message_s / message_s,
            )
        )
    return entries


class _Turns(NamedTuple):
    """What is timed by turns: a message or None, a computation, and how many products of it."""

    clock: Both
    device: torch.device
    turns: Sequence[tuple[Start | None, _Computation, int]]

    def measure(self, repeats: int) -> NDArray[Any]:
        """Seconds on the slowest rank of each turn's computation and message, of those that have them.

        [series, repeats] float64: turn by turn, the computation before the message.
        """
        mine = torch.zeros(len(self.turns), 2, repeats, dtype=torch.float64)
        for repeat in range(repeats):
            for turn, (start, computation, products) in enumerate(self.turns):
                aligned(self.device)
                times_s = self.clock(start, computation.once, products)
                mine[turn, :, repeat] = torch.tensor(times_s, dtype=torch.float64)
        there = np.array([[products > 0, start is not None] for start, _, products in self.turns])
        return np.asarray(gathered(mine, self.device).max(axis=0)[there])


def _computations(clock: Both, device: torch.device) -> list[_Computation]:
    """Products of growing matrices; a computation is made of the largest that divide it finely."""
    made = []
    for side in _SIDES[device.type]:
        factor = torch.ones(side, side, dtype=_DTYPES[device.type], device=device)
        untimed = _Computation(factor, torch.empty_like(factor), 0.0)
        turns = _Turns(clock, device, ((None, untimed, _TRIES),))
        turns.measure(1)
        times_s = turns.measure(_TRIES)
        made.append(untimed._replace(time_s=float(np.median(times_s[0])) / _TRIES))
    return made
