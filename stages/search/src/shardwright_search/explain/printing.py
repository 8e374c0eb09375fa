"""Tables as wide as the terminal at most, and what prints them."""

import sys
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from shardwright.command import show
from shardwright.display.columns import PIPED_WIDTH, PrintedColumn, split_columns, widths_of

PLAN = "plan"
"""Heading of a column whose cells have lines of their own."""
WORDS = (PLAN, "less of it by")
"""Headings of columns of words, which are broken where there is no room."""


class SplitTable(NamedTuple):
    """A table of texts in the first column and in those of words, and of numbers in the others, which are never broken.

    Where its columns have no room beside one another, it is printed as several tables, each with the first column.
    """

    title: str
    columns: Sequence[PrintedColumn]
    rows_above: int
    """Number of rows above the line, if there are more."""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables."""
        for number, columns in enumerate(split_columns(self.columns, 1, options.max_width)):
            made = Table(title=f"{self.title}{' (continued)' if number else ''}", title_justify="left")
            for column, width in zip(columns, widths_of(columns, options.max_width), strict=True):
                made.add_column(column.heading, justify="left" if column.is_text else "right", width=width)
            for row, cells in enumerate(zip(*(column.cells for column in columns), strict=True), start=1):
                made.add_row(*cells, end_section=row == self.rows_above)
            yield made


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], last: Iterable[Sequence[str]] = ()
) -> SplitTable:
    """Return a table of texts in the first column and numbers in the others; `last` are rows below a line."""
    above, below = list(rows), list(last)
    columns = [
        PrintedColumn(
            heading, [row[place] for row in (*above, *below)], not place or heading in WORDS, heading in WORDS
        )
        for place, heading in enumerate(headings)
    ]
    return SplitTable(title, columns, len(above))


def show_rich(content: RenderableType, at_most: int = PIPED_WIDTH) -> None:
    """Print on standard output, tables as wide as the terminal at most, or as `at_most` characters."""
    printed, is_terminal = StringIO(), sys.stdout.isatty()
    width = None if is_terminal else at_most
    console = Console(
        file=printed, force_terminal=is_terminal, width=width, highlight=False, markup=False, soft_wrap=True
    )
    console.print(content)
    show(printed.getvalue().removesuffix("\n"))
