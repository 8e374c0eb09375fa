"""How long a sweep takes at least, from two messages timed beforehand."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Line", "Workload", "estimate_words", "least_s", "line_through"]


class Line(NamedTuple):
    """A message's time as a constant and a time per byte."""

    constant_s: float
    s_per_byte: float


class Workload(NamedTuple):
    """Sizes in bytes of what is timed whatever the budget, and is not known yet."""

    points: Sequence[int]
    pairs: Sequence[int]
    """One size a round: the pairs of a round are timed at once."""
    overlap: Sequence[int]
    case_messages: float
    """How many messages' time one case of overlap takes."""
    least_repeats: int
    warm_up_repeats: int


def line_through(small: tuple[int, float], large: tuple[int, float]) -> Line:
    """The line through two sizes in bytes and their times in seconds, flat where the larger was no slower."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    slope = max(0.0, large_s - small_s) / (large_bytes - small_bytes) if large_bytes > small_bytes else 0.0
    return Line(small_s - slope * small_bytes, slope)


def least_s(work: Workload, line: Line) -> float:
    """Seconds of the fewest repeats of everything, as if every message took what the line says."""

    def once_s(sizes: Sequence[int]) -> float:
        return sum(line.constant_s + line.s_per_byte * size for size in sizes)

    messages_s = once_s(work.points) + once_s(work.pairs) + work.case_messages * once_s(work.overlap)
    return (work.warm_up_repeats + work.least_repeats) * messages_s


def estimate_words(work: Workload, kept: int, needed_s: float, given_s: float) -> str:
    """What is told before the sweep."""
    counts = f"{len(work.points)} points, {len(work.pairs)} rounds of pairs, {len(work.overlap)} overlaps"
    resumed = f"; {kept} measurements of a killed sweep are kept" if kept else ""
    longer = ": the small sizes are timed all the same" if needed_s > given_s else ""
    return (
        f"hardware: {counts}, at least {work.least_repeats} repeats each: about {needed_s:.2g} s needed, "
        f"{given_s:.4g} s given{longer}{resumed}"
    )
