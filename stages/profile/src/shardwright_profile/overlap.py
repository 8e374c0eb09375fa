"""How a collective and a computation slow each other down (only the ranks of a sweep import this)."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shardwright_profile.both import Both, Start, both_clock
from shardwright_profile.collectives import message_call
from shardwright_profile.entries import OverlapEntry, PointEntry
from shardwright_profile.message_kinds import ALWAYS_BYTES, COMPUTE_RATIOS, MessageKind, overlap_sizes
from shardwright_profile.session import Session
from shardwright_profile.timing import WARM_UP_REPEATS, agreed, aligned, gathered, repeated

__all__ = ["CASE_MESSAGES", "overlap_entries"]

CASE_MESSAGES = 1 + sum(ratio + max(1.0, ratio) for ratio in COMPUTE_RATIOS)
"""How many times a message's own time one case takes that does not slow down: it alone, each computation, and both."""

_SERIES = 1 + 2 * len(COMPUTE_RATIOS)
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
        for message_bytes in overlap_sizes(kind.key.group_size, identity.min_bytes, identity.max_bytes):
            point = session.journal.find("point", *kind.key, message_bytes)
            if not isinstance(point, PointEntry):
                break
            keys = [("overlap", *kind.key[:2], message_bytes, ratio) for ratio in COMPUTE_RATIOS]
            kept = [entry for key in keys if isinstance(entry := session.journal.find(*key), OverlapEntry)]
            if len(kept) < len(keys):
                left_s = (time_s - agreed(perf_counter() - started, session.device)) / (len(kinds) - number)
                repeats = WARM_UP_REPEATS + session.least_repeats
                if message_bytes > ALWAYS_BYTES and left_s < CASE_MESSAGES * repeats * float(np.median(point.times_s)):
                    break
                computations = computations or _computations(clock, session.device)
                kept = _timed(session, clock, computations, kind, message_bytes, left_s / 2)
            yield kind, kept


def _timed(
    session: Session,
    clock: Both,
    computations: Sequence[_Computation],
    kind: MessageKind,
    message_bytes: int,
    share_s: float,
) -> list[OverlapEntry]:
    """The message alone, and per length of computation: that alone, and both at once."""
    device = session.device
    start = message_call(kind, message_bytes, session.process_groups.mine(kind.groups), device, wait=False)

    def medians_s(start: Start | None, computation: _Computation, products: int) -> NDArray[Any]:
        """Of the computation and of the message on the slowest rank: [2]; of one that is not there 0."""

        def measure(repeats: int) -> NDArray[Any]:
            return _times(clock, start, computation, products, repeats, device)

        measure(WARM_UP_REPEATS)
        there = [products > 0, start is not None]
        times_s = repeated(lambda n: measure(n)[there], share_s / _SERIES, session.most_repeats, device)
        found = np.zeros(2)
        found[there] = np.median(times_s, axis=1)
        return found

    message_s = float(medians_s(start, computations[0], 0)[1])
    fitting = [c for c in computations if c.time_s * _PRODUCTS_IN_MESSAGE <= message_s]
    computation = fitting[-1] if fitting else computations[0]
    entries = []
    for ratio in COMPUTE_RATIOS:
        products = max(1, round(ratio * message_s / computation.time_s))
        compute_s = float(medians_s(None, computation, products)[0])
        both_s = medians_s(start, computation, products)
        entries.append(
            OverlapEntry(
                collective=kind.key.collective,
                group_size=kind.key.group_size,
                message_bytes=message_bytes,
                compute_ratio=ratio,
                compute_s=compute_s,
                message_s=message_s,
                compute_slowdown=float(both_s[0]) / compute_s,
                message_slowdown=float(both_s[1]) / message_s,
            )
        )
    return entries


def _times(
    clock: Both, start: Start | None, computation: _Computation, products: int, repeats: int, device: torch.device
) -> NDArray[Any]:
    """Seconds of the computation and of the message on the slowest rank, repeat by repeat: [2, repeats]."""
    mine = torch.zeros(2, repeats, dtype=torch.float64)
    for i in range(repeats):
        aligned(device)
        mine[:, i] = torch.tensor(clock(start, computation.once, products), dtype=torch.float64)
    return np.asarray(gathered(mine, device).max(axis=0))


def _computations(clock: Both, device: torch.device) -> list[_Computation]:
    """Products of growing matrices; a computation is made of the largest that divide it finely."""
    made = []
    for side in _SIDES[device.type]:
        factor = torch.ones(side, side, dtype=_DTYPES[device.type], device=device)
        untimed = _Computation(factor, torch.empty_like(factor), 0.0)
        _times(clock, None, untimed, _TRIES, 1, device)
        times_s = _times(clock, None, untimed, _TRIES, _TRIES, device)
        made.append(untimed._replace(time_s=float(np.median(times_s[0])) / _TRIES))
    return made
