"""The front of memory against time for one size: the best plan for each budget."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.display.chart import Panel, bytes_axis, linear_axis
from shardwright.display.colours import MEASURED
from shardwright.display.svg import INK, PAPER, WIDTH, element, picture
from shardwright.display.units import bytes_text, seconds_text

_HEIGHT, _TOP, _BOTTOM, _LEFT, _RIGHT = 300.0, 30.0, 250.0, 80.0, 40.0


class Point(NamedTuple):
    """The best plan for a budget."""

    memory_bytes: int
    """Bytes of its fullest device."""
    step_s: float
    words: str
    proven: bool


def draw_front(points: Sequence[Point | None], chosen: int) -> str:
    """Draw the points that are known, by memory and step time, joined; `chosen` is the place of the one with a ring."""
    known = sorted({point for point in points if point is not None})
    times_s = [point.step_s for point in known]
    x = bytes_axis(1.05 * max(point.memory_bytes for point in known), _LEFT, WIDTH - _RIGHT)
    y = linear_axis(0, 1.08 * max(times_s), _BOTTOM, _TOP, seconds_text)
    panel = Panel(x, y)
    drawn = [panel.frame("time of a step", "memory of the fullest GPU")]
    drawn.append(panel.curve(((point.memory_bytes, point.step_s) for point in known), 0, width=2))
    for point in known:
        title = f"{bytes_text(point.memory_bytes)}, {seconds_text(point.step_s)} a step: {point.words}"
        look = {"fill": MEASURED if point.proven else PAPER, "stroke": MEASURED, "stroke_width": 2}
        place = {"cx": x.at(point.memory_bytes), "cy": y.at(point.step_s)}
        drawn.append(element("circle", element("title", title.replace("<", "&lt;")), r=5, **place, **look))
        if point == points[chosen]:
            drawn.append(element("circle", r=10, fill="none", stroke=INK, stroke_width=2, **place))
    return picture("".join(drawn), WIDTH, _HEIGHT, "memory against time of a step")
