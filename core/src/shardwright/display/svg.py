"""Small pictures as text: the elements, colours and legends of SVG."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import count
from math import ceil, floor, log2, log10
from textwrap import wrap

from shardwright.plan.axes import axes_of
from shardwright.types import DataParallel, Strategy

WIDTH = 1020.0
"""Width of a picture, in px: the width of the report's page."""
NARROW = 360.0
"""Width in px of a picture on a phone, where its text is as large as drawn."""

# Mid-tones of Okabe & Ito's colours, which all readers can distinguish, on white and on black.
PALETTE = ("#3a86c8", "#e08a1e", "#2a9d76", "#c45a9c", "#8a7bd0", "#c9b01f", "#58b3d6", "#d0583a")
INK, SOFT, LINE, FAINT, PAPER = "#1d2329", "#66707a", "#d9dee3", "#eef1f4", "#ffffff"
"""Colours of text, less important text, thin lines, empty areas and the background."""
ON_COLOUR = "#fefefe"
"""Colour of words on a coloured area, which is the same on a dark page."""
_DARK = {INK: "#e6e9ec", SOFT: "#9aa4ae", LINE: "#3a424a", FAINT: "#22282e", PAPER: "#15191d"}
_NAMES = {"ink": INK, "soft": SOFT, "line": LINE, "faint": FAINT, "paper": PAPER}
_FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
_LOOKS: dict[str, dict[str, object]] = {
    "soft": {"fill": SOFT},
    "small": {"font_size": 11},
    "strong": {"font_weight": 600},
    "on": {"fill": ON_COLOUR, "font_weight": 600, "font_size": 11},
}
"""Attributes of text by the name of a look, without a style sheet, so that any viewer shows them."""

DARK_PICTURES = f"""
@media (prefers-color-scheme: dark) {{ {
    " ".join(
        f'svg [{part}="{light}"], svg[{part}="{light}"] {{ {part}: {dark}; }}'
        for light, dark in _DARK.items()
        for part in ("fill", "stroke")
    )
} }}
"""
"""Style sheet of pictures on a dark page; viewers that ignore it show them as on a light page."""


def _variables(colours: dict[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}:{colour};' for name, colour in colours.items())} }}"


STYLE = f"""
{_variables(_NAMES)}
@media (prefers-color-scheme: dark) {{ {_variables({name: _DARK[light] for name, light in _NAMES.items()})} }}
{DARK_PICTURES}"""
"""Style sheet of a page with pictures: the same colours under names, light and dark."""

_CHARACTER = 7.0
"""Width of a character of 13 px text, for layout; rather too large than too small."""
# Corners of the signs, in units of their size; a circle has none.
_CORNERS = (
    (),
    ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    ((-1.2, 1), (1.2, 1), (0, -1.2)),
    ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)),
)


SIGNS = 32
"""Number of series for which `marker` has distinct signs."""


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """Return one element; underscores in attribute names become hyphens, a trailing one is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(x: float, y: float, content: str, look: str = "", **attributes: object) -> str:
    """Return a line of text; `y`: its baseline, `look`: names of looks, such as `soft small`."""
    for name in look.split():
        attributes = _LOOKS[name] | attributes
    return element("text", escape(content), x=x, y=y, **attributes)


def bar(x: float, y: float, width: float, height: float, title: str, **attributes: object) -> str:
    """Return a rectangle that shows `title` when pointed at."""
    return element("rect", element("title", escape(title)), x=x, y=y, width=width, height=height, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = LINE, **attributes: object) -> str:
    """Return a straight line, by default thin and pale."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **attributes)


