"""How long a sweep takes, foretold from two collectives, and how far it is: a bar on a terminal, else lines."""

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
        """Seconds of one collective of each size in bytes."""
        return sum(self.constant_s + self.s_per_byte * size for size in sizes)


def line_through(small: tuple[int, float], large: tuple[int, float]) -> Line:
    """The line through two sizes in bytes and their times in seconds, flat where the larger was no slower."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    slope = max(0.0, large_s - small_s) / (large_bytes - small_bytes) if large_bytes > small_bytes else 0.0
    return Line(small_s - slope * small_bytes, slope)


class Workload(NamedTuple):
    """Sizes in bytes of what is timed whatever the budget, and is not known yet."""

    points: Sequence[int]
    pairs: Sequence[int]
    """One size a round: the pairs of a round are timed at once."""
    overlap: Sequence[int]
    case_messages: float
    """How many collectives' time one case of overlap takes."""
    min_repeats: int
    warm_up_repeats: int

    def min_s(self, line: Line) -> float:
        """Seconds of the fewest repeats of everything, as if every collective took what the line says."""
        once_s = line.sum_s(self.points) + line.sum_s(self.pairs) + self.case_messages * line.sum_s(self.overlap)
        return (self.warm_up_repeats + self.min_repeats) * once_s

    def estimate(self, kept: int, needed_s: float, given_s: float) -> str:
        """What is said before the sweep; `kept` is how many measurements are known."""
        counts = f"{len(self.points)} points, {len(self.pairs)} rounds of pairs, {len(self.overlap)} overlaps"
        resumed = f"; {kept} measurements of a killed sweep are kept" if kept else ""
        longer = ": the small sizes are timed all the same" if needed_s > given_s else ""
        return (
            f"hardware: {counts}, at least {self.min_repeats} repeats each: about {needed_s:.2g} s needed, "
            f"{given_s:.4g} s given{longer}{resumed}"
        )


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
