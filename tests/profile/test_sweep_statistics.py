from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright_profile.hardware.profile import MIN_REPEATS, median_interval, more_repeats, outliers, settled

_TIMES = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=40)


def test_the_interval_lies_between_the_tabulated_order_statistics():
    # David and Nagaraja's table and Le Boudec's agree: of 10 times the 2nd and 9th, of 20 the 6th and 15th, of 25 the
    # 8th and 18th, of 50 the 18th and 33rd, of 100 the 40th and 61st.
    for count, low, high in [(6, 1, 6), (8, 1, 8), (9, 2, 8), (10, 2, 9), (20, 6, 15), (25, 8, 18), (100, 40, 61)]:
        times = np.arange(1.0, count + 1)
        assert median_interval(times[::-1]) == pytest.approx((high - low) / 2 / np.median(times))


@pytest.mark.parametrize("count", range(2, 13))
def test_the_interval_is_the_narrowest_pair_of_order_statistics_that_holds_the_median_often_enough(count):
    # Each time is above or below the true median by a fair coin: count all outcomes.
    heads = [sum(coins) for coins in product((0, 1), repeat=count)]

    def coverage(k: int) -> float:
        return sum(k <= below <= count - k for below in heads) / 2**count

    narrowest = max((k for k in range(1, count // 2 + 1) if coverage(k) >= 0.95), default=1)
    times = np.arange(1.0, count + 1)
    assert median_interval(times) == pytest.approx((count + 1 - 2 * narrowest) / 2 / np.median(times))
    assert (coverage(1) >= 0.95) == (count >= MIN_REPEATS)


def test_one_repeat_has_no_interval_and_is_never_settled():
    assert median_interval([2.0]) == 0
    assert not settled([2.0])


def test_a_median_settles_at_three_percent_with_at_least_six_repeats():
    assert settled([0.971, 1, 1, 1, 1, 1.03])
    assert not settled([0.969, 1, 1, 1, 1, 1.032])
    assert not settled([1.0] * 5)


@given(_TIMES, st.floats(1e-3, 1e3))
def test_the_interval_depends_neither_on_the_unit_nor_on_the_order(times, factor):
    scaled = [factor * time for time in reversed(times)]
    assert median_interval(scaled) == pytest.approx(median_interval(times), rel=1e-9, abs=1e-9)


def test_a_time_far_above_the_others_is_an_outlier_and_a_fast_one_is_not():
    # The median is 10, the median absolute deviation 1: the limit is 10 + 3 * 1.4826 = 14.4478.
    times = [9, 10, 11, 9, 11, 14.4, 14.5, 0.1, 10]
    assert outliers(times).tolist() == [time == 14.5 for time in times]
    assert not outliers([1.0]).any()
    assert not outliers([1.0, 100.0]).any()


@given(_TIMES)
def test_fewer_than_half_of_the_times_are_outliers_and_all_of_them_are_above_the_rest(times):
    marked = outliers(times)
    assert 2 * marked.sum() < len(times) + 1
    if marked.any():
        assert np.asarray(times)[marked].min() > np.asarray(times)[~marked].max()


def test_rounds_grow_by_half_within_the_time_and_the_most():
    assert more_repeats(6, 100, left_s=1e9, one_s=1.0) == 6
    assert more_repeats(40, 100, left_s=1e9, one_s=1.0) == 20
    assert more_repeats(95, 100, left_s=1e9, one_s=1.0) == 5
    assert more_repeats(40, 100, left_s=3.5, one_s=1.0) == 3
    assert more_repeats(5, 5, left_s=1e9, one_s=1.0) == 0
    assert more_repeats(6, 100, left_s=-4.0, one_s=1.0) == 0
