"""The picture of a plan: layers from left to right, pipeline stages from top to bottom, coloured by strategy."""

from collections.abc import Iterable

from shardwright_formats.display.plan_words import strategy_words
from shardwright_formats.display.svg import PALETTE, WIDTH, bar, element, legend, line, picture, text
from shardwright_formats.semantics.axes import layout_of
from shardwright_formats.types import EMBEDDING, HEAD, LayerStrategy, Plan, Recompute, Strategy

_LEFT, _ROW, _GAP = 150.0, 46.0, 8.0
_WORD = 30.0
"""Width in px that the words above a cell need."""
# Recomputed layers are hatched, so that the colour is left for how they are sharded.
_HATCH = (
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2.6" height="7" fill="#fff" fill-opacity="0.5"/></pattern>'
)


class StrategyColours:
    """The colour of each way of sharding a layer, the same in every picture of a page."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        shardings = dict.fromkeys(_sharding(s) for plan in plans for s in (*plan.layers, plan.embedding, plan.head))
        self._colours = {sharding: PALETTE[i % len(PALETTE)] for i, sharding in enumerate(shardings)}

    def of(self, strategy: Strategy) -> str:
        """Return the CSS colour of a strategy."""
        return self._colours[_sharding(strategy)]


def draw_plan(plan: Plan, colours: StrategyColours) -> str:
    """Draw a plan as inline SVG."""
    cells = [(EMBEDDING, plan.embedding, 0), *_layer_cells(plan), (HEAD, plan.head, len(plan.stages) - 1)]
    width = (WIDTH - _LEFT) / len(cells)
    drawn = [_row_frame(plan, stage) for stage in range(len(plan.stages))]
    for column, (name, strategy, stage) in enumerate(cells):
        x, y = _LEFT + column * width, 24 + stage * (_ROW + _GAP)
        drawn.append(_cell(x, y, width, name, strategy, colours))
        if _is_labelled(column, len(cells), width):
            drawn.append(_label(x, width, name))
    top = 24 + len(plan.stages) * (_ROW + _GAP) + 14
    marks, height = legend(_legend_entries(cells, colours), _LEFT, top, WIDTH - _LEFT)
    return picture("".join(drawn) + marks, WIDTH, top + height, f"the plan {plan.name}", _HATCH)


def _layer_cells(plan: Plan) -> list[tuple[str, Strategy, int]]:
    return [(str(i), layer, plan.stage_of(f"layers[{i}]")) for i, layer in enumerate(plan.layers)]


def _row_frame(plan: Plan, stage: int) -> str:
    y = 24 + stage * (_ROW + _GAP)
    ranks = plan.stages[stage].ranks
    node_types = dict.fromkeys(plan.cluster.node_type_of_rank[rank] for rank in ranks)
    several = f"ranks {ranks[0]}–{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
    frame = element("rect", x=_LEFT, y=y, width=WIDTH - _LEFT, height=_ROW, fill="var(--faint)", rx=4)
    return (
        frame
        + text(0, y + 19, f"stage {stage}", class_="strong")
        + text(0, y + 36, f"{several} · {'/'.join(node_types)}"[:24], class_="soft small")
    )


def _cell(x: float, y: float, width: float, name: str, strategy: Strategy, colours: StrategyColours) -> str:
    inset = 1.5 if width > 10 else 0.4
    title = f"{name if name in (EMBEDDING, HEAD) else f'layer {name}'}: {strategy_words(strategy)}"
    left, top, wide, high = x + inset, y + 3, width - 2 * inset, _ROW - 6
    drawn = bar(left, top, wide, high, title, fill=colours.of(strategy), rx=3)
    if _is_recomputed(strategy):
        drawn += element(
            "rect", x=left, y=top, width=wide, height=high, fill="url(#hatch)", rx=3, pointer_events="none"
        )
    if name in (EMBEDDING, HEAD):
        edge = x + width if name == EMBEDDING else x
        drawn += line(edge, y + 3, edge, y + _ROW - 3, stroke="var(--paper)", stroke_width=4)
    return drawn


def _label(x: float, width: float, name: str) -> str:
    """Draw the label above a cell; where cells are too narrow, labels at both ends stand left of their cell's end."""
    is_end, words = name in (EMBEDDING, HEAD), {EMBEDDING: "emb", HEAD: "head"}.get(name, name)
    if is_end and width < _WORD:
        return text(x + width, 16, words, text_anchor="end", class_="soft small")
    return text(x + width / 2, 16, words, text_anchor="middle", class_="soft small")


def _legend_entries(cells: list[tuple[str, Strategy, int]], colours: StrategyColours) -> list[tuple[str, str]]:
    entries: dict[str, str] = {}
    for _, strategy, _ in cells:
        mark = element("rect", width=13, height=13, rx=3, fill=colours.of(strategy))
        if _is_recomputed(strategy):
            mark += element("rect", width=13, height=13, rx=3, fill="url(#hatch)")
        entries.setdefault(strategy_words(strategy), mark)
    return [(mark, word) for word, mark in entries.items()]


def _is_labelled(column: int, columns: int, width: float) -> bool:
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128) if step * width >= 26 or step == 128)
    free = (columns - 1.5 - column) * width if width < _WORD else 2 * _WORD
    return column in (0, columns - 1) or ((column - 1) % every == 0 and free >= _WORD)


def _is_recomputed(strategy: Strategy) -> bool:
    return isinstance(strategy, LayerStrategy) and strategy.recompute is not Recompute.NONE


def _sharding(strategy: Strategy) -> tuple[object, ...]:
    # What does not apply must not make a colour of its own.
    layout = layout_of(strategy)
    sequence = strategy.sequence_parallel if layout.sample_ranks > 1 else None
    data = strategy.data_parallel if layout.samples.size > 1 else None
    return strategy.tp_size, strategy.dp_size, data, strategy.shard_size, sequence, strategy.tp_consecutive
