"""Showing how far a sweep is: a bar on a terminal, else a line per measurement."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from shardwright_profile.hardware.job import Progress, Remark

__all__ = ["shown_progress"]


@contextmanager
def shown_progress() -> Iterator[Callable[[bytes], None]]:
    """Yield what takes rank 0's lines of JSON and shows them on standard error."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting the ranks", total=None)

        def update(line: bytes) -> None:
            match _said(line):
                case Progress(step=step, steps=steps, words=words):
                    bar.update(task, description=words, total=steps, completed=step)
                case Remark(words=words):
                    bar.console.print(words, markup=False, highlight=False)

        yield update


def _print_line(line: bytes) -> None:
    said = _said(line)
    counted = f"{said.step + 1}/{said.steps} " if isinstance(said, Progress) else ""
    print(f"{counted}{said.words}", file=sys.stderr, flush=True)


def _said(line: bytes) -> Progress | Remark:
    return msgspec.json.decode(line, type=Progress | Remark)
