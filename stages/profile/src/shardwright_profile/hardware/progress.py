"""The progress of a sweep: its time, estimated from two collectives, and a bar on a terminal or lines elsewhere."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from shardwright_profile.hardware.profile import Progress, Remark


class Line(NamedTuple):
    """A collective's time as a constant and a time per byte."""

    constant_s: float
    s_per_byte: float

    def sum_s(self, sizes: Sequence[int]) -> float:
        """Return the seconds of one collective of each size in bytes."""
        return sum(self.constant_s + self.s_per_byte * size for size in sizes)


def line_through(small: tuple[int, float], large: tuple[int, float]) -> Line:
    """Return the line through two sizes in bytes and their times in seconds, flat where the larger was no slower."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    slope = max(0.0, large_s - small_s) / (large_bytes - small_bytes) if large_bytes > small_bytes else 0.0
    return Line(small_s - slope * small_bytes, slope)


class Workload(NamedTuple):
    """The sizes in bytes of messages that are timed whatever the budget, and are not in the journal yet."""

    points: Sequence[int]
    pairs: Sequence[int]
    """Message size of each round in bytes: the pairs of a round are timed at once."""
    overlap: Sequence[int]
    case_messages: float
    """Time of one overlap of all ratios, in times of its collective."""
    min_repeats: int
    warm_up_repeats: int

    def min_s(self, line: Line) -> float:
        """Return the seconds of the fewest repeats of everything, if every collective took the line's time."""
        once_s = line.sum_s(self.points) + line.sum_s(self.pairs) + self.case_messages * line.sum_s(self.overlap)
        return (self.warm_up_repeats + self.min_repeats) * once_s

    def estimate(self, kept: int, needed_s: float, given_s: float) -> str:
        """Return the message before the sweep; `kept` is the number of measurements that are known."""
        counts = f"{len(self.points)} points, {len(self.pairs)} rounds of pairs, {len(self.overlap)} overlaps"
        resumed = f"; {kept} measurements of a killed sweep are kept" if kept else ""
        longer = ": the small sizes are timed all the same" if needed_s > given_s else ""
        return (
            f"hardware: {counts}, at least {self.min_repeats} repeats each: about {needed_s:.2g} s needed, "
            f"{given_s:.4g} s given{longer}{resumed}"
        )


@contextmanager
def shown_progress() -> Iterator[Callable[[bytes], None]]:
    """Yield a function that takes rank 0's lines of JSON and shows them on standard error."""
    if not sys.stderr.isatty():
        yield _print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("starting the ranks", total=None)

        def update(line: bytes) -> None:
            match _said(line):
                case Progress(step=step, steps=steps, text=text):
                    bar.update(task, description=text, total=steps, completed=step)
                case Remark(text=text):
                    bar.console.print(text, markup=False, highlight=False)

        yield update


def _print_line(line: bytes) -> None:
    said = _said(line)
    counted = f"{said.step + 1}/{said.steps} " if isinstance(said, Progress) else ""
    print(f"{counted}{said.text}", file=sys.stderr, flush=True)


def _said(line: bytes) -> Progress | Remark:
    return msgspec.json.decode(line, type=Progress | Remark)
