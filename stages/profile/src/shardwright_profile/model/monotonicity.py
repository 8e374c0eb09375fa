"""Times that fall where there is more to do, which only noise can explain."""

from collections.abc import Iterator
from itertools import pairwise
from math import hypot
from typing import Any

from shardwright_formats.io.hdf5 import Table

__all__ = ["falling_times"]

_LIKELY = 3.0
"""A difference of so many standard errors is hardly chance."""
_STRATEGY = ("type", "tp_size", "sequence_parallel", "recompute", "sequence_length")


def falling_times(layers: Table) -> Iterator[str]:
    """One sentence for each time that is shorter than that of a smaller micro-batch by more than three errors."""
    curves: dict[tuple[Any, ...], list[int]] = {}
    for row in range(len(layers["type"])):
        curves.setdefault(tuple(layers[name][row] for name in _STRATEGY), []).append(row)
    for rows in curves.values():
        rows.sort(key=lambda row: int(layers["micro_batch_size"][row]))
        for less, more in pairwise(rows):
            for way in ("forward", "backward"):
                before_s, after_s = (float(layers[f"{way}_s"][row]) for row in (less, more))
                error_s = hypot(*(float(layers[f"{way}_error_s"][row]) for row in (less, more)))
                if before_s - after_s > _LIKELY * error_s:
                    yield _sentence(layers, less, more, way)


def _sentence(layers: Table, less: int, more: int, way: str) -> str:
    strategy = ", ".join(
        f"{name} {value.decode() if isinstance(value, bytes) else value}"
        for name, value in ((name, layers[name][less]) for name in _STRATEGY[1:])
    )
    times = " to ".join(f"{float(layers[f'{way}_s'][row]):.4g} s" for row in (less, more))
    sizes = " to ".join(str(layers["micro_batch_size"][row]) for row in (less, more))
    name = layers["type"][less].decode()
    return f"not monotone: {way} time of {name} ({strategy}) falls from {times} as micro_batch_size grows from {sizes}"
