"""The simulated step as a picture: computation and reductions of each pipeline stage, and messages of its links."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from textwrap import wrap
from typing import NamedTuple

from shardwright.display.svg import (
    FAINT,
    PAPER,
    WIDTH,
    bar,
    chunk_colour,
    element,
    legend,
    line,
    picture,
    term_colour,
    text,
    ticks,
)
from shardwright.types import Estimate, Plan, TimelineEvent

PASSES, GRADIENTS, FORTH, BACK = "passes", "gradients", "send_forward", "send_backward"
"""Kinds of lanes."""
_LEFT, _RIGHT, _TOP, _GAP = 92.0, 84.0, 56.0, 2.0
_HEIGHTS = {PASSES: 26.0, GRADIENTS: 10.0, FORTH: 10.0, BACK: 10.0}
_CHARACTER, _LINE = 6.0, 15.0
"""Width of a character of the heading (rather too large), and height of its lines, in px."""
_PER_MS = 1e3
_KINDS = ("forward", "backward", "weight", "gradient_sync", "optimizer", "send_forward", "send_backward")
"""Kinds of events in the order of the legend."""


class Lane(NamedTuple):
    """A pipeline stage's passes, its reductions, or its link to the next (`FORTH`) or the previous (`BACK`) stage."""

    stage: int
    kind: str


def draw_timeline(plan: Plan, estimate: Estimate, across: float = WIDTH) -> str:
    """Draw every event of the simulated step in its stage's lane, and the share of time in which each stage idles."""
    events = estimate.timeline
    end_s = max((event.end_s for event in events), default=0.0) or 1.0
    scale = (across - _LEFT - _RIGHT) / end_s
    lanes, chunks = by_lane(events, plan.schedule.turns), len(plan.stages[0].layers)
    heading, top = _heading(plan, estimate, across)
    rows, bottom = _rows(set(lanes), len(plan.stages), top)
    drawn = [heading, *_axis(end_s, scale, top, bottom, across)]
    for lane, y in rows.items():
        height, big = _HEIGHTS[lane.kind], lane.kind == PASSES
        drawn.append(element("rect", x=_LEFT, y=y, width=end_s * scale, height=height, fill=FAINT))
        label, look = lane_name(lane, len(plan.stages)), "strong" if big else "soft small"
        drawn.append(text(0, y + height / 2 + (5 if big else 4), label, look=look))
        if big:
            share = idle_s(events, lane.stage, end_s) / end_s
            drawn.append(text(across, y + height / 2 + 5, f"idle {share:.1%}", text_anchor="end"))
        drawn.extend(_event(event, y, height, scale, chunks) for event in lanes[lane])
    legend_marks, height = legend(
        list(_legend_entries({event.kind for event in events}, chunks)), _LEFT, bottom + 32, across - _LEFT
    )
    label = f"timeline of a simulated step of {plan.name}"
    return picture("".join(drawn) + legend_marks, across, bottom + 32 + height, label)


def _rows(lanes: set[Lane], num_stages: int, top: float) -> tuple[dict[Lane, float], float]:
    """Return the top of each lane with events, and the bottom of all lanes.

    The lanes of a stage are its passes, its reductions, and its link to the next stage in both directions.
    """
    tops, y = {}, top
    for stage in range(num_stages):
        following = Lane((stage + 1) % num_stages, BACK)
        for lane in (Lane(stage, PASSES), Lane(stage, GRADIENTS), Lane(stage, FORTH), following):
            if lane in lanes:
                tops[lane] = y
                y += _HEIGHTS[lane.kind] + _GAP
        y += 3 * _GAP
    return tops, y


def _heading(plan: Plan, estimate: Estimate, across: float) -> tuple[str, float]:
    """Return the plan's name and times above the lanes, in as many lines as needed, and the y of the first lane."""
    times = [
        f"{name} {time_s * _PER_MS:.3f} ms"
        for name, time_s in (
            ("simulated step", estimate.simulated_step_time_s),
            ("lower bound", estimate.simulated_lower_bound_s),
            ("closed form", estimate.objective_s),
        )
    ]
    counts = f"{plan.schedule}, pipeline stages: {len(plan.stages)}, microbatches: {plan.num_microbatches}"
    lines = wrap(", ".join([counts, *times]), int(across / _CHARACTER))
    drawn = [text(0, 38 + _LINE * row, words, look="soft small") for row, words in enumerate(lines)]
    return text(0, 20, plan.name, look="strong") + "".join(drawn), _TOP + _LINE * (len(lines) - 1)


