"""The page of a grid, which opens offline: its picture, its tables, and the pictures of its fronts."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from grid_page import OURS, SIZE
from results import read_picture
from shardwright_formats.display.html import html_drawing, html_page, html_table, with_contents

_SPEEDS = "Samples a second, by the kinds of parallelism that are allowed"
_PICTURE = "Step times beside one another"
_EXPLAINED = (
    "A row is a model on a cluster, with a budget of memory for each device and a batch. A mark is the best plan of a "
    "space of plans, as far right as it takes longer than the best of the full space."
)


class _Section(NamedTuple):
    """A section of the Markdown page: its title, its text, and its table by rows."""

    title: str
    paragraphs: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def html(self) -> str:
        """Return text and table."""
        words = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in self.paragraphs)
        return words + (_table(self.rows) if len(self.rows) > 2 else "")


def grid_html(name: str, cells: pd.DataFrame, sections: Sequence[str], drawing: str, fronts: Sequence[Path]) -> str:
    """Return the page of a grid; `sections` are those of its Markdown page, of which the last ones are its fronts'."""
    parsed = [_section(section) for section in sections]
    first_front = len(parsed) - len(fronts)
    parts = [(_PICTURE, f"<p>{_EXPLAINED}</p>{html_drawing(drawing)}")]
    for number, section in enumerate(parsed):
        content = section.html
        if number >= first_front:
            content = html_drawing(read_picture(fronts[number - first_front].with_name("front.svg")).drawing) + content
        parts.append((section.title, content))
    return html_page(f"Grid {name}", escape(_first_line(cells)), with_contents(parts))


def _first_line(cells: pd.DataFrame) -> str:
    """Return what was compared, in words that need no knowledge of plans."""
    steps_s = cells.set_index([*SIZE, "space"])["predicted_step_s"].dropna().to_dict()
    ours = {tuple(size): step_s for (*size, space), step_s in steps_s.items() if space == OURS}
    gains = [
        min(others) / step_s
        for size, step_s in ours.items()
        if (others := [other for (*at, space), other in steps_s.items() if tuple(at) == size and space != OURS])
    ]
    most = f" Where all kinds may be combined, the best is up to {max(gains):.2f} times as fast." if gains else ""
    models, clusters = (_count(cells[name].nunique(), name) for name in ("model", "cluster"))
    return f"How fast {models} can be trained on {clusters} with each kind of parallelism, by its best plan.{most}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _section(markdown: str) -> _Section:
    lines = [line for line in markdown.splitlines() if line]
    title = lines[0].removeprefix("## ") if lines[0].startswith("## ") else _SPEEDS
    rows = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines if line.startswith("|")]
    return _Section(title, [line for line in lines if line[:1] not in "#|"], rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of a heading, a rule that says which columns are numbers, and rows; texts come first."""
    heading, rule, *body = rows
    texts = [place for place, kind in enumerate(rule) if not kind.endswith(":")]
    numbers = [place for place, kind in enumerate(rule) if kind.endswith(":")]

    def taken(row: Sequence[str], places: Sequence[int]) -> list[str]:
        return [row[place] for place in places]

    return html_table(
        taken(heading, texts),
        taken(heading, numbers),
        [(taken(row, texts), taken(row, numbers), False) for row in body],
    )
