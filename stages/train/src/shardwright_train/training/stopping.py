"""Orderly stops: signals, time limits, when saves and stops are due, and the note that a stop leaves."""

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from shardwright.types import StopNote

NOTE, DONE = "STOPPED.json", "DONE.json"
"""Names of the final notes of a stopped and of a finished run."""


def stop_note(step: int, steps: int, in_time: bool, checkpoint: object) -> StopNote:
    """Return the note of a run that stops now; `in_time` unless its own time limit was reached."""
    return StopNote(
        step=step,
        steps=steps,
        reason="signal" if in_time else "max_time_s",
        checkpoint=str(checkpoint),
        time_utc=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@dataclass(frozen=True)
class Grace:
    """The time between a stop signal and the kill that follows it, and the known duration of a stop."""

    given_s: float | None
    """Seconds from the stop signal to the kill; None: unknown."""
    saves: int
    """Number of checkpoints written at a stop: its own and, if asynchronous, possibly one in progress."""
    step_s: float = 0.0
    """Seconds of the longest step so far."""
    warned: bool = False

    def after(self, step_s: float, saves_s: Sequence[float]) -> "Grace":
        """Return the grace after one more step; warn once if it is too short for a step and the longest save."""
        step_s, save_s = max(step_s, self.step_s), max(saves_s, default=0.0)
        takes_s = step_s + self.saves * save_s
        if self.given_s is None or self.warned or takes_s <= self.given_s:
            return replace(self, step_s=step_s)
        duration = f"{takes_s:.1f} s (a step {step_s:.1f} s, a save {save_s:.1f} s)"
        remedy = "steps since the last save will be lost: ask for more time, or save more often"
        print(f"warning: --grace-s {self.given_s:g}: a stop takes {duration}: {remedy}", file=sys.stderr, flush=True)
        return replace(self, step_s=step_s, warned=True)


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Collect the stop signals of this process instead of ending it."""
    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)


@dataclass(frozen=True)
class Due:
    """The schedule of saves and of the stop, by this process's clock; all ranks agree on it in each step."""

    every_steps: int
    every_minutes: float
    """Minutes between checkpoints; 0: only by steps."""
    max_time_s: float | None
    """Seconds after which the run saves and stops; None: never."""
    began_s: float = field(default_factory=time.monotonic)
    saved_s: float = field(default_factory=time.monotonic)

    def by_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step."""
        return step % self.every_steps == 0

    def by_time(self) -> bool:
        """Whether the last checkpoint is older than `every_minutes`."""
        return 0 < self.every_minutes * 60 < time.monotonic() - self.saved_s

    def to_stop(self) -> bool:
        """Return whether this process's time limit was reached."""
        return self.max_time_s is not None and time.monotonic() - self.began_s > self.max_time_s

    def saved(self) -> "Due":
        """Return the schedule after a checkpoint saved now."""
        return replace(self, saved_s=time.monotonic())
