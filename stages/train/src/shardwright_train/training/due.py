"""When a run saves, and when its time is up."""

import time
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Due:
    """By the clock of this process; what one rank finds due, the step tells all."""

    every_steps: int
    every_minutes: float
    """0: by steps alone."""
    max_time_s: float | None
    """After which the run stops in order; None: never."""
    began_s: float = field(default_factory=time.monotonic)
    saved_s: float = field(default_factory=time.monotonic)

    def by_step(self, step: int) -> bool:
        """Whether a step is one to save after."""
        return step % self.every_steps == 0

    def by_time(self) -> bool:
        """Whether the last checkpoint is older than asked."""
        return 0 < self.every_minutes * 60 < time.monotonic() - self.saved_s

    def to_stop(self) -> bool:
        """Whether the time of this process is up."""
        return self.max_time_s is not None and time.monotonic() - self.began_s > self.max_time_s

    def saved(self) -> "Due":
        """The same after a checkpoint."""
        return replace(self, saved_s=time.monotonic())
