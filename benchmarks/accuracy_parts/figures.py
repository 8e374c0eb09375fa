"""Comparisons of predictions with measured numbers: errors by set, rank correlation, and printed tables."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np


class Compared(NamedTuple):
    """A predicted and a measured number, in the same unit."""

    set: str
    """Name of the set within which errors are aggregated."""
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Return the absolute error of the prediction, relative to the measured number."""
        return abs(self.predicted / self.measured - 1)


def figures(rows: Iterable[Compared]) -> list[dict[str, Any]]:
    """Return for each set its size, mean, median and worst error, and the median of predicted over measured."""
    sets: dict[str, list[Compared]] = {}
    for row in rows:
        sets.setdefault(row.set, []).append(row)
    return [
        {
            "set": name,
            "points": len(own),
            "mean_error": fmean(row.error for row in own),
            "median_error": median(row.error for row in own),
            "worst_error": max(row.error for row in own),
            "worst": max(own, key=lambda row: row.error).what,
            "median_predicted_over_measured": median(row.predicted / row.measured for row in own),
        }
        for name, own in sorted(sets.items())
    ]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values get the mean of their ranks."""
    ranks = [_ranks(np.asarray(values, float)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def show(rows: Sequence[Compared], sets: Sequence[dict[str, Any]], every_row: bool) -> None:
    """Print the sets and, if `every_row`, each row before them."""
    if every_row:
        for row in rows:
            ratio = row.predicted / row.measured
            print(f"{row.set}: {row.what}: measured {row.measured:.5g}, predicted {row.predicted:.5g} ({ratio:.3f})")
    print(f"{'set':58} {'points':>6} {'mean':>7} {'median':>7} {'worst':>7} {'predicted/measured':>19}  worst")
    for one in sets:
        errors = " ".join(f"{one[name]:7.1%}" for name in ("mean_error", "median_error", "worst_error"))
        ratio = one["median_predicted_over_measured"]
        print(f"{one['set']:58} {one['points']:6} {errors} {ratio:19.2f}  {one['worst']}")


def _ranks(values: Any) -> Any:  # noqa: ANN401
    order = np.unique(values, return_inverse=True, return_counts=True)
    _, place, counts = order
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[place]
