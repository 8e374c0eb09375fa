"""Curves through the points of a model profile: how time and memory grow with micro-batch and sequence length."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright_formats.io.hdf5 import Table, table_of
from shardwright_formats.types.model_profile import FITS, FitMode

__all__ = ["QUANTITIES", "Fit", "design_of", "fit_curve", "fits_table"]

QUANTITIES = ("forward_s", "backward_s", "activation_bytes")
"""The columns of `layers` that curves are fitted to."""

_KEY = ("type", "tp_size", "sequence_parallel", "recompute")


class Fit(NamedTuple):
    """Coefficients of one curve, and what it leaves unexplained (all errors relative to the points)."""

    coefficients: tuple[float, float, float]
    """constant, linear, quadratic."""
    points: int
    typical_residual: float
    worst_residual: float
    left_out_points: int
    left_out_error: float


def design_of(mode: FitMode, micro_batch_sizes: NDArray[Any], sequence_lengths: NDArray[Any]) -> NDArray[Any]:
    """What multiplies a curve's coefficients at some points: [points, 3], 0 where the mode has no such term."""
    b, s = micro_batch_sizes.astype(float), sequence_lengths.astype(float)
    one, none = np.ones_like(b), np.zeros_like(b)
    columns = {
        FitMode.STATIC: (none, b, none),
        FitMode.BATCH: (one, b, none),
        FitMode.SEQUENCE: (one, s, s**2),
        FitMode.JOINT: (one, b * s, b * s**2),
    }
    return np.stack(columns[mode], 1)


def fit_curve(design: NDArray[Any], values: NDArray[Any]) -> Fit | None:
    """The curve nearest to positive values [points], by least squares of the relative errors.

    None where the points do not determine it. Each point is also left out in turn and predicted by a curve through the
    others, where these determine one.
    """
    coefficients = _solved(design, values)
    if coefficients is None:
        return None
    errors = np.abs(design @ coefficients / values - 1)
    left_out = []
    for point in range(len(values)):
        others = np.arange(len(values)) != point
        found = _solved(design[others], values[others])
        if found is not None:
            left_out.append(abs(float(design[point] @ found / values[point]) - 1))
    constant, linear, quadratic = (float(c) for c in coefficients)
    return Fit(
        (constant, linear, quadratic),
        len(values),
        float(np.median(errors)),
        float(errors.max()),
        len(left_out),
        float(np.median(left_out)) if left_out else 0.0,
    )


def fits_table(layers: Table) -> Table:
    """Every curve that the points of the table `layers` determine."""
    return table_of(FITS, _rows(layers))


def _rows(layers: Table) -> Iterator[dict[str, object]]:
    count = len(layers["type"])
    keys = [tuple(layers[name][row] for name in _KEY) for row in range(count)]
    for key, found in groupby(sorted(range(count), key=lambda row: keys[row]), key=lambda row: keys[row]):
        rows = np.array(list(found))
        for quantity in QUANTITIES:
            known = rows[layers[quantity][rows] > 0]
            for fixed, mode, points in _selections(layers, known):
                b, s = (layers[name][points] for name in ("micro_batch_size", "sequence_length"))
                fit = fit_curve(design_of(mode, b, s), layers[quantity][points].astype(float))
                if fit is not None:
                    yield dict(zip(_KEY, key, strict=True)) | _row(quantity, mode, fixed, fit)


def _selections(layers: Table, rows: NDArray[Any]) -> Iterator[tuple[Mapping[str, int], FitMode, NDArray[Any]]]:
    """Which points each curve goes through, and what they have in common."""
    b, s = layers["micro_batch_size"][rows], layers["sequence_length"][rows]
    for length in np.unique(s):
        for mode in (FitMode.STATIC, FitMode.BATCH):
            yield {"micro_batch_size": 0, "sequence_length": int(length)}, mode, rows[s == length]
    for size in np.unique(b):
        yield {"micro_batch_size": int(size), "sequence_length": 0}, FitMode.SEQUENCE, rows[b == size]
    yield {"micro_batch_size": 0, "sequence_length": 0}, FitMode.JOINT, rows


def _row(quantity: str, mode: FitMode, fixed: Mapping[str, int], fit: Fit) -> dict[str, object]:
    constant, linear, quadratic = fit.coefficients
    return {
        "quantity": quantity,
        "mode": mode.value,
        **fixed,
        "constant": constant,
        "linear": linear,
        "quadratic": quadratic,
        "points": fit.points,
        "typical_residual": fit.typical_residual,
        "worst_residual": fit.worst_residual,
        "left_out_points": fit.left_out_points,
        "left_out_error": fit.left_out_error,
    }


def _solved(design: NDArray[Any], values: NDArray[Any]) -> NDArray[Any] | None:
    used = np.flatnonzero(design.any(axis=0))
    if not len(values) or not len(used):
        return None
    # Each row over its value: a relative error of any point counts alike. Columns are scaled for the rank's sake.
    relative = design[:, used] / values[:, None]
    scale = np.abs(relative).max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(relative / scale, np.ones(len(values)), rcond=1e-9)
    if rank < len(used):
        return None
    coefficients = np.zeros(design.shape[1])
    coefficients[used] = solution / scale
    return coefficients
