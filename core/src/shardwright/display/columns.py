"""Printed tables that fit the width: a table with many columns is split into several."""

import re
import sys
from collections.abc import Iterable, Sequence
from os import environ
from shutil import get_terminal_size
from textwrap import TextWrapper
from typing import NamedTuple

_FRAME = 3
"""Number of characters that a column needs in addition to its cells: a line and two spaces."""
_WORDS_WIDTH = 40
"""Width, in characters, below which a column of words is not narrowed to fit the line."""


class PrintedColumn(NamedTuple):
    """A column of a printed table; its heading and its cells may be wrapped between words."""

    heading: str
    cells: Sequence[str]
    is_text: bool = False
    """Whether cells are aligned left, as names are; numbers are aligned right."""
    is_words: bool = False

    @property
    def min_width(self) -> int:
        """Return the least width, in characters, if everything that may be wrapped is wrapped."""
        heading = max(map(len, self.heading.split()), default=0)
        return max(heading, min(self._widest, _WORDS_WIDTH) if self.is_words else self._widest)

    @property
    def max_width(self) -> int:
        """Return the width, in characters, at which nothing is wrapped."""
        return max(len(self.heading), self._widest)

    @property
    def _widest(self) -> int:
        return max((len(line) for cell in self.cells for line in cell.split("\n")), default=0)


def split_columns(
    columns: Sequence[PrintedColumn], repeated: int, room: int, most: int | None = None
) -> list[list[PrintedColumn]]:
    """Return the columns of each part of a split table: all leading columns, and as many of the others as fit.

    `repeated`: number of leading columns, with which each part begins; `room`: characters per line; `most`: largest
    number of columns of a part. Each part has at least one other column, even if it does not fit.
    """
    first, blocks = list(columns[:repeated]), [list(columns[:repeated])]
    for column in columns[repeated:]:
        is_full = len(blocks[-1]) == most or _taken([*blocks[-1], column]) > room
        if len(blocks[-1]) > repeated and is_full:
            blocks.append(list(first))
        blocks[-1].append(column)
    return blocks


def widths_of(columns: Sequence[PrintedColumn], room: int) -> list[int]:
    """Return the width of each column of one table: its least width, and a share of the remaining characters."""
    widths, spare = [column.min_width for column in columns], room - _taken(columns)
    for number, column in enumerate(columns):
        more = max(0, min(spare, column.max_width - column.min_width))
        widths[number] += more
        spare -= more
    return widths


def _taken(columns: Sequence[PrintedColumn]) -> int:
    return 1 + sum(column.min_width + _FRAME for column in columns)


# Lines of text that are no wider than the terminal.


PIPED_WIDTH = 100
"""Number of characters per line if the output is not a terminal and COLUMNS is not set."""
_QUOTED = re.compile(r"(?:\"[^\"]*\"|'[^']*'|[^\s\"'])+")


def line_width() -> int:
    """Return the width of a line of standard output: the terminal's width, else COLUMNS, else `PIPED_WIDTH`."""
    is_known = sys.stdout.isatty() or environ.get("COLUMNS", "").isdigit()
    return get_terminal_size((PIPED_WIDTH, 24)).columns if is_known else PIPED_WIDTH


def wrapped(lines: Iterable[str], width: int) -> str:
    """Return lines wrapped between words; continuation lines are indented."""
    return "\n".join(_wrapped(part, width) for line in lines for part in line.split("\n"))


def wrapped_command(command: str, width: int) -> str:
    """Return an indented shell command, wrapped with backslashes; quoted words are not split."""
    indent, lines = command[: len(command) - len(command.lstrip())], [""]
    for word in _QUOTED.findall(command):
        if lines[-1] and len(f"{indent}    {lines[-1]} {word} \\") > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(f"{indent}{'    ' if number else ''}{line}" for number, line in enumerate(lines))


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    further = indent + "    " if len(indent) + 24 < width else ""
    wrapper = TextWrapper(width, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
    return wrapper.fill(line.strip())
