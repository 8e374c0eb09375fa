"""Medians over repeats, and differences of two plans that were stepped alternately, with their standard errors."""

from collections.abc import Sequence
from math import inf, sqrt
from statistics import median, quantiles
from typing import NamedTuple

MAX_RELATIVE_ERROR = 0.2
"""Highest accepted ratio of a difference's standard error to the difference: above it, it is measured again, and
reported if that does not help."""


class Duration(NamedTuple):
    """A median over repeats and its standard error, in seconds."""

    median_s: float
    error_s: float

    @property
    def relative_error(self) -> float:
        """Return the standard error as a share of the median; infinity if the median is not above 0."""
        return self.error_s / self.median_s if self.median_s > 0 else inf

    def scaled(self, by: float) -> "Duration":
        """Return the duration and its error multiplied by a factor."""
        return Duration(by * self.median_s, by * self.error_s)


def median_of(repeats: Sequence[float]) -> Duration:
    """Return the median, and its error from quartiles: 1.253 sigma / sqrt(n), sigma = IQR / 1.349 (normal errors)."""
    if len(repeats) < 2:
        return Duration(median(repeats), 0.0)
    low, _, high = quantiles(repeats, n=4, method="inclusive")
    return Duration(median(repeats), 1.253 * (high - low) / 1.349 / sqrt(len(repeats)))


def paired_difference(few: Sequence[float], many: Sequence[float]) -> Duration:
    """Return the median of `many` minus `few`, paired by round, so that whatever slows a whole round cancels."""
    return median_of([more - less for less, more in zip(few, many, strict=True)])