def marker(number: int, x: float, y: float, size: float = 4.0, title: str = "", colour: str = "") -> str:
    """Return the sign of the series with this number; 32 series differ in colour or shape."""
    look = {"fill": colour or PALETTE[number % 8], "fill_opacity": 0.9}
    said = element("title", escape(title)) if title else ""
    corners = _CORNERS[(number + number // 8) % 4]
    if not corners:
        return element("circle", said, cx=x, cy=y, r=size, **look)
    points = " ".join(f"{x + size * across:.1f},{y + size * down:.1f}" for across, down in corners)
    return element("polygon", said, points=points, **look)


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, width: float, mark: float = 13) -> tuple[str, float]:
    """Return a legend (marks with labels, as many in a row as fit) and its height.

    An entry is the content of a mark (an element drawn in a 13 x 13 box) and its label, which is wrapped if it is too
    wide.
    """
    drawn, at, row = [], x, y
    for inside, words in entries:
        first, *rest = wrap(words, max(1, int((width - mark - 7) / _CHARACTER))) or [""]
        needed = mark + 7 + len(first) * _CHARACTER + 18
        if at > x and at + needed > x + width:
            at, row = x, row + 22
        drawn.append(element("g", inside, transform=f"translate({at:.1f},{row:.1f})"))
        drawn.append(text(at + mark + 7, row + 11, first))
        at += needed
        for more in rest:
            at, row = x + width, row + 16
            drawn.append(text(x + mark + 7, row + 11, more))
    return "".join(drawn), row - y + 22 if entries else 0.0


def picture(content: str, width: float, height: float, label: str, definitions: str = "") -> str:
    """Return an SVG element that fills the available width; a page with a dark theme also needs `DARK_PICTURES`."""
    return element(
        "svg",
        (element("defs", definitions) if definitions else "") + content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width="100%",
        role="img",
        aria_label=label,
        font_family=_FONT,
        font_size=13,
        fill=INK,
    )


def document(drawing: str, margin: int = 12) -> str:
    """Return a picture as the content of a separate file, with its style, background and size in px."""
    head, end, content = drawing.partition(">")
    width, height = (int(number) + 2 * margin for number in re.findall(r'viewBox="0 0 (\d+) (\d+)"', head)[0])
    head = re.sub(r'viewBox="[^"]*"', f'viewBox="{-margin} {-margin} {width} {height}"', head)
    head = re.sub(r' width="[^"]*"', f' width="{width}" height="{height}"', head)
    paper = element("rect", x=-margin, y=-margin, width="100%", height="100%", fill=PAPER)
    return head + end + element("style", DARK_PICTURES) + paper + content + "\n"


def ticks(high: float, count: int = 5, low: float = 0.0) -> list[float]:
    """Return round values from `low` to `high`, about `count` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    return [i * step for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _attribute(value: object) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


# Colours by meaning: the same kind of thing has the same colour in all pictures.


_BLUE, _ORANGE, _GREEN, _PINK, _VIOLET, _YELLOW, _SKY, _RED = PALETTE
PREDICTED, MEASURED, VALIDATION, BUDGET = _ORANGE, _BLUE, _ORANGE, _RED
"""Colours of predicted and measured values, of validation, and of limits."""

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
"""Colours of the kinds of time and memory; gradients as bytes and the time for reducing them have the same colour."""

_SHARINGS = {
    None: ("#a08f7c", "#8f8a5a"),
    DataParallel.DDP: (_SKY, "#8d9ed6"),
    DataParallel.ZERO2: ("#2aa198", "#8fae3f"),
    DataParallel.ZERO3: (_RED, "#d6964a"),
}
"""Colours of layers by kind of data parallelism (None: a single data-parallel rank); the second one is for Ulysses."""
_DARKER, _DARKEST = 0.8, 0.42
"""The brightness that a colour keeps each time tp_size doubles, and the lowest brightness."""
_LIGHTER = 0.35
"""Share of white in the colour of a layer whose shards are placed unusually: in groups of fewer ranks, or strided."""


def term_colour(term: str) -> str:
    """Return the colour of a kind of time or memory, such as `forward` or `optimizer_bytes`; grey if it is unknown."""
    return _TERMS.get(term.removesuffix("_bytes"), SOFT)


def chunk_colour(colour: str, chunk: int, chunks: int) -> str:
    """Return the colour of a model chunk of a pipeline stage; later chunks are darker."""
    return colour if chunks == 1 else _scaled(colour, 1 - 0.4 * chunk / (chunks - 1))


def strategy_colour(strategy: Strategy) -> str:
    """Return the colour of a layer: the hue shows its data parallelism; a larger tp_size is darker."""
    axes = axes_of(strategy)
    shared = strategy.data_parallel if axes.dense.states.size > 1 else None
    colour = _SHARINGS[shared][axes.exchanges_heads]
    colour = _scaled(colour, max(_DARKEST, _DARKER ** log2(strategy.tp_size)))
    usual = not strategy.shard_size and axes.layout.consecutive
    return colour if usual else _scaled(colour, 1 - _LIGHTER, white=_LIGHTER)


def series_numbers(wanted: Mapping[str, int]) -> dict[str, int]:
    """Return the sign number of each series by its label: the wanted number, or a free one if it is already taken.

    The wanted number depends on a series' meaning, so that the series has the same sign in all pictures.
    """
    first = {number % SIGNS: label for label, number in reversed(list(wanted.items()))}
    numbers = {label: number for number, label in first.items()}
    free = (number for number in count() if number not in first)
    return {label: numbers[label] if label in numbers else next(free) for label in wanted}


def _scaled(colour: str, light: float, white: float = 0.0) -> str:
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part * light + 255 * white):02x}" for part in parts)
