"""Numbers with their units, for people."""

from collections.abc import Callable
from time import monotonic


def seconds_text(time_s: float) -> str:
    """Return a time with three significant figures, in the unit that leaves one to three digits before the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if time_s >= size:
            return f"{_three_figures(time_s / size)} {unit}"
    return f"{time_s * 1e6:.3g} µs" if time_s else "0 s"


def duration_text(time_s: float) -> str:
    """Return a duration in words: whole seconds, minutes, hours and minutes, or days and hours."""
    seconds = round(time_s)
    if seconds < 100:
        return f"{seconds} s"
    minutes = round(time_s / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, over = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {over} min"
    days, over = divmod(round(minutes / 60), 24)
    return f"{days} d {over} h"


def bytes_text(size_bytes: float) -> str:
    """Return a size with three significant figures, in the largest binary unit in which it is at least 1."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 2**power:
            return f"{_three_figures(size_bytes / 2**power)} {unit}"
    return f"{size_bytes:.0f} B"


def gib_text(size_bytes: float, decimals: int = 2) -> str:
    """Return a size in GiB with a fixed number of decimals; sizes below 1 GiB as in `bytes_text`."""
    return bytes_text(size_bytes) if abs(size_bytes) < 2**30 else f"{size_bytes / 2**30:.{decimals}f} GiB"


def rate_text(bytes_per_s: float) -> str:
    """Return a rate in decimal megabytes or gigabytes per second."""
    return f"{bytes_per_s / 1e6:.3g} MB/s" if bytes_per_s < 1e9 else f"{bytes_per_s / 1e9:.3g} GB/s"


def usd_text(usd: float) -> str:
    """Return a price with three significant figures, or in whole dollars if it is at least $1,000."""
    return f"${usd:.3g}" if usd < 1000 else f"${usd:,.0f}"


def _three_figures(amount: float) -> str:
    """Return three significant figures, without an exponent for large amounts."""
    return f"{amount:.3g}" if amount < 1000 else f"{amount:.0f}"


# Remaining time of long work, for progress messages.


class TimeLeft:
    """Remaining time of some work, extrapolated from the progress since the first call of `words`."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def words(self, left: int) -> str:
        """Return the time for the remaining `left` items, such as `, about 3 min left`; empty if it is not known."""
        now_s = self._clock()
        if self._first is None:
            self._first = left, now_s
        first_left, first_s = self._first
        if left == 0 or left >= first_left:
            return ""
        return f", about {duration_text((now_s - first_s) / (first_left - left) * left)} left"
