"""How a launch came to fail: which rank to name, and the words for it."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright_formats.io.errors import Stopped
from shardwright_train.watch import NotedError, Step

__all__ = ["Evidence", "Verdict", "verdict"]

_SIGTERM_STATUS = -signal.SIGTERM
# NCCL ends a rank by SIGABRT when another one is gone, so that alone is no sign of having been the first.
_SIGABRT_STATUS = -signal.SIGABRT


@dataclass(frozen=True)
class Evidence:
    """What is known of one rank when the first of them has failed."""

    rank: int
    status: int | None
    """Its exit status, negative for a signal; None if it had not ended by itself."""
    seen_s: float
    """When its end was seen, by `time.monotonic`; later than its end by as much as the launcher looks away."""
    step: Step | None
    error: NotedError | None

    @property
    def failed(self) -> bool:
        """Whether it ended other than well, or noted why it is about to."""
        return self.error is not None or bool(self.status)

    @property
    def failed_s(self) -> float:
        """When it failed, as well as can be known."""
        return self.seen_s if self.error is None else self.error.time_s

    @property
    def where(self) -> str:
        """In which step it was."""
        return self.step.where if self.step else "in start-up"


@dataclass(frozen=True)
class Verdict:
    """The one line to end with and, of an error that ranks reported in order, its exit code."""

    words: str
    exit_code: int | None = None
    agreed: bool = False
    """Whether all ranks of this node reported the same."""
    trace: str = ""
    """The traceback of an error that the rank had no time to print itself."""


def verdict(ranks: Sequence[Evidence], *, several_nodes: bool, signalled: bool) -> Verdict:
    """Name the rank that failed first, as well as can be known: its peers fail a moment after it.

    A rank that was killed says nothing and its peers notice before the launcher does, so it goes first; then by time
    those that noted an error, a lost connection apart; then those that ended without a word; and only when all of them
    lost a connection, the one that lost it first. `signalled` says that they were asked to stop.
    """
    first = min((rank for rank in ranks if rank.failed), key=_order)
    error, status = first.error, first.status
    if error is not None and not _killed(first):
        if error.exit_code is not None:
            agreed = all(rank.error is not None and rank.error.text == error.text for rank in ranks)
            return Verdict(error.text, error.exit_code, agreed)
        words = f"rank {first.rank}: failed {first.where}: {error.text}"
        if error.lost_connection:
            there = "a rank of another node may have ended: look there" if several_nodes else error.text
            words = f"rank {first.rank}: lost its connection first, {first.where}: {there}"
        return Verdict(words, trace=error.trace if status is None else "")
    assert status is not None
    if status == _SIGTERM_STATUS and signalled:
        return Verdict(f"stopped {first.where}: run the same command again", Stopped.exit_code)
    if status < 0:
        words = f"rank {first.rank}: was killed by {signal.Signals(-status).name} {first.where}"
        return Verdict(f"{words}: the other ranks were ended")
    return Verdict(f"rank {first.rank}: ended with status {status} {first.where}: its last words stand above")


def _killed(rank: Evidence) -> bool:
    return rank.status is not None and rank.status < 0 and (rank.status != _SIGABRT_STATUS or rank.error is None)


def _order(rank: Evidence) -> tuple[int, float]:
    if _killed(rank) and rank.status != _SIGABRT_STATUS:
        return 0, rank.seen_s
    if _killed(rank) or (rank.error is not None and not rank.error.lost_connection):
        return 1, rank.failed_s
    return (2 if rank.error is None else 3), rank.failed_s
