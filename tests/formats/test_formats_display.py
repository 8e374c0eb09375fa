"""Numbers and pictures for people: axes, markers, and pictures that stand alone."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from shardwright.display.chart import Panel, bytes_axis, linear_axis, logarithmic_axis
from shardwright.display.svg import document, marker, picture, series_numbers, text, ticks
from shardwright.display.units import TimeLeft, bytes_text, duration_text, gib_text, rate_text, seconds_text, usd_text


@pytest.mark.parametrize(("low", "high"), [(1e-6, 2.0), (0.002, 0.0021), (3.0, 3.0), (0.9, 110.0)])
def test_a_logarithmic_axis_names_round_values_inside_it_and_equal_ratios_are_equally_far(low, high):
    axis = logarithmic_axis(low, high, 100, 400, "{:g}".format)
    values = [value for value, _ in axis.tick_labels]
    assert all(axis.low <= value <= axis.high for value in values) and axis.low < low <= high < axis.high
    assert values == sorted(set(values))
    assert axis.at(axis.low) == 100 and axis.at(axis.high) == pytest.approx(400)
    assert axis.at(2 * low) - axis.at(low) == pytest.approx(axis.at(4 * low) - axis.at(2 * low))


def test_a_short_logarithmic_axis_has_several_marks_and_one_of_bytes_powers_of_two():
    assert len(logarithmic_axis(0.02, 0.9, 0, 1, seconds_text).tick_labels) >= 4
    assert [words for _, words in logarithmic_axis(1024, 16 << 20, 0, 1, bytes_text, base=32).tick_labels] == [
        "1 KiB", "32 KiB", "1 MiB",
    ]  # fmt: skip


@pytest.mark.parametrize("high", [900, 5000, 3 << 20, 70 << 30])
def test_an_axis_of_bytes_starts_at_nothing_and_is_round_in_its_unit(high):
    axis = bytes_axis(high, 0, 100)
    assert axis.tick_labels[0] == (0, "0 B") and axis.tick_labels[-1][0] <= high
    steps = {after - before for (before, _), (after, _) in pairwise(axis.tick_labels)}
    assert len(steps) == 1 and 3 <= len(axis.tick_labels) <= 7


def test_an_axis_of_one_value_still_has_a_length():
    axis = linear_axis(5, 5, 0, 100)
    assert 0 <= axis.at(5) < axis.at(6) <= 100


@pytest.mark.parametrize(("low", "high"), [(-0.4, 0.4), (0, 7.7), (12, 13)])
def test_ticks_lie_between_both_ends(low, high):
    found = ticks(high, 4, low)
    assert len(found) >= 2 and low <= min(found) + 1e-9 and max(found) <= high + 1e-9
    assert low > 0 or 0 in found


def test_the_spread_of_a_point_does_not_leave_its_panel():
    panel = Panel(linear_axis(0, 10, 0, 100), linear_axis(0, 10, 100, 0))
    drawn = ElementTree.fromstring(f"<g>{panel.point(5, 9, (-3, 99), 0, 'nine')}</g>")
    (bar,) = drawn.iter("line")
    assert (float(bar.get("y1")), float(bar.get("y2"))) == (100, 0)
    assert drawn.find("circle/title").text == "nine"


def test_thirty_two_series_have_signs_of_their_own():
    signs = {marker(number, 0, 0) for number in range(32)}
    assert len(signs) == 32


def test_a_series_has_the_sign_that_it_means_whatever_stands_beside_it():
    usual = series_numbers({"tp 2": 1, "tp 1": 0, "tp 1 again": 0, "tp 4": 34})
    assert usual == {"tp 2": 1, "tp 1": 0, "tp 1 again": 3, "tp 4": 2}
    assert series_numbers({"tp 2": 1}) == {"tp 2": 1} and len(set(usual.values())) == 4


def test_a_picture_can_stand_in_a_file_of_its_own():
    drawn = document(picture(text(1, 2, "a < b"), 100, 50, "a label"))
    root = ElementTree.fromstring(drawn)
    assert root.get("viewBox") == "-12 -12 124 74" and (root.get("width"), root.get("height")) == ("124", "74")
    assert "prefers-color-scheme: dark" in drawn and "a &lt; b" in drawn
    assert "var(" not in drawn


@pytest.mark.parametrize(
    ("time_s", "words"),
    [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5900, "98 min"), (6000, "1 h 40 min"), (172799, "2 d 0 h"),
     (172000, "47 h 47 min"), (300000, "3 d 11 h")],
)  # fmt: skip
def test_a_time_to_wait_has_a_unit_that_people_count_in(time_s, words):
    assert duration_text(time_s) == words


def test_the_time_left_is_by_what_the_rest_took_and_is_not_said_before_it_is_known():
    """The first of 10 pieces is not counted: a run's first step compiles."""
    now_s = [100.0]
    left = TimeLeft(lambda: now_s[0])
    assert left.words(9) == ""
    now_s[0] = 130.0
    assert left.words(9) == "" and left.words(7) == ", about 2 min left"
    now_s[0] = 220.0
    assert left.words(1) == ", about 15 s left" and left.words(0) == ""


def test_numbers_have_three_figures_and_a_unit():
    assert [seconds_text(time_s) for time_s in (0, 2.5e-7, 0.0123456, 1.5, 1234.6)] == [
        "0 s", "0.25 µs", "12.3 ms", "1.5 s", "1235 s",
    ]  # fmt: skip
    assert [bytes_text(size) for size in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5120 GiB"]
    assert [gib_text(size) for size in (4 << 20, 3 << 29, 80 << 30)] == ["4 MiB", "1.50 GiB", "80.00 GiB"]
    assert gib_text(3 << 29, 1) == "1.5 GiB"
    assert [usd_text(usd) for usd in (0.01234, 12.34, 1234.5)] == ["$0.0123", "$12.3", "$1,234"]
    assert [rate_text(rate) for rate in (5e5, 2.5e9)] == ["0.5 MB/s", "2.5 GB/s"]
