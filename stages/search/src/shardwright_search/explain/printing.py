"""Tables and lines that fit the terminal's width."""

import sys
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from shardwright.command import show
from shardwright.display.columns import PrintedColumn, line_width, split_columns, widths_of, wrapped, wrapped_command

PLAN = "plan"
"""Heading of a column whose cells have lines of their own."""
WORDS = (PLAN, "less of it by")
"""Headings of columns of words, which are wrapped if there is no room."""

_MOST_COLUMNS = 6


class Lines(NamedTuple):
    """Lines of text, wrapped at the terminal's width."""

    lines: Sequence[str]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the wrapped lines, as rich requests them."""
        yield Text(wrapped(self.lines, options.max_width))


class ShellCommand(NamedTuple):
    """A shell command to copy, continued by backslashes."""

    command: str

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the wrapped command, as rich requests it."""
        yield Text(wrapped_command(self.command, options.max_width))


class SplitTable(NamedTuple):
    """A table with columns of texts, which may be wrapped, and of numbers, which never are.

    If its columns have no room side by side, it is printed as several tables, each with the first column.
    """

    title: str
    columns: Sequence[PrintedColumn]
    rows_above: int
    """Number of rows above the line, if there are more."""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables, as rich requests them."""
        for number, columns in enumerate(split_columns(self.columns, 1, options.max_width, _MOST_COLUMNS)):
            yield Text(wrapped([f"{self.title}{' (continued)' if number else ''}"], options.max_width))
            made = Table()
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


def show_rich(content: RenderableType) -> None:
    """Print on standard output, tables and lines as wide as the terminal at most."""
    printed, is_terminal = StringIO(), sys.stdout.isatty()
    console = Console(
        file=printed, force_terminal=is_terminal, width=line_width(), highlight=False, markup=False, soft_wrap=True
    )
    console.print(content)
    show(printed.getvalue().removesuffix("\n"))
