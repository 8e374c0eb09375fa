"""Pages that open offline: their head and style, contents, tables, tiles, and pictures that grow when clicked."""

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from shardwright.display.svg import NARROW, STYLE, WIDTH

Row = tuple[Sequence[str], Sequence[str], bool]
"""Words and numbers of a row, and whether the row is highlighted."""


def html_page(title: str, first_line: str, body: str, script: str = "") -> str:
    """Return a self-contained page with a title and a first line (HTML) above its body.

    `script`: JavaScript that runs after the page is loaded.
    """
    run = f"<script>{script}</script>" if script else ""
    style = STYLE + files("shardwright.display").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="first">{first_line}</p>{body}</main>'
        f"{run}</body></html>\n"
    )


def with_contents(sections: Iterable[tuple[str, str]], note: str = "", before: str = "") -> str:
    """Return a table of contents, the introduction `before`, and the sections, each with a title and HTML.

    `note`: text below the table of contents.
    """
    parts = listed = ""
    for number, (title, content) in enumerate(sections, start=1):
        parts += f'<section id="part-{number}"><h2>{escape(title)}</h2>{content}</section>'
        listed += f'<li><a href="#part-{number}">{escape(title)}</a></li>'
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f'<nav aria-label="contents"><ol>{listed}</ol>{words}</nav>{before}{parts}'


def html_figure(title: str, draw: Callable[[float], str]) -> str:
    """Return a picture below its title, which is HTML."""
    return f"<h3>{title}</h3>{html_drawings(draw)}"


def html_drawings(draw: Callable[[float], str]) -> str:
    """Return a picture drawn twice, at the width of a page and of a phone; the page shows the one that suits its width.

    Thus words in the picture have the same size on both.
    """
    return f'<div class="either">{html_drawing(draw(WIDTH))}<div class="narrow">{draw(NARROW)}</div></div>'


def html_drawing(drawing: str) -> str:
    """Return a drawing as wide as the page; a click shows it at full size, to be scrolled, without a script."""
    return f'<label class="wide"><input type="checkbox" aria-label="larger"/>{drawing}</label>'


def html_tiles(tiles: Iterable[tuple[str, str]]) -> str:
    """Return a row of tiles, each a number with a caption below it."""
    drawn = (f'<div class="tile"><b>{escape(value)}</b><span>{escape(words)}</span></div>' for value, words in tiles)
    return f'<div class="tiles">{"".join(drawn)}</div>'


def html_list(sentences: Iterable[str]) -> str:
    """Return sentences as an HTML list; empty if there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def html_table(words: Sequence[str], numbers: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table whose last columns are `numbers`; empty if it has no rows.

    Each cell contains its column's name, which a narrow page shows next to it, with one cell below another.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in words)
    head += "".join(f'<th class="number">{escape(name)}</th>' for name in numbers)
    body = "".join(_row((*words, *numbers), *row) for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(names: Sequence[str], words: Sequence[str], numbers: Sequence[str], stands_out: bool) -> str:
    kinds = [""] * len(words) + [' class="number"'] * len(numbers)
    named = zip(kinds, names, (*words, *numbers), strict=True)
    cells = "".join(f'<td{kind} data-name="{escape(name)}">{escape(cell)}</td>' for kind, name, cell in named)
    style = ' class="chosen"' if stands_out else ""
    return f"<tr{style}>{cells}</tr>"


# Sections of a page in Markdown, with all strings escaped.


_SIGNS = re.compile(r"[\\`*\[\]<>|&]")


class Section(NamedTuple):
    """A part of a page: its title (may be empty), its paragraphs, and a table whose first columns are words.

    All are plain strings; each format escapes them when it is written.
    """

    title: str
    paragraphs: Sequence[str]
    words: Sequence[str] = ()
    """Headings of the columns of words."""
    numbers: Sequence[str] = ()
    """Headings of the columns of numbers, which follow the columns of words."""
    rows: Sequence[Sequence[str]] = ()
    """Cells of each row: words, then numbers."""

    @property
    def markdown(self) -> str:
        """Return the section in Markdown, ending with a line break."""
        heading = [f"## {markdown_text(self.title)}", ""] if self.title else []
        paragraphs = [line for text in self.paragraphs for line in (markdown_text(text), "")]
        rule = (*("---" for _ in self.words), *("---:" for _ in self.numbers))
        names = [_line([*map(markdown_text, (*self.words, *self.numbers))]), _line(rule)] if rule else []
        rows = [_line([*map(markdown_text, row)]) for row in self.rows]
        return "\n".join([*heading, *paragraphs, *names, *rows, *([""] if rule else [])])


def markdown_text(text: str) -> str:
    """Return text on one line with Markdown's special characters escaped."""
    return _SIGNS.sub(r"\\\g<0>", " ".join(text.split()))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
