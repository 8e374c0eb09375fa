"""Small pictures as text: elements, colours and axes of inline SVG."""

from collections.abc import Sequence
from html import escape
from math import floor, log10

__all__ = ["PALETTE", "STYLE", "bar", "element", "legend", "line", "picture", "text", "ticks"]

PALETTE = tuple(f"var(--c{i})" for i in range(8))

# Mid-tones of Okabe & Ito's colours that any reader can tell apart, on white as on black.
STYLE = """
:root, svg { --c0:#3a86c8; --c1:#e08a1e; --c2:#2a9d76; --c3:#c45a9c;
  --c4:#8a7bd0; --c5:#c9b01f; --c6:#58b3d6; --c7:#d0583a;
  --ink:#1d2329; --soft:#66707a; --line:#d9dee3; --faint:#eef1f4; --paper:#ffffff; --on:#ffffff; }
@media (prefers-color-scheme: dark) { :root, svg { --ink:#e6e9ec; --soft:#9aa4ae; --line:#3a424a; --faint:#22282e;
  --paper:#15191d; --on:#ffffff; } }
svg text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg text.soft { fill: var(--soft); } svg text.on { fill: var(--on); font-weight: 600; font-size: 11px; }
svg text.small { font-size: 11px; } svg text.strong { font-weight: 600; }
"""

_CHARACTER = 7.0
"""Width of a character of 13 px text, for laying out; generous."""


def element(name: str, content: str = "", /, **attributes: object) -> str:
    """One element; underscores in attribute names are hyphens, a trailing one is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """A line of text; `y` is its baseline."""
    return element("text", escape(content), x=x, y=y, **attributes)


def bar(x: float, y: float, width: float, height: float, title: str, **attributes: object) -> str:
    """A rectangle that says `title` when pointed at."""
    title_element = element("title", escape(title))
    return element("rect", title_element, x=x, y=y, width=max(width, 0.5), height=height, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = "var(--line)", **attributes: object) -> str:
    """A straight line, thin and pale unless said otherwise."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, **attributes)


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, width: float, mark: float = 13) -> tuple[str, float]:
    """Marks with words, as many in a row as fit; returns the drawing and its height.

    An entry is the inside of a mark (an element drawn in a 13 x 13 box) and its word.
    """
    drawn, at, row = [], x, y
    for inside, word in entries:
        needed = mark + 7 + len(word) * _CHARACTER + 18
        if at > x and at + needed > x + width:
            at, row = x, row + 22
        drawn.append(element("g", inside, transform=f"translate({at:.1f},{row:.1f})"))
        drawn.append(text(at + mark + 7, row + 11, word))
        at += needed
    return "".join(drawn), row - y + 22 if entries else 0.0


def picture(content: str, width: float, height: float, label: str, definitions: str = "") -> str:
    """An SVG element that can stand in a page or in a file of its own."""
    head = element("defs", definitions) if definitions else ""
    return element(
        "svg",
        head + content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width="100%",
        role="img",
        aria_label=label,
    )


def ticks(largest: float, count: int = 5) -> list[float]:
    """Round values from 0 to at most `largest`, about `count` of them."""
    if largest <= 0:
        return [0.0]
    rough = largest / count
    magnitude = 10.0 ** floor(log10(rough))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= rough)
    return [i * step for i in range(int(largest / step + 1e-9) + 1)]


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
