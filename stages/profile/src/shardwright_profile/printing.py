"""Tables for terminals: split by columns if they are too wide, with lines between groups of rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from shardwright.display.columns import PrintedColumn, split_columns, widths_of


class SplitTable(NamedTuple):
    """A table that is printed as several tables if its columns do not fit next to one another."""

    title: str
    columns: Sequence[PrintedColumn]
    repeated: int
    """Number of columns that each of the tables begins with."""
    ends: frozenset[int] = frozenset()
    """Numbers of rows, from 1, that a line follows."""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the tables, as rich requests them."""
        for number, columns in enumerate(split_columns(self.columns, self.repeated, options.max_width)):
            yield self._part(f"{self.title}{' (continued)' if number else ''}", columns, options.max_width)

    def _part(self, title: str, columns: Sequence[PrintedColumn], room: int) -> Table:
        made = Table(title=title, title_justify="left")
        for column, width in zip(columns, widths_of(columns, room), strict=True):
            made.add_column(column.heading, justify="left" if column.is_text else "right", width=width)
        for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True), start=1):
            made.add_row(*cells, end_section=number in self.ends)
        return made


def table_of(
    title: str, labels: Sequence[str], numbers: Sequence[str], groups: Iterator[Sequence[Sequence[str]]]
) -> SplitTable:
    """A table of groups of rows: texts under `labels`, the same columns in each part, then numbers."""
    each = list(groups)
    rows = [row for group in each for row in group]
    columns = [
        PrintedColumn(heading, [row[place] for row in rows], place < len(labels))
        for place, heading in enumerate((*labels, *numbers))
    ]
    ends = frozenset(sum(map(len, each[:count])) for count in range(1, len(each)))
    return SplitTable(title, columns, len(labels), ends)
