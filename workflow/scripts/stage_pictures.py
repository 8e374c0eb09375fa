"""What the pipeline stages hold and do: memory by term against the budget, and the timeline of a step."""

from results import bytes_text, seconds_text
from shardwright_formats.types.prediction import Estimate, TimelineEvent
from svg import PALETTE, bar, element, legend, line, picture, text, ticks

__all__ = ["draw_memory", "draw_timeline"]

_WIDTH, _LEFT, _RIGHT, _ROW, _GAP = 960.0, 76.0, 84.0, 28.0, 10.0
_STRIP = 7.0
"""Height of what goes on beside the passes of a stage, at the bottom of its row."""
_KIND_COLOURS = {"forward": PALETTE[0], "backward": PALETTE[2]}


def draw_memory(estimate: Estimate, budget_bytes: int | None) -> str:
    """Draw each pipeline stage's peak memory, stacked by term, against the budget."""
    terms = list(dict.fromkeys(term for stage in estimate.stages for term in stage.memory_terms_bytes))
    terms = [term for term in terms if any(stage.memory_terms_bytes.get(term) for stage in estimate.stages)]
    colours = {term: PALETTE[i % len(PALETTE)] for i, term in enumerate(terms)}
    sums = [sum(stage.memory_terms_bytes.values()) for stage in estimate.stages]
    peak = max(*sums, estimate.memory_bytes)
    # A budget far above what is needed is said in words: drawn to scale it would leave no picture.
    shown = budget_bytes is not None and budget_bytes <= 2.5 * peak
    largest = max(peak, budget_bytes if shown and budget_bytes else 0) * 1.02
    scale = (_WIDTH - _LEFT - _RIGHT) / largest
    bottom = 22 + len(estimate.stages) * (_ROW + _GAP)
    drawn = [_axis([(v * scale, bytes_text(v)) for v in _binary_ticks(largest)], bottom)]
    for row, stage in enumerate(estimate.stages):
        x, y = _LEFT, 22 + row * (_ROW + _GAP)
        drawn.append(text(0, y + 19, f"stage {row}", class_="strong"))
        for term in terms:
            size = stage.memory_terms_bytes.get(term, 0)
            if size:
                title = f"{_words(term)}: {bytes_text(size)}"
                drawn.append(bar(x, y, size * scale, _ROW, title, fill=colours[term]))
                x += size * scale
        drawn.append(text(max(x, _LEFT + stage.memory_bytes * scale) + 8, y + 19, bytes_text(stage.memory_bytes)))
    if shown and budget_bytes:
        x = _LEFT + budget_bytes * scale
        drawn.append(line(x, 14, x, bottom, stroke="var(--c7)", stroke_width=2, stroke_dasharray="5 3"))
        drawn.append(text(x, 10, f"budget {bytes_text(budget_bytes)}", text_anchor="end", class_="small"))
    elif budget_bytes:
        words = f"budget {bytes_text(budget_bytes)}, off the scale"
        drawn.append(text(_WIDTH, 10, words, text_anchor="end", class_="soft small"))
    return _with_legend(drawn, [(_mark(colours[term]), _words(term)) for term in terms], bottom + 34, "memory by stage")


def draw_timeline(estimate: Estimate) -> str:
    """Draw what each pipeline stage does in the simulated step, and below it what it reduces at the same time."""
    events = [event for event in estimate.timeline if not event.kind.startswith("send_")]
    end_s = max([estimate.simulated_step_time_s, *(event.end_s for event in events)])
    scale = (_WIDTH - _LEFT - 12) / (end_s or 1.0)
    bottom = 6 + len(estimate.stages) * (_ROW + _GAP)
    others = [kind for kind in dict.fromkeys(event.kind for event in events) if kind not in _KIND_COLOURS]
    spare = (PALETTE[1], PALETTE[3], PALETTE[4], PALETTE[5])
    colours = _KIND_COLOURS | {kind: spare[i % len(spare)] for i, kind in enumerate(others)}
    drawn = [_axis([(v * scale, seconds_text(v)) for v in ticks(end_s, 6)], bottom, 0)]
    for row in range(len(estimate.stages)):
        y = 6 + row * (_ROW + _GAP)
        drawn.append(text(0, y + 19, f"stage {row}", class_="strong"))
        drawn.append(element("rect", x=_LEFT, y=y, width=end_s * scale, height=_ROW, fill="var(--faint)"))
        drawn.extend(_event(event, y, scale, colours[event.kind]) for event in events if event.stage == row)
    kinds = [kind for kind in colours if any(event.kind == kind for event in events)]
    return _with_legend(drawn, [(_mark(colours[kind]), _words(kind)) for kind in kinds], bottom + 34, "timeline")


def _event(event: TimelineEvent, y: float, scale: float, colour: str) -> str:
    x, width = _LEFT + event.start_s * scale, (event.end_s - event.start_s) * scale
    number = "" if event.microbatch is None else str(event.microbatch)
    chunk = f", chunk {event.chunk}" if event.chunk else ""
    title = f"{_words(event.kind)} {number}{chunk}: {seconds_text(event.start_s)} to {seconds_text(event.end_s)}"
    beside = event.kind == "gradient_sync"
    y, height = (y + _ROW - _STRIP, _STRIP) if beside else (y, _ROW - _STRIP)
    drawn = bar(x, y, width, height, title, fill=colour, stroke="var(--paper)", stroke_width=0.8)
    if number and not beside and width > 7 * len(number) + 4:
        drawn += text(x + width / 2, y + 15, number, text_anchor="middle", class_="on")
    return drawn


def _axis(marks: list[tuple[float, str]], bottom: float, top: float = 16) -> str:
    drawn = []
    for x, words in marks:
        drawn.append(line(_LEFT + x, top, _LEFT + x, bottom))
        anchor = "end" if _LEFT + x > _WIDTH - 30 else "middle"
        drawn.append(text(min(_LEFT + x, _WIDTH), bottom + 15, words, text_anchor=anchor, class_="soft small"))
    return "".join(drawn)


def _binary_ticks(largest_bytes: float) -> list[float]:
    unit = next(2.0**power for power in (30, 20, 10, 0) if largest_bytes >= 2**power)
    return [value * unit for value in ticks(largest_bytes / unit)]


def _with_legend(drawn: list[str], entries: list[tuple[str, str]], top: float, label: str) -> str:
    marks, height = legend(entries, _LEFT, top, _WIDTH - _LEFT)
    return picture("".join(drawn) + marks, _WIDTH, top + height, label)


def _mark(colour: str) -> str:
    return element("rect", width=13, height=13, rx=3, fill=colour)


def _words(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_s").replace("_", " ")
