"""Pictures of Pareto fronts: step time against memory, or against the cost of a billion tokens."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from shardwright.display.chart import ChartAxis, Panel, bytes_axis, linear_axis
from shardwright.display.svg import INK, MEASURED, PAPER, WIDTH, element, picture
from shardwright.display.units import bytes_text, seconds_text, usd_text

_HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 300.0, 30.0, 250.0, 80.0, 40.0


class Axis(Enum):
    """The quantity on the other axis of the front: memory or cost."""

    MEMORY = "memory of the fullest GPU"
    PRICE = "price of a billion tokens"

    def words(self, value: float) -> str:
        """Return a value with its unit."""
        return bytes_text(int(value)) if self is Axis.MEMORY else usd_text(value)

    def chart(self, high: float, end: float, count: int) -> ChartAxis:
        """Return an axis from 0 to a value."""
        if self is Axis.MEMORY:
            return bytes_axis(high, _LEFT, end, count)
        return linear_axis(0, high, _LEFT, end, usd_text, count)


class Point(NamedTuple):
    """The best plan for a budget, or for a number of GPUs."""

    value: float
    """Bytes of its fullest device, or USD of a billion tokens."""
    step_s: float
    words: str
    proven: bool


def draw_front(points: Sequence[Point | None], chosen: int, axis: Axis, across: float = WIDTH) -> str:
    """Draw the points that are known, joined in their order; the one at `chosen` has a ring."""
    width, count = across, 5 if across == WIDTH else 3
    known = list(dict.fromkeys(point for point in points if point is not None))
    times_s = [point.step_s for point in known]
    x = axis.chart(1.05 * max(point.value for point in known), width - _RIGHT, count)
    y = linear_axis(0, 1.08 * max(times_s), _BOTTOM, _TOP, seconds_text)
    panel = Panel(x, y)
    drawn = [panel.frame("time of a step", axis.value)]
    drawn.append(panel.curve(((point.value, point.step_s) for point in known), 0, width=2))
    for point in known:
        title = f"{axis.words(point.value)}, {seconds_text(point.step_s)} a step: {point.words}"
        look = {"fill": MEASURED if point.proven else PAPER, "stroke": MEASURED, "stroke_width": 2}
        place = {"cx": x.at(point.value), "cy": y.at(point.step_s)}
        drawn.append(element("circle", element("title", title.replace("<", "&lt;")), r=5, **place, **look))
        if point == points[chosen]:
            drawn.append(element("circle", r=10, fill="none", stroke=INK, stroke_width=2, **place))
    return picture("".join(drawn), width, _HEIGHT, f"{axis.value} against time of a step")
