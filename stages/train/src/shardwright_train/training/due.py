"""The times at which a run saves and stops."""

import time
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Due:
    """A schedule of saves and of the stop, by this process's clock; the step shares its decision with all ranks."""

    every_steps: int
    every_minutes: float
    """Minutes between checkpoints; 0: by steps alone."""
    max_time_s: float | None
    """Seconds after which the run stops in order; None: never."""
    began_s: float = field(default_factory=time.monotonic)
    saved_s: float = field(default_factory=time.monotonic)

    def by_step(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step."""
        return step % self.every_steps == 0

    def by_time(self) -> bool:
        """Return whether the last checkpoint is older than `every_minutes`."""
        return 0 < self.every_minutes * 60 < time.monotonic() - self.saved_s

    def to_stop(self) -> bool:
        """Return whether the time of this process is up."""
        return self.max_time_s is not None and time.monotonic() - self.began_s > self.max_time_s

    def saved(self) -> "Due":
        """Return the schedule after a checkpoint saved now."""
        return replace(self, saved_s=time.monotonic())
