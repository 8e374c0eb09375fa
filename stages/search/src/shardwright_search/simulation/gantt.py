"""The simulated step as a picture that stands alone, on light and on dark paper."""

from collections.abc import Iterator
from html import escape
from math import floor, log10

from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Estimate, TimelineEvent
from shardwright_search.simulation.lanes import BACK, FORTH, GRADIENTS, PASSES, Lane, by_lane, idle_s, lane_name

__all__ = ["timeline_svg"]

_WIDTH, _LEFT, _RIGHT, _TOP = 1200.0, 92.0, 84.0, 56.0
_HEIGHTS = {PASSES: 26.0, GRADIENTS: 10.0, FORTH: 10.0, BACK: 10.0}
_GAP = 2.0
_PER_MS = 1e3

# Mid-tones of Okabe & Ito's colours, which any reader can tell apart, on white as on black.
_COLOURS = {
    "forward": "#3a86c8",
    "backward": "#2a9d76",
    "gradient_sync": "#e08a1e",
    "optimizer": "#8a7bd0",
    "send_forward": "#7fb2de",
    "send_backward": "#74bfa5",
}
_STYLE = """
:root, svg { --ink:#1d2329; --soft:#66707a; --line:#d9dee3; --faint:#eef1f4; --paper:#ffffff; }
@media (prefers-color-scheme: dark) { :root, svg { --ink:#e6e9ec; --soft:#9aa4ae; --line:#3a424a; --faint:#22282e;
  --paper:#15191d; } }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); font-size: 11px; } .strong { font-weight: 600; }
.on { fill: #ffffff; font-weight: 600; font-size: 11px; text-anchor: middle; }
"""


def timeline_svg(plan: Plan, estimate: Estimate) -> str:
    """What each pipeline stage does when, what it reduces, and what goes over its links; by how much it idles."""
    events = estimate.timeline
    end_s = max(event.end_s for event in events)
    scale = (_WIDTH - _LEFT - _RIGHT) / end_s
    rows, bottom = _rows(set(by_lane(events)), len(plan.stages))
    chunks = len(plan.stages[0].layers)
    drawn = [_element("rect", width="100%", height="100%", fill="var(--paper)"), *_heading(plan, estimate)]
    for mark_ms in _ticks(end_s * _PER_MS):
        x = _LEFT + mark_ms / _PER_MS * scale
        drawn.append(_element("line", x1=x, x2=x, y1=_TOP - 6, y2=bottom, stroke="var(--line)"))
        drawn.append(_text(x, bottom + 15, f"{mark_ms:g}", class_="soft", text_anchor="middle"))
    drawn.append(_text(_WIDTH - _RIGHT + 14, bottom + 15, "ms", class_="soft"))
    for lane, y in rows.items():
        height = _HEIGHTS[lane.kind]
        big = lane.kind == PASSES
        label = lane_name(lane, len(plan.stages))
        drawn.append(_element("rect", x=_LEFT, y=y, width=end_s * scale, height=height, fill="var(--faint)"))
        drawn.append(_text(8, y + height / 2 + (5 if big else 4), label, class_="strong" if big else "soft"))
        if big:
            share = idle_s(events, lane.stage, end_s) / end_s
            drawn.append(_text(_WIDTH - 8, y + height / 2 + 5, f"idle {share:.1%}", text_anchor="end"))
    for lane, own in by_lane(events).items():
        drawn.extend(_event(event, rows[lane], _HEIGHTS[lane.kind], scale, chunks) for event in own)
    legend, height = _legend({event.kind for event in events}, chunks, bottom + 32)
    return _picture("".join((*drawn, legend)), height, f"timeline of a simulated step of {plan.name}")


