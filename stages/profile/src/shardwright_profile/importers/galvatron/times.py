"""Forward times of layers from Galvatron's times of whole models, and the defects of these times.

A layer's time is (T(more layers) - T(fewer)) / (more - fewer), as in Galvatron.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright.estimate.curves import design_of, fit_curve
from shardwright.io import BadInput
from shardwright.io.table import Source
from shardwright.types.model_profile import FitMode
from shardwright_profile.importers.galvatron.keys import Computation, Lengths

_STALE = 1e-3
"""Relative difference above which a figure of the file counts as different from its own raw rows."""

Row = tuple[tuple[int, ...], int]
"""A forward pass: the number of layers of each type, and the batch."""


class Point(NamedTuple):
    """The forward seconds of one layer for one micro-batch of a size."""

    micro_batch_size: int
    time_s: float
    source: Source


class LayerTimes(NamedTuple):
    """The forward times at one sequence length, from one file."""

    layers: tuple[tuple[Point, ...], ...]
    """Points of one layer, by layer type."""
    rest: tuple[Point, ...]
    """Points of embedding and head together."""
    notes: tuple[str, ...]


class _Defects:
    """The defects of a file: each raises BadInput or, with `repair`, adds a note on the repair."""

    def __init__(self, file: Path, repair: bool) -> None:
        self.file, self._repair, self.notes = file, repair, list[str]()

    def report(self, problem: str, remedy: str) -> None:
        if not self._repair:
            raise BadInput(self.file, problem, "measure it again, or pass --repair to leave out or level such values")
        self.notes.append(f"{problem}: {remedy}.")


class _Difference(NamedTuple):
    layer_ms: float
    """Milliseconds of one layer for the whole batch."""
    fewer: tuple[int, ...]
    more: tuple[int, ...]
    """Number of layers of each type in the row with more layers; `fewer`: in the other row."""


def lengths_of(computation: Computation, sequence_length: int) -> Lengths:
    """Return the file's lengths by type that start with `sequence_length`; empty for a file without lengths."""
    timed = sorted({forward.lengths for forward in computation.forwards})
    for lengths in timed:
        if lengths[:1] == (sequence_length,):
            return lengths
    if timed == [()]:
        return ()
    known = ", ".join(str(lengths[0]) for lengths in timed if lengths) or "none"
    problem = f"no times at sequence_length {sequence_length}, only at {known}"
    raise BadInput(computation.file, problem, "describe the model at one of these")


def layer_times(computation: Computation, lengths: Lengths, repair: bool) -> LayerTimes:
    """Return the times of each layer type, and of embedding and head, at one sequence length.

    Impossible times (times that fall as the batch grows, layers that take no time, rows without another row to compare
    with) raise BadInput; with `repair` they are left out or levelled, and a note says so.
    """
    file, defects = computation.file, _Defects(computation.file, repair)
    rows = {(f.layers, f.batch): ms for f, ms in computation.forwards.items() if f.lengths == lengths}
    if not rows:
        raise BadInput(file, f"no raw times of whole models at lengths {list(lengths)}", "measure these again")
    if len({len(layers) for layers, _ in rows}) > 1:
        raise BadInput(
            file, "layernum[…] lists numbers of layers for different counts of types", "pass one model's file"
        )
    rows = _without_falls(rows, defects)
    _check_lone_rows(rows, defects)
    types = range(len(next(iter(rows))[0]))
    batches = sorted({batch for _, batch in rows})
    layers = [tuple(_layer_points(rows, i, batches, defects)) for i in types]
    for i, points in enumerate(layers):
        if not points:
            raise BadInput(file, f"no two usable rows differ only in the layers of type {i}", "measure them")
    rest = tuple(_rest_points(rows, len(types), batches, defects.notes))
    defects.notes += _stale(computation, rows, lengths, len(types))
    levelled_layers = tuple(_without_dips(i, points, defects) for i, points in enumerate(layers))
    return LayerTimes(levelled_layers, rest, tuple(defects.notes))


def _without_falls(rows: Mapping[Row, float], defects: _Defects) -> dict[Row, float]:
    kept: dict[Row, float] = {}
    for layers in sorted({layers for layers, _ in rows}):
        batches = sorted(batch for other, batch in rows if other == layers)
        values = [rows[(layers, batch)] for batch in batches]
        if (fall := first_fall(values)) is not None:
            run = longest_rise(values)
            defects.report(
                f"{_name(layers)} takes {values[fall - 1]:.4g} ms at batch {batches[fall - 1]} and"
                f" {values[fall]:.4g} ms at {batches[fall]}",
                f"only its batches {batches[run.start]} to {batches[run.stop - 1]} are used",
            )
            batches = [batches[i] for i in run]
        kept |= {(layers, batch): rows[(layers, batch)] for batch in batches}
    return kept


def _check_lone_rows(rows: Mapping[Row, float], defects: _Defects) -> None:
    for layers, batch in sorted(rows):
        others = (other for other, same in rows if same == batch and other != layers)
        if not any(_differing_type(layers, other) is not None for other in others):
            problem = f"{_name(layers)} at batch {batch} has no row with another number of layers to compare with"
            defects.report(problem, "it is left out")


def _layer_points(rows: Mapping[Row, float], index: int, batches: Sequence[int], defects: _Defects) -> Iterator[Point]:
    for batch in batches:
        best = max(_differences(rows, index, batch), key=_by_layers, default=None)
        if best is not None and best.layer_ms > 0:
            yield Point(batch, best.layer_ms / 1000, Source.MEASURED)
        elif best is not None:
            takes = f"a layer of type {index} takes {best.layer_ms:.4g} ms at batch {batch}"
            defects.report(f"{takes}, by the difference of its rows", "that point is left out")


