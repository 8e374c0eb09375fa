"""Orderly stops: the signals, the remaining time, and the note that is written."""

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from shardwright_formats.types import StopNote

NOTE, DONE = "STOPPED.json", "DONE.json"
"""Names of the final notes of a stopped and of a finished run."""


def stop_note(step: int, steps: int, in_time: bool, checkpoint: object) -> StopNote:
    """Return the note of a run that stops now; `in_time` unless its own time is up."""
    return StopNote(
        step=step,
        steps=steps,
        reason="signal" if in_time else "max_time_s",
        checkpoint=str(checkpoint),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@dataclass(frozen=True)
class Grace:
    """The time from a stop signal to the kill that follows it, with the known duration of a stop."""

    given_s: float | None
    """Seconds from the stop signal to the kill; None: unknown."""
    saves: int
    """Number of checkpoints written at a stop: its own and, if asynchronous, possibly one in progress."""
    step_s: float = 0.0
    """Seconds of the longest step so far."""
    warned: bool = False

    def after(self, step_s: float, saves_s: Sequence[float]) -> "Grace":
        """Return the grace after one more step; warn once where it is too short for a step and the longest save."""
        step_s, save_s = max(step_s, self.step_s), max(saves_s, default=0.0)
        takes_s = step_s + self.saves * save_s
        if self.given_s is None or self.warned or takes_s <= self.given_s:
            return replace(self, step_s=step_s)
        told = f"{takes_s:.1f} s (a step {step_s:.1f} s, a save {save_s:.1f} s)"
        remedy = "steps since the last save will be lost: ask for more time, or save more often"
        print(f"warning: --grace-s {self.given_s:g}: a stop takes {told}: {remedy}", file=sys.stderr, flush=True)
        return replace(self, step_s=step_s, warned=True)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Collect the stop signals of this process instead of dying of them."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
