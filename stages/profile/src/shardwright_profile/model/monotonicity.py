"""The monotonicity check: times that fall where there is more to do, which only noise can explain."""

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise
from math import hypot

from shardwright_formats.types.model_profile import LayerRow

_LIKELY = 3.0
"""A difference of so many standard errors is hardly chance."""


def falling_times(layers: Iterable[LayerRow]) -> Iterator[str]:
    """One sentence for each time that is shorter than that of a smaller micro-batch by more than three errors."""
    ordered = sorted(layers, key=lambda row: (row.curve, row.micro_batch_size))
    for _, points in groupby(ordered, key=lambda row: row.curve):
        for small, large in pairwise(points):
            for way in ("forward", "backward"):
                times_s = [getattr(row, f"{way}_s") for row in (small, large)]
                error_s = hypot(*(getattr(row, f"{way}_error_s") for row in (small, large)))
                if times_s[0] - times_s[1] > _LIKELY * error_s:
                    names = ("tp_size", "sequence_parallel", "recompute", "sequence_length")
                    strategy = ", ".join(f"{name} {getattr(small, name)}" for name in names)
                    yield (
                        f"not monotone: {way} time of {small.type} ({strategy}) falls from {times_s[0]:.4g} s to "
                        f"{times_s[1]:.4g} s as micro_batch_size grows from {small.micro_batch_size} to "
                        f"{large.micro_batch_size}"
                    )
