"""Times of one kind of layer at growing micro-batches, with where each comes from."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.table import Source
from shardwright_formats.types.model_profile import FitMode
from shardwright_profile.model.curves import design_of, fit_curve


class Point(NamedTuple):
    """Forward time of one layer at one micro-batch."""

    micro_batch_size: int
    time_s: float
    source: Source


def first_fall(values: Sequence[float]) -> int | None:
    """The place of the first value that is below the one before it; None where values never fall."""
    return next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)


def longest_rise(values: Sequence[float]) -> range:
    """The places of the longest run without a fall; of equally long ones the last."""
    best, start = range(0), 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] < values[i - 1]:
            best = max(best, range(start, i), key=lambda run: (len(run), run.start))
            start = i
    return best


def levelled(points: Sequence[Point]) -> tuple[Point, ...]:
    """The non-falling times nearest to those given: means of neighbours that fall, marked derived.

    Least squares under monotonicity, by pooling adjacent violators (Ayer et al. 1955).
    """
    pools: list[list[Point]] = []
    for point in points:
        pools.append([point])
        while len(pools) > 1 and _mean_s(pools[-1]) < _mean_s(pools[-2]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return tuple(
        point if len(pool) == 1 else Point(point.micro_batch_size, _mean_s(pool), Source.DERIVED)
        for pool in pools
        for point in pool
    )


def completed(points: Sequence[Point], micro_batch_sizes: Iterable[int]) -> tuple[Point, ...]:
    """The points, and those asked for that are not among them, off the line through all, marked derived.

    Galvatron's batch mode fits m b + c; from one point, or where that line is not positive, its static mode m b serves.
    """
    wanted = sorted(set(micro_batch_sizes) - {point.micro_batch_size for point in points})
    if not points or not wanted:
        return tuple(points)
    sizes = np.array([point.micro_batch_size for point in points])
    times_s = np.array([point.time_s for point in points])
    found: dict[int, float] = {}
    for mode in (FitMode.STATIC, FitMode.BATCH):
        fit = fit_curve(design_of(mode, sizes, np.ones_like(sizes)), times_s)
        if fit is not None:
            line_s = design_of(mode, np.array(wanted), np.ones(len(wanted))) @ fit.coefficients
            found |= {size: float(time_s) for size, time_s in zip(wanted, line_s, strict=True) if time_s > 0}
    return tuple(sorted([*points, *(Point(size, time_s, Source.DERIVED) for size, time_s in found.items())]))


def _mean_s(pool: Sequence[Point]) -> float:
    return sum(point.time_s for point in pool) / len(pool)
