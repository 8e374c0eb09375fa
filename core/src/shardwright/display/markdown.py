"""Sections of a page in Markdown, with all texts escaped."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_SIGNS = re.compile(r"[\\`*\[\]<>|&]")


class Section(NamedTuple):
    """A part of a page: its title, empty if it has none, its paragraphs, and a table whose first columns are texts.

    All are plain texts; each format escapes them as it is written.
    """

    title: str
    paragraphs: Sequence[str]
    words: Sequence[str] = ()
    """Headings of the columns of texts."""
    numbers: Sequence[str] = ()
    """Headings of the columns of numbers, which follow the columns of text."""
    rows: Sequence[Sequence[str]] = ()
    """Cells of each row: of texts, then of numbers."""

    @property
    def markdown(self) -> str:
        """Return the section, which ends in a line break."""
        heading = [f"## {markdown_text(self.title)}", ""] if self.title else []
        paragraphs = [line for text in self.paragraphs for line in (markdown_text(text), "")]
        rule = (*("---" for _ in self.words), *("---:" for _ in self.numbers))
        names = [_line([*map(markdown_text, (*self.words, *self.numbers))]), _line(rule)] if rule else []
        rows = [_line([*map(markdown_text, row)]) for row in self.rows]
        return "\n".join([*heading, *paragraphs, *names, *rows, *([""] if rule else [])])


def markdown_text(text: str) -> str:
    """Return a text on one line with Markdown's special characters escaped."""
    return _SIGNS.sub(r"\\\g<0>", " ".join(text.split()))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
