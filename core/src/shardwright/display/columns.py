"""Printed tables that fit the width: a table with many columns is split into several."""

from collections.abc import Sequence
from typing import NamedTuple

_FRAME = 3
"""Characters that a column needs in addition to its cells: a line and two spaces."""
_WORDS_WIDTH = 40
"""The least width, in characters, of a column of words that is wider than this."""


class PrintedColumn(NamedTuple):
    """A column of a printed table; its heading and its cells may be wrapped between words."""

    heading: str
    cells: Sequence[str]
    is_text: bool = False
    """Whether cells are aligned left, as names are; numbers are aligned right."""
    is_words: bool = False

    @property
    def min_width(self) -> int:
        """Return the least width, in characters, when all that may be wrapped is."""
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

    `repeated`: number of columns that each table begins with; `room`: characters of a line; `most`: columns of a table.
    A table has one other column at least, even if there is no room for it.
    """
    first, blocks = list(columns[:repeated]), [list(columns[:repeated])]
    for column in columns[repeated:]:
        is_full = len(blocks[-1]) == most or _taken([*blocks[-1], column]) > room
        if len(blocks[-1]) > repeated and is_full:
            blocks.append(list(first))
        blocks[-1].append(column)
    return blocks


def widths_of(columns: Sequence[PrintedColumn], room: int) -> list[int]:
    """Return the width of each column of one table: its least width, and a share of the characters that are left."""
    widths, spare = [column.min_width for column in columns], room - _taken(columns)
    for number, column in enumerate(columns):
        more = max(0, min(spare, column.max_width - column.min_width))
        widths[number] += more
        spare -= more
    return widths


def _taken(columns: Sequence[PrintedColumn]) -> int:
    return 1 + sum(column.min_width + _FRAME for column in columns)