def _rows(lanes: set[Lane], num_stages: int) -> tuple[dict[Lane, float], float]:
    """Where each lane that has events lies, and the bottom of all: a stage, its reductions, the link to the next."""
    found, y = {}, _TOP
    for stage in range(num_stages):
        following = Lane((stage + 1) % num_stages, BACK)
        for lane in (Lane(stage, PASSES), Lane(stage, GRADIENTS), Lane(stage, FORTH), following):
            if lane in lanes:
                found[lane] = y
                y += _HEIGHTS[lane.kind] + _GAP
        y += 3 * _GAP
    return found, y


def _heading(plan: Plan, estimate: Estimate) -> Iterator[str]:
    times = [
        f"{name} {time_s * _PER_MS:.3f} ms"
        for name, time_s in (
            ("simulated step", estimate.simulated_step_time_s),
            ("lower bound", estimate.simulated_lower_bound_s),
            ("closed form", estimate.objective_s),
        )
    ]
    counts = f"{plan.schedule}, {len(plan.stages)} pipeline stages, {plan.num_microbatches} microbatches"
    yield _text(8, 20, plan.name, class_="strong")
    yield _text(8, 38, ", ".join([counts, *times]), class_="soft")


def _event(event: TimelineEvent, y: float, height: float, scale: float, chunks: int) -> str:
    x, width = _LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
    number = "" if event.microbatch is None else str(event.microbatch)
    chunk = f", chunk {event.chunk}" if chunks > 1 and event.chunk is not None else ""
    span_ms = f"{event.start_s * _PER_MS:.6g} to {event.end_s * _PER_MS:.6g} ms"
    title = _element("title", escape(f"{f'{_words(event.kind)} {number}'.strip()}{chunk}: {span_ms}"))
    look = {"fill": _colour(event.kind, event.chunk or 0, chunks), "stroke": "var(--paper)"}
    drawn = _element("rect", title, x=x, y=y, width=width, height=height, stroke_width=min(0.8, width / 4), **look)
    if number and height == _HEIGHTS[PASSES] and width > 7 * len(number) + 2:
        drawn += _text(x + width / 2, y + height / 2 + 4, number, class_="on")
    return drawn


def _legend(kinds: set[str], chunks: int, y: float) -> tuple[str, float]:
    """Marks with words, as many in a row as fit; the drawing and its bottom."""
    drawn, x = [], _LEFT
    for kind in (kind for kind in _COLOURS if kind in kinds):
        chunked = chunks if kind in ("forward", "backward") else 1
        for chunk in range(chunked):
            words = _words(kind) + (f", chunk {chunk}" if chunked > 1 else "")
            width = 38 + 7.0 * len(words)
            if x + width > _WIDTH:
                x, y = _LEFT, y + 22
            drawn.append(_element("rect", x=x, y=y, width=13.0, height=13.0, fill=_colour(kind, chunk, chunks)))
            drawn.append(_text(x + 19, y + 11, words))
            x += width
    return "".join(drawn), y + 22


def _colour(kind: str, chunk: int, chunks: int) -> str:
    """The colour of a kind of event, the darker the later the chunk."""
    if kind == "optimizer" or chunks == 1:
        return _COLOURS[kind]
    light = 1 - 0.4 * chunk / (chunks - 1)
    parts = (int(_COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part * light):02x}" for part in parts)


def _ticks(largest: float, count: int = 8) -> list[float]:
    """Round values from 0 to `largest`, about `count` of them."""
    rough = largest / count
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
    return [i * step for i in range(floor(largest / step) + 1)]


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _picture(content: str, height: float, label: str) -> str:
    style = _element("style", _STYLE)
    size = {"viewBox": f"0 0 {_WIDTH:g} {height:g}", "width": _WIDTH, "height": height}
    return _element("svg", style + content, xmlns="http://www.w3.org/2000/svg", role="img", aria_label=label, **size)


def _text(x: float, y: float, content: str, **attributes: object) -> str:
    return _element("text", escape(content), x=x, y=y, **attributes)


def _element(name: str, content: str = "", /, **attributes: object) -> str:
    """One element; underscores in attribute names are hyphens, a trailing one is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _attribute(value: object) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
