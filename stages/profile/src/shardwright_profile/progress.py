"""Showing how far a sweep is: a bar on a terminal, else a line per kind of message."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from shardwright_profile.sweep_job import Progress
from shardwright_profile.units import bytes_text, seconds_text

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
            now = msgspec.json.decode(line, type=Progress)
            bar.update(task, description=_words(now), total=now.kinds, completed=now.number)

        yield update


def _print_line(line: bytes) -> None:
    now = msgspec.json.decode(line, type=Progress)
    print(f"{now.number + 1}/{now.kinds} {_words(now)}", file=sys.stderr, flush=True)


def _words(now: Progress) -> str:
    return f"{now.kind}: {bytes_text(now.message_bytes)} in {seconds_text(now.median_s)} ({now.repeats} repeats)"
