"""Pictures of a plan and of the memory of its pipeline stages."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from shardwright.display.chart import bytes_axis
from shardwright.display.plan_words import strategy_words
from shardwright.display.svg import (
    BUDGET,
    FAINT,
    NARROW,
    PAPER,
    WIDTH,
    bar,
    element,
    legend,
    line,
    picture,
    strategy_colour,
    term_colour,
    text,
)
from shardwright.display.units import bytes_text
from shardwright.types import EMBEDDING, HEAD, Estimate, LayerStrategy, Plan, Recompute, Strategy


class _Layout(NamedTuple):
    """Measures of a plan's picture in px."""

    width: float
    left: float
    """Left edge of the cells."""
    row: float
    """Height of a stage."""
    gap: float
    """Space between two stages, which contains their names if there is no space left of the cells."""

    def top(self, stage: int) -> float:
        """Return the upper edge of a stage."""
        return 24 + (0 if self.left else self.gap) + stage * (self.row + self.gap)


_WIDE, _SLIM = _Layout(WIDTH, 150.0, 46.0, 8.0), _Layout(NARROW, 0.0, 34.0, 22.0)
_SIZE = 70.0
"""Width in px of a size written as text."""
_WORD = 30.0
"""Width in px that the text above a cell needs."""
# Recomputed layers are hatched, so that the colour can show how they are sharded.
_HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.6" height="7" fill="#fff" fill-opacity="0.5"/></pattern>'
)


class _Cell(NamedTuple):
    """A layer of a plan, or several equal neighbouring layers of one stage."""

    name: str
    strategy: Strategy
    stage: int
    columns: int = 1


def draw_plan(plan: Plan, across: float = WIDTH, *, together: bool = False) -> str:
    """Draw a plan as inline SVG, WIDTH or NARROW px wide; if `together`, equal neighbours of a stage are one bar."""
    layout = _WIDE if across == WIDTH else _SLIM
    layers = [_Cell(str(i), layer, plan.stage_of(f"layers[{i}]")) for i, layer in enumerate(plan.layers)]
    head = _Cell(HEAD, plan.head, plan.stage_of(HEAD))
    cells = [_Cell(EMBEDDING, plan.embedding, 0), *(_runs(layers) if together else layers), head]
    width = (layout.width - layout.left) / (len(layers) + 2)
    drawn = [_row_frame(plan, stage, layout) for stage in range(len(plan.stages))]
    starts = accumulate((cell.columns for cell in cells), initial=0)
    for column, cell in zip(starts, cells, strict=False):
        place = layout.left + column * width, layout.top(cell.stage), width * cell.columns
        drawn.append(_bar(*place, layout.row, cell))
    for column, name in enumerate((EMBEDDING, *map(str, range(len(layers))), HEAD)):
        if _is_labelled(column, len(layers) + 2, width) and (layout.left or not 0 < column * width < _WORD):
            drawn.append(_label(layout.left + column * width, width, name))
    top = layout.top(len(plan.stages)) + 14
    marks, height = legend(_legend_entries(cells), layout.left, top, layout.width - layout.left)
    return picture("".join(drawn) + marks, layout.width, top + height, f"the plan {plan.name}", _HATCH)


def _runs(layers: Sequence[_Cell]) -> Iterator[_Cell]:
    for _, equal in groupby(layers, key=lambda cell: (cell.strategy, cell.stage)):
        first, *rest = equal
        name = f"{first.name}-{rest[-1].name}" if rest else first.name
        yield first._replace(name=name, columns=len(rest) + 1)


def _row_frame(plan: Plan, stage: int, layout: _Layout) -> str:
    y = layout.top(stage)
    ranks = plan.stages[stage].ranks
    node_types = dict.fromkeys(plan.cluster.node_type_of_rank[rank] for rank in ranks)
    several = f"ranks {ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    frame = element("rect", x=layout.left, y=y, width=layout.width - layout.left, height=layout.row, fill=FAINT, rx=4)
    where = f"{several} · {'/'.join(node_types)}"
    if not layout.left:
        return frame + text(0, y - 6, f"stage {stage} · {where}"[:48], look="soft small")
    return frame + text(0, y + 19, f"stage {stage}", look="strong") + text(0, y + 36, where[:24], look="soft small")


def _bar(x: float, y: float, width: float, height: float, cell: _Cell) -> str:
    name, strategy, _, columns = cell
    inset = 1.5 if width > 10 else 0.4
    layers = "layers" if columns > 1 else "layer"
    title = f"{name if name in (EMBEDDING, HEAD) else f'{layers} {name}'}: {strategy_words(strategy)}"
    left, top, wide, high = x + inset, y + 3, width - 2 * inset, height - 6
    drawn = bar(left, top, wide, high, title, fill=strategy_colour(strategy), rx=3)
    if _is_recomputed(strategy):
        place = {"x": left, "y": top, "width": wide, "height": high}
        drawn += element("rect", **place, fill="url(#hatch)", rx=3, pointer_events="none")
    if name in (EMBEDDING, HEAD):
        edge = x + width if name == EMBEDDING else x
        drawn += line(edge, y + 3, edge, y + height - 3, stroke=PAPER, stroke_width=4)
    if wide >= _WORD:
        # By colour only, tensor-parallel sizes would differ in nothing but brightness.
        words = f"tp{strategy.tp_size}"
        drawn += text(x + width / 2, y + height / 2 + 4, words, "on", text_anchor="middle", pointer_events="none")
    return drawn