def _rest_points(rows: Mapping[Row, float], types: int, batches: Sequence[int], notes: list[str]) -> Iterator[Point]:
    """Yield the time of the forward pass with the fewest layers minus these layers; none if that is not positive."""
    for batch in batches:
        smallest = [
            min(_differences(rows, i, batch), key=lambda difference: (difference.fewer, difference.more), default=None)
            for i in range(types)
        ]
        known = [difference for difference in smallest if difference is not None]
        if len(known) < types or len({difference.fewer for difference in known}) > 1:
            continue
        fewer = known[0].fewer
        layers_ms = sum(n * difference.layer_ms for n, difference in zip(fewer, known, strict=True))
        rest_ms = rows[(fewer, batch)] - layers_ms
        if rest_ms > 0:
            yield Point(batch, rest_ms / 1000, Source.DERIVED)
        else:
            notes.append(f"Embedding and head at batch {batch} have {rest_ms:.4g} ms left: their time is absent.")


def _without_dips(index: int, points: tuple[Point, ...], defects: _Defects) -> tuple[Point, ...]:
    if (fall := first_fall([point.time_s for point in points])) is None:
        return points
    before, after = points[fall - 1], points[fall]
    defects.report(
        f"a layer of type {index} takes {before.time_s * 1000:.4g} ms at batch {before.micro_batch_size} and"
        f" {after.time_s * 1000:.4g} ms at {after.micro_batch_size}",
        "times that fall are levelled",
    )
    return levelled(points)


def _stale(computation: Computation, rows: Mapping[Row, float], lengths: Lengths, types: int) -> Iterator[str]:
    """Yield a sentence for each layer time of the file that is not positive or contradicts all its raw rows."""
    batches = sorted({batch for _, batch in rows})
    for (index, batch, length), given_ms in sorted(computation.layers.items()):
        if index >= types or length != lengths[index : index + 1]:
            continue
        at = f" at batch {batch}" if batch else ""
        raw = [(d, b) for b in batches if batch in (0, b) for d in _differences(rows, index, b)]
        if given_ms <= 0:
            yield f"The file's layertype_{index}{at} is {given_ms:.4g} ms a sample, which cannot be: it is not used."
        elif raw and all(abs(given_ms - d.layer_ms / b) > _STALE * abs(d.layer_ms / b) for d, b in raw):
            best, b = max(raw, key=lambda item: _by_layers(item[0]))
            yield (
                f"The file's layertype_{index}{at} is {given_ms:.4g} ms a sample, {_name(best.fewer)} and"
                f" {_name(best.more)} at batch {b} give {best.layer_ms / b:.4g} ms: the raw rows are taken."
            )


def _differences(rows: Mapping[Row, float], index: int, batch: int) -> Iterator[_Difference]:
    """Yield every pair of rows of a batch that differ only in the number of layers of one type."""
    for fewer, more in combinations(sorted(layers for layers, other in rows if other == batch), 2):
        if _differing_type(fewer, more) == index:
            step_ms = rows[(more, batch)] - rows[(fewer, batch)]
            yield _Difference(step_ms / (more[index] - fewer[index]), fewer, more)


def _by_layers(difference: _Difference) -> tuple[tuple[int, ...], ...]:
    """Return a sort key that is largest for the pair with the most layers, in which other work matters least."""
    return difference.more, difference.fewer


def _differing_type(first: tuple[int, ...], second: tuple[int, ...]) -> int | None:
    differing = [i for i, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
    return differing[0] if len(differing) == 1 else None


def _name(layers: tuple[int, ...]) -> str:
    return f"layernum[{','.join(map(str, layers))}]"


def first_fall(values: Sequence[float]) -> int | None:
    """Return the index of the first value that is below its predecessor; None if values never fall."""
    return next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)


def longest_rise(values: Sequence[float]) -> range:
    """Return the range of indices of the longest run without a fall; the last one if several are equally long."""
    best, start = range(0), 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] < values[i - 1]:
            best = max(best, range(start, i), key=lambda run: (len(run), run.start))
            start = i
    return best


def levelled(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return the nearest non-decreasing times: falling neighbours become their mean, marked derived.

    This is least squares under monotonicity, by pooling adjacent violators (Ayer et al. 1955).
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
    """Return the points together with the requested ones that are missing, which lie on a fitted line, marked derived.

    The line is m b + c at micro-batch size b, Galvatron's batch mode. With one point, or if that line is not positive,
    it is m b, Galvatron's static mode.
    """
    wanted = sorted(set(micro_batch_sizes) - {point.micro_batch_size for point in points})
    if not points or not wanted:
        return tuple(points)
    sizes = np.array([point.micro_batch_size for point in points])
    times_s = np.array([point.time_s for point in points])
    on_line: dict[int, float] = {}
    for mode in (FitMode.STATIC, FitMode.BATCH):
        fit = fit_curve(design_of(mode, sizes, np.ones_like(sizes)), times_s)
        if fit is not None:
            line_s = design_of(mode, np.array(wanted), np.ones(len(wanted))) @ fit.coefficients
            on_line |= {size: float(time_s) for size, time_s in zip(wanted, line_s, strict=True) if time_s > 0}
    return tuple(sorted([*points, *(Point(size, time_s, Source.DERIVED) for size, time_s in on_line.items())]))


def _mean_s(pool: Sequence[Point]) -> float:
    return sum(point.time_s for point in pool) / len(pool)
