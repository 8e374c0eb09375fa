"""Axes and panels: values against values, on linear or logarithmic scales."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, floor, log
from typing import NamedTuple

from shardwright.display.svg import PALETTE, SOFT, element, line, marker, text, ticks
from shardwright.display.units import bytes_text


class ChartAxis(NamedTuple):
    """Values from `low` to `high`, drawn from `start` to `end` (px), with labels at round values."""

    low: float
    high: float
    start: float
    end: float
    tick_labels: Sequence[tuple[float, str]]
    scale: Callable[[float], float] = float

    def at(self, value: float) -> float:
        """Return the position of a value along the axis, in px."""
        low, high = self.scale(self.low), self.scale(self.high)
        return self.start + (self.scale(value) - low) / (high - low) * (self.end - self.start)


def linear_axis(
    low: float, high: float, start: float, end: float, label: Callable[[float], str] = "{:g}".format, count: int = 4
) -> ChartAxis:
    """Return an axis on which equal distances are equal differences."""
    high = high if high > low else low + 1
    return ChartAxis(low, high, start, end, [(value, label(value)) for value in ticks(high, count, low)])


def bytes_axis(high: float, start: float, end: float, count: int = 5) -> ChartAxis:
    """Return a linear axis of bytes from 0, with marks at round values in binary units."""
    unit = next(2.0**power for power in (30, 20, 10, 0) if high >= 2**power or power == 0)
    return ChartAxis(
        0, high, start, end, [(value * unit, bytes_text(value * unit)) for value in ticks(high / unit, count)]
    )


def logarithmic_axis(
    low: float, high: float, start: float, end: float, label: Callable[[float], str], base: int = 10
) -> ChartAxis:
    """Return an axis on which equal distances are equal ratios.

    Powers of `base` are labelled; if `base` is 10 and the axis short, also twice and five times each power.
    """
    low, high = low / 1.15, high * 1.15
    steps = (1, 2, 5) if base == 10 and high < 300 * low else (1,)
    powers = range(floor(log(low, base)), ceil(log(high, base)) + 1)
    values = [step * float(base) ** power for power in powers for step in steps]
    return ChartAxis(low, high, start, end, [(value, label(value)) for value in values if low <= value <= high], log)


class Panel(NamedTuple):
    """A plotting area with two axes; `y.start` is its lower edge."""

    x: ChartAxis
    y: ChartAxis

    def frame(self, title: str = "", below: str = "") -> str:
        """Return both axes with their lines, a title above, and the label of the horizontal axis below."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        soft = {"look": "soft small"}
        drawn = [text(left, top - 8, title, look="strong")] if title else []
        for value, words in self.y.tick_labels:
            drawn.append(line(left, self.y.at(value), right, self.y.at(value)))
            drawn.append(text(left - 6, self.y.at(value) + 4, words, text_anchor="end", **soft))
        for value, words in self.x.tick_labels:
            drawn.append(line(self.x.at(value), bottom, self.x.at(value), bottom + 4))
            drawn.append(text(self.x.at(value), bottom + 16, words, text_anchor="middle", **soft))
        drawn.append(line(left, bottom, right, bottom, stroke=SOFT))
        drawn.append(text(right, bottom + 30, below, text_anchor="end", **soft) if below else "")
        return "".join(drawn)

    def curve(self, points: Iterable[tuple[float, float]], number: int, width: float = 1.2) -> str:
        """Return a line through points, in the colour of the series with this number."""
        places = " ".join(f"{self.x.at(x):.1f},{self.y.at(y):.1f}" for x, y in points)
        look = {"fill": "none", "stroke": PALETTE[number % 8], "stroke_width": width, "stroke_linejoin": "round"}
        return element("polyline", points=places, **look)

    def point(self, x: float, y: float, spread: tuple[float, float], number: int, title: str) -> str:
        """Return a point of a series, with a bar over its `spread` (lowest and highest value)."""
        across = self.x.at(x)
        low, high = (self.y.at(max(min(value, self.y.high), self.y.low)) for value in spread)
        drawn = "" if low == high else line(across, low, across, high, stroke=PALETTE[number % 8], stroke_width=1.5)
        return drawn + marker(number, across, self.y.at(y), 3.5, title)