def _label(x: float, width: float, name: str) -> str:
    """Draw the label above a cell; if cells are too narrow, the first and last label end at their cell's right edge."""
    is_end, words = name in (EMBEDDING, HEAD), {EMBEDDING: "emb", HEAD: "head"}.get(name, name)
    if is_end and width < _WORD:
        at_edge = x + width < _WORD
        return text(
            x if at_edge else x + width, 16, words, text_anchor="start" if at_edge else "end", look="soft small"
        )
    return text(x + width / 2, 16, words, text_anchor="middle", look="soft small")


def _legend_entries(cells: Sequence[_Cell]) -> list[tuple[str, str]]:
    entries: dict[str, str] = {}
    for _, strategy, _, _ in cells:
        mark = element("rect", width=13, height=13, rx=3, fill=strategy_colour(strategy))
        if _is_recomputed(strategy):
            mark += element("rect", width=13, height=13, rx=3, fill="url(#hatch)")
        entries.setdefault(strategy_words(strategy), mark)
    return [(mark, word) for word, mark in entries.items()]


def _is_labelled(column: int, columns: int, width: float) -> bool:
    interval = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * width >= 26 or step == 128)
    free = (columns - 1.5 - column) * width if width < _WORD else 2 * _WORD
    return column in (0, columns - 1) or ((column - 1) % interval == 0 and free >= _WORD)


def _is_recomputed(strategy: Strategy) -> bool:
    return isinstance(strategy, LayerStrategy) and strategy.recompute is not Recompute.NONE


def draw_memory(estimate: Estimate, budget_bytes: int | None, across: float = WIDTH) -> str:
    """Draw each pipeline stage's peak memory, stacked by term, against the budget."""
    left, right, top, height, gap = 76.0, 84.0, 22.0, 28.0, 10.0
    width, marks = across, 5 if across == WIDTH else 2
    terms = [term for stage in estimate.stages for term, size in stage.memory_terms_bytes.items() if size]
    drawn_terms = list(dict.fromkeys(terms))
    peak = max(*(sum(stage.memory_terms_bytes.values()) for stage in estimate.stages), estimate.memory_bytes)
    # A budget far above the need is stated in words: drawn to scale, it would leave no space for the rest.
    budget_shown = budget_bytes if budget_bytes is not None and budget_bytes <= 2.5 * peak else 0
    axis = bytes_axis(max(peak, budget_shown) * 1.02, left, width - right, marks)
    bottom = top + len(estimate.stages) * (height + gap)
    drawn = []
    for value, words in axis.tick_labels:
        drawn.append(line(axis.at(value), 16, axis.at(value), bottom))
        drawn.append(text(axis.at(value), bottom + 15, words, text_anchor="middle", look="soft small"))
    for row, stage in enumerate(estimate.stages):
        held, y = 0, top + row * (height + gap)
        drawn.append(text(0, y + 19, f"stage {row}", look="strong"))
        for term in (term for term in drawn_terms if stage.memory_terms_bytes.get(term)):
            size = stage.memory_terms_bytes[term]
            x, title = axis.at(held), f"{_words(term)}: {bytes_text(size)}"
            drawn.append(bar(x, y, axis.at(held + size) - x, height, title, fill=term_colour(term)))
            held += size
        end, line_at = axis.at(max(held, stage.memory_bytes)), axis.at(budget_shown)
        beside = line_at if budget_shown and end <= line_at < end + _SIZE else end
        drawn.append(text(beside + 8, y + 19, bytes_text(stage.memory_bytes)))
    if budget_shown:
        x = axis.at(budget_shown)
        drawn.append(line(x, 14, x, bottom, stroke=BUDGET, stroke_width=2, stroke_dasharray="5 3"))
        drawn.append(text(x, 10, f"budget {bytes_text(budget_shown)}", text_anchor="end", look="small"))
    elif budget_bytes:
        words = f"budget {bytes_text(budget_bytes)}, off the scale"
        drawn.append(text(width - 2, 10, words, text_anchor="end", look="soft small"))
    entries = [
        (element("rect", width=13, height=13, rx=3, fill=term_colour(term)), _words(term)) for term in drawn_terms
    ]
    start = left if across == WIDTH else 0.0
    named, legend_height = legend(entries, start, bottom + 34, width - start)
    return picture("".join(drawn) + named, width, bottom + 34 + legend_height, "memory by pipeline stage")


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
