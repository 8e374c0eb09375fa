"""Colours by meaning: the same kind of thing has the same colour in all pictures."""

from collections.abc import Mapping
from itertools import count
from math import log2

from shardwright.display.svg import PALETTE, SIGNS, SOFT
from shardwright.plan.axes import axes_of
from shardwright.types import DataParallel, Strategy

_BLUE, _ORANGE, _GREEN, _PINK, _VIOLET, _YELLOW, _SKY, _RED = PALETTE
PREDICTED, MEASURED, VALIDATION, BUDGET = _ORANGE, _BLUE, _ORANGE, _RED
"""Colours of what was predicted and measured, of validation, and of the most that is allowed."""

_TERMS = {
    "forward": _BLUE,
    "backward": _GREEN,
    "weight": _SKY,
    "send_forward": "#7fb2de",
    "send_backward": "#74bfa5",
    "gradient_sync": _ORANGE,
    "gradients": _ORANGE,
    "optimizer": _VIOLET,
    "parameters": _YELLOW,
    "gathered_parameters": "#e0d27e",
    "activations": _PINK,
    "workspace": "#dfa3cb",
    "process": "#a3abb3",
    "communicators": "#7b858f",
}
"""Colours of the kinds of time and memory; the same for gradients as bytes and for the time that their sum takes."""

_SHARINGS = {
    None: ("#a08f7c", "#8f8a5a"),
    DataParallel.DDP: (_SKY, "#8d9ed6"),
    DataParallel.ZERO2: ("#2aa198", "#8fae3f"),
    DataParallel.ZERO3: (_RED, "#d6964a"),
}
"""Colours of layers by kind of data parallelism (None: a single data-parallel rank); the second one is for Ulysses."""
_DARKER, _DARKEST = 0.8, 0.42
"""The brightness that a colour keeps where tp_size is twice as large, and the least of all."""
_LIGHTER = 0.35
"""Share of white in the colour of a layer whose shards lie otherwise: in groups of fewer ranks, or ranks apart."""


def term_colour(term: str) -> str:
    """Return the colour of a kind of time or memory, such as `forward` or `optimizer_bytes`; grey if it is unknown."""
    return _TERMS.get(term.removesuffix("_bytes"), SOFT)


def chunk_colour(colour: str, chunk: int, chunks: int) -> str:
    """Return the colour of a model chunk of a pipeline stage; later chunks are darker."""
    return colour if chunks == 1 else _scaled(colour, 1 - 0.4 * chunk / (chunks - 1))


def strategy_colour(strategy: Strategy) -> str:
    """Return the colour of a layer: the hue shows its data parallelism; the larger tp_size, the darker."""
    axes = axes_of(strategy)
    shared = strategy.data_parallel if axes.dense.states.size > 1 else None
    colour = _SHARINGS[shared][axes.exchanges_heads]
    colour = _scaled(colour, max(_DARKEST, _DARKER ** log2(strategy.tp_size)))
    usual = not strategy.shard_size and axes.layout.consecutive
    return colour if usual else _scaled(colour, 1 - _LIGHTER, white=_LIGHTER)


def series_numbers(wanted: Mapping[str, int]) -> dict[str, int]:
    """Return the sign number of each series by its label: the wanted number, or a free one if several want the same.

    The wanted number depends on a series' meaning, so that it has the same sign in all pictures.
    """
    first = {number % SIGNS: label for label, number in reversed(list(wanted.items()))}
    numbers = {label: number for number, label in first.items()}
    free = (number for number in count() if number not in first)
    return {label: numbers[label] if label in numbers else next(free) for label in wanted}


def _scaled(colour: str, light: float, white: float = 0.0) -> str:
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part * light + 255 * white):02x}" for part in parts)
