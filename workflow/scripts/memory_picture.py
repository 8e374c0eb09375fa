"""The picture of the pipeline stages' memory by term against the budget."""

from shardwright_formats.display.chart import bytes_axis
from shardwright_formats.display.svg import PALETTE, WIDTH, bar, element, legend, line, picture, text
from shardwright_formats.display.units import bytes_text
from shardwright_formats.types import Estimate

_LEFT, _RIGHT, _TOP, _ROW, _GAP = 76.0, 84.0, 22.0, 28.0, 10.0


def draw_memory(estimate: Estimate, budget_bytes: int | None) -> str:
    """Draw each pipeline stage's peak memory, stacked by term, against the budget."""
    terms = [term for stage in estimate.stages for term, size in stage.memory_terms_bytes.items() if size]
    colours = {term: PALETTE[i % len(PALETTE)] for i, term in enumerate(dict.fromkeys(terms))}
    peak = max(*(sum(stage.memory_terms_bytes.values()) for stage in estimate.stages), estimate.memory_bytes)
    # A budget far above what is needed is said in words: drawn to scale it would leave no picture.
    budget_shown = budget_bytes if budget_bytes is not None and budget_bytes <= 2.5 * peak else 0
    axis = bytes_axis(max(peak, budget_shown) * 1.02, _LEFT, WIDTH - _RIGHT)
    bottom = _TOP + len(estimate.stages) * (_ROW + _GAP)
    drawn = []
    for value, words in axis.marks:
        drawn.append(line(axis.at(value), 16, axis.at(value), bottom))
        drawn.append(text(axis.at(value), bottom + 15, words, text_anchor="middle", class_="soft small"))
    for row, stage in enumerate(estimate.stages):
        held, y = 0, _TOP + row * (_ROW + _GAP)
        drawn.append(text(0, y + 19, f"stage {row}", class_="strong"))
        for term in (term for term in colours if stage.memory_terms_bytes.get(term)):
            size = stage.memory_terms_bytes[term]
            x, title = axis.at(held), f"{_words(term)}: {bytes_text(size)}"
            drawn.append(bar(x, y, axis.at(held + size) - x, _ROW, title, fill=colours[term]))
            held += size
        drawn.append(text(axis.at(max(held, stage.memory_bytes)) + 8, y + 19, bytes_text(stage.memory_bytes)))
    if budget_shown:
        x = axis.at(budget_shown)
        drawn.append(line(x, 14, x, bottom, stroke="var(--c7)", stroke_width=2, stroke_dasharray="5 3"))
        drawn.append(text(x, 10, f"budget {bytes_text(budget_shown)}", text_anchor="end", class_="small"))
    elif budget_bytes:
        words = f"budget {bytes_text(budget_bytes)}, off the scale"
        drawn.append(text(WIDTH - 2, 10, words, text_anchor="end", class_="soft small"))
    entries = [(element("rect", width=13, height=13, rx=3, fill=of), _words(term)) for term, of in colours.items()]
    marks, height = legend(entries, _LEFT, bottom + 34, WIDTH - _LEFT)
    return picture("".join(drawn) + marks, WIDTH, bottom + 34 + height, "memory by pipeline stage")


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
