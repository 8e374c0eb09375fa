"""Confidence intervals of medians of repeated times, and outliers among the times."""

from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_REPEATS = 6
"""Minimum number of repeats whose extremes hold the median with a confidence of 95 %: 1 - 2 / 2**6 is 97 %."""
SETTLED = 0.03
"""Relative half width of the median's confidence interval at which a time needs no more repeats."""

_CONFIDENCE = 0.95
_OUTLYING = 3 * 1.4826
"""Three standard deviations, in median absolute deviations of a normal distribution."""


def median_interval(times_s: ArrayLike) -> float:
    """Return half of the 95 % confidence interval of the median, over the median; 0 for one repeat.

    The interval lies between two order statistics and assumes no distribution: the median of n independent times lies
    between the k-th smallest and the k-th largest with probability 1 - 2 P(B < k), B binomial of n and 1/2 (David and
    Nagaraja, Order Statistics, 3rd ed., section 7.1; Le Boudec, Performance Evaluation, theorem 2.1). The largest such
    k is taken. Under 6 repeats no k reaches 95 %: the interval is then their whole range, which covers less.
    """
    ordered = np.sort(np.asarray(times_s, dtype=np.float64))
    k = _order(len(ordered))
    return float((ordered[-k] - ordered[k - 1]) / 2 / np.median(ordered))


def _order(repeats: int) -> int:
    """Return the largest k with 2 P(B < k) <= 5 % for B binomial of `repeats` and 1/2, at least 1; sums are exact."""
    below, k = 0, 0
    while 2 * (below + comb(repeats, k)) <= (1 - _CONFIDENCE) * 2**repeats:
        below += comb(repeats, k)
        k += 1
    return max(1, k)


def settled(times_s: ArrayLike) -> bool:
    """Return whether the median of at least 6 repeats is known to within 3 %."""
    return np.size(times_s) >= MIN_REPEATS and median_interval(times_s) <= SETTLED


def outliers(times_s: ArrayLike) -> NDArray[np.bool_]:
    """Return which times are above the median by more than 3 scaled median absolute deviations: [times] bool.

    The scale 1.4826 makes that deviation a normal distribution's standard deviation (Leys et al. 2013, Detecting
    outliers). Times scatter upwards only: a fast one is no outlier.
    """
    times = np.asarray(times_s, dtype=np.float64)
    median = np.median(times)
    return np.asarray(times > median + _OUTLYING * np.median(np.abs(times - median)))


def more_repeats(have: int, max_repeats: int, left_s: float, one_s: float) -> int:
    """Return the repeats of the next round: half as many again, within time and `max_repeats`; 0 where none fits."""
    return max(0, min(max_repeats - have, max(MIN_REPEATS, have // 2), int(left_s / one_s)))
