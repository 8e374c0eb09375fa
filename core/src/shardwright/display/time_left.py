"""Remaining time of long work, for progress messages."""

from collections.abc import Callable
from time import monotonic

from shardwright.display.units import duration_text


class TimeLeft:
    """Remaining time of some work, extrapolated from the progress since the first call of `words`."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def words(self, left: int) -> str:
        """Return the time for the remaining `left` items, as `, about 3 min left`; empty if it is not known."""
        now_s = self._clock()
        if self._first is None:
            self._first = left, now_s
        first_left, first_s = self._first
        if left == 0 or left >= first_left:
            return ""
        return f", about {duration_text((now_s - first_s) / (first_left - left) * left)} left"