def _axis(end_s: float, scale: float, top: float, bottom: float, across: float) -> Iterator[str]:
    for mark_ms in ticks(end_s * _PER_MS, 8 if across == WIDTH else 3):
        x = _LEFT + mark_ms / _PER_MS * scale
        yield line(x, top - 6, x, bottom)
        yield text(x, bottom + 15, f"{mark_ms:g}", look="soft small", text_anchor="middle")
    yield text(across - _RIGHT + 20, bottom + 15, "ms", look="soft small")


def _event(event: TimelineEvent, y: float, height: float, scale: float, chunks: int) -> str:
    x, width = _LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
    number = "" if event.microbatch is None else str(event.microbatch)
    chunk = f", chunk {event.chunk}" if chunks > 1 and event.chunk is not None else ""
    span_ms = f"{event.start_s * _PER_MS:.6g} to {event.end_s * _PER_MS:.6g} ms"
    title = f"{f'{_words(event.kind)} {number}'.strip()}{chunk}: {span_ms}"
    look = {"fill": _colour(event.kind, event.chunk or 0, chunks), "stroke": PAPER}
    drawn = bar(x, y, width, height, title, stroke_width=min(0.8, width / 4), **look)
    if number and height == _HEIGHTS[PASSES] and width > 7 * len(number) + 2:
        drawn += text(x + width / 2, y + height / 2 + 4, number, look="on", text_anchor="middle")
    return drawn


def _legend_entries(kinds: set[str], chunks: int) -> Iterator[tuple[str, str]]:
    for kind in sorted(kinds, key=[*_KINDS, *kinds].index):
        chunked = chunks if kind in ("forward", "backward") else 1
        for chunk in range(chunked):
            words = _words(kind) + (f", chunk {chunk}" if chunked > 1 else "")
            yield element("rect", width=13, height=13, fill=_colour(kind, chunk, chunks)), words


def _colour(kind: str, chunk: int, chunks: int) -> str:
    return term_colour(kind) if kind == "optimizer" else chunk_colour(term_colour(kind), chunk, chunks)


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def lane_name(lane: Lane, num_stages: int) -> str:
    """Return the name of a lane, such as `stage 0` or `0 → 1`."""
    match lane.kind:
        case "send_forward":
            return f"{lane.stage} → {(lane.stage + 1) % num_stages}"
        case "send_backward":
            return f"{lane.stage} → {(lane.stage - 1) % num_stages}"
        case "gradients":
            return "gradient sync"
        case _:
            return f"stage {lane.stage}"


def by_lane(events: Iterable[TimelineEvent], turns: bool = False) -> dict[Lane, list[TimelineEvent]]:
    """Return the events of each lane that has any, by start; `turns`: whether second chunks run backwards (a V)."""
    kinds = {"gradient_sync": GRADIENTS, FORTH: FORTH, BACK: BACK}
    turned = kinds | {FORTH: BACK, BACK: FORTH}

    def lane(event: TimelineEvent) -> Lane:
        return Lane(event.stage, (turned if turns and event.chunk == 1 else kinds).get(event.kind, PASSES))

    return {key: list(group) for key, group in groupby(sorted(events, key=lambda e: (lane(e), e.start_s)), key=lane)}


def idle_s(events: Iterable[TimelineEvent], stage: int, over_s: float) -> float:
    """Return the seconds until `over_s` in which a stage neither computes nor reduces; messages do not count."""
    busy = [event for event in events if event.stage == stage and event.kind not in (FORTH, BACK)]
    idle = reached = 0.0
    for event in sorted(busy, key=lambda event: event.start_s):
        idle += max(event.start_s - reached, 0.0)
        reached = max(event.end_s, reached)
    return idle + over_s - reached
