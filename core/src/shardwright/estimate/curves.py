"""Curves through the points of a model profile: how time and memory grow with micro-batch and sequence length."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardwright.io.table import Table
from shardwright.key import rows_by_key
from shardwright.types.model_profile import FitMode, FitRow, LayerRow, Quantity


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients of a fitted curve, and its errors relative to the points."""

    constant: float
    linear: float
    quadratic: float
    points: int
    typical_residual: float
    worst_residual: float
    left_out_points: int
    left_out_error: float

    @property
    def coefficients(self) -> NDArray[Any]:
        """Return the constant, the linear and the quadratic coefficient."""
        return np.array([self.constant, self.linear, self.quadratic])


def design_of(mode: FitMode, micro_batch_sizes: NDArray[Any], sequence_lengths: NDArray[Any]) -> NDArray[Any]:
    """Return the factors of a curve's three coefficients at some points [points, 3]; 0 if the mode has no such term."""
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
    """Return the curve nearest to positive values [points], by least squares of the relative errors.

    None if the points do not determine a curve. For `left_out_error`, each point is also predicted by a curve through
    the other points, if they determine one.
    """
    coefficients = _solved(design, values)
    if coefficients is None:
        return None
    errors = np.abs(design @ coefficients / values - 1)
    left_out = []
    for point in range(len(values)):
        others = np.arange(len(values)) != point
        without_point = _solved(design[others], values[others])
        if without_point is not None:
            left_out.append(abs(float(design[point] @ without_point / values[point]) - 1))
    constant, linear, quadratic = (float(c) for c in coefficients)
    return Fit(
        constant=constant,
        linear=linear,
        quadratic=quadratic,
        points=len(values),
        typical_residual=float(np.median(errors)),
        worst_residual=float(errors.max()),
        left_out_points=len(left_out),
        left_out_error=float(np.median(left_out)) if left_out else 0.0,
    )


def fits_table(layers: Iterable[LayerRow]) -> Table[FitRow]:
    """Return the table of all curves that the points determine."""
    return Table.from_rows(FitRow, _rows(layers))


def on_joint_curve(curve: FitRow, samples: int, length: int) -> float:
    """Return the value of a joint curve for a micro-batch of `samples` samples of `length` tokens."""
    return curve.constant + curve.linear * samples * length + curve.quadratic * samples * length**2


def of_other_shares(curve: FitRow | None, samples: int, length: int, parts: int) -> float:
    """Return what attention of a share of `length` positions to the other `parts` - 1 shares adds to a quantity.

    The quadratic term of the joint curve gives the cost of pairs of positions; it counts as 0 if it is negative, or if
    there is no such curve.
    """
    return 0.0 if curve is None else max(0.0, curve.quadratic) * samples * length**2 * (parts - 1)


def _rows(layers: Iterable[LayerRow]) -> Iterator[FitRow]:
    for key, rows in rows_by_key(layers, "micro_batch_size", "sequence_length").items():
        for quantity in Quantity:
            known = [row for row in rows if getattr(row, quantity) > 0]
            for mode, size, length, points in _selections(known):
                sizes = np.array([row.micro_batch_size for row in points])
                lengths = np.array([row.sequence_length for row in points])
                values = np.array([getattr(row, quantity) for row in points], float)
                fit = fit_curve(design_of(mode, sizes, lengths), values)
                if fit is not None:
                    columns = key.columns | {"micro_batch_size": size, "sequence_length": length}
                    yield FitRow(**columns, quantity=quantity, mode=mode, **msgspec.structs.asdict(fit))


def _selections(rows: Sequence[LayerRow]) -> Iterator[tuple[FitMode, int, int, Sequence[LayerRow]]]:
    """Yield each curve's mode, its points' fixed micro-batch size and length (0 if they vary), and its points."""
    for length in sorted({row.sequence_length for row in rows}):
        for mode in (FitMode.STATIC, FitMode.BATCH):
            yield mode, 0, length, [row for row in rows if row.sequence_length == length]
    for size in sorted({row.micro_batch_size for row in rows}):
        yield FitMode.SEQUENCE, size, 0, [row for row in rows if row.micro_batch_size == size]
    yield FitMode.JOINT, 0, 0, rows


def _solved(design: NDArray[Any], values: NDArray[Any]) -> NDArray[Any] | None:
    used = np.flatnonzero(design.any(axis=0))
    if not len(values) or not len(used):
        return None
    # Rows are divided by their values, so that relative errors of all points count equally. Columns are scaled for the
    # sake of the rank.
    relative = design[:, used] / values[:, None]
    scale = np.abs(relative).max(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(relative / scale, np.ones(len(values)), rcond=1e-9)
    if rank < len(used):
        return None
    coefficients = np.zeros(design.shape[1])
    coefficients[used] = solution / scale
    return coefficients
