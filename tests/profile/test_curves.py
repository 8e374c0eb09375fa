"""Curves are found again in points that lie on them, and say how far they are from those that do not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.estimate.curves import design_of, fit_curve, fits_table
from shardwright.io.table import Source
from shardwright.types import Recompute, SequenceParallel
from shardwright.types.model_profile import FitMode, LayerRow

_SIZES, _LENGTHS = np.array([1, 2, 4, 8, 1, 2, 4, 8]), np.array([64, 64, 64, 64, 128, 128, 256, 512])
_COEFFICIENT = st.floats(0.01, 100)


@settings(max_examples=50, deadline=None)
@given(mode=st.sampled_from(list(FitMode)), coefficients=st.tuples(_COEFFICIENT, _COEFFICIENT, _COEFFICIENT))
def test_a_curve_through_its_own_points_is_found_again(mode: FitMode, coefficients: tuple[float, float, float]) -> None:
    design = design_of(mode, _SIZES, _LENGTHS)
    used = design.any(axis=0)
    values = design @ np.array(coefficients)
    fit = fit_curve(design, values)
    assert fit is not None
    np.testing.assert_allclose(design @ fit.coefficients, values, rtol=1e-6)
    assert all(c == 0 for c, there in zip(fit.coefficients, used, strict=True) if not there)
    assert fit.worst_residual < 1e-6
    assert fit.left_out_error < 1e-4


def test_errors_are_those_counted_by_hand() -> None:
    # (1, 2), (2, 4), (4, 9): without the last the line says 8, without the first 1.5, without the second 13/3.
    fit = fit_curve(design_of(FitMode.BATCH, np.array([1, 2, 4]), np.ones(3)), np.array([2.0, 4.0, 9.0]))
    assert fit is not None
    assert (fit.points, fit.left_out_points) == (3, 3)
    assert fit.left_out_error == pytest.approx(np.median([1 / 9, 0.5 / 2, (13 / 3) / 4 - 1]))
    constant, linear, quadratic = fit.coefficients
    errors = sorted(abs((constant + linear * b) / t - 1) for b, t in ((1, 2), (2, 4), (4, 9)))
    assert quadratic == 0
    assert (fit.typical_residual, fit.worst_residual) == pytest.approx((errors[1], errors[2]))


def test_what_points_do_not_determine_is_not_fitted() -> None:
    assert fit_curve(design_of(FitMode.BATCH, np.array([4]), np.array([64])), np.array([1.0])) is None
    two_lengths = design_of(FitMode.SEQUENCE, np.array([1, 1]), np.array([64, 128]))
    assert fit_curve(two_lengths, np.array([1.0, 2.0])) is None
    line = fit_curve(design_of(FitMode.BATCH, np.array([1, 2]), np.array([64, 64])), np.array([1.0, 2.0]))
    assert line is not None
    assert (line.left_out_points, line.left_out_error) == (0, 0.0)


def test_a_profile_of_sizes_and_lengths_has_the_curves_of_every_mode() -> None:
    table = fits_table(_points({(b, 64) for b in (1, 2, 4)} | {(1, s) for s in (32, 128, 256)}))
    modes = [
        (mode.decode(), int(b), int(s), int(points))
        for quantity, mode, b, s, points in zip(
            *(table[name] for name in ("quantity", "mode", "micro_batch_size", "sequence_length", "points")),
            strict=True,
        )
        if quantity == b"forward_s"
    ]
    assert sorted(modes) == [
        ("batch", 0, 64, 3),
        ("joint", 0, 0, 6),
        ("sequence", 1, 0, 4),
        *(("static", 0, s, 3 if s == 64 else 1) for s in (32, 64, 128, 256)),
    ]
    joint = (table["mode"] == b"joint") & (table["quantity"] == b"forward_s")
    found = [float(table[name][joint][0]) for name in ("constant", "linear", "quadratic")]
    assert found == pytest.approx([1e-3, 2e-6, 3e-9])
    assert set(table["quantity"]) == {b"forward_s", b"backward_s"}, "activations are absent"


def _points(where: set[tuple[int, int]]) -> list[LayerRow]:
    return [
        LayerRow(
            type="block",
            tp_size=1,
            sequence_parallel=SequenceParallel.NONE,
            recompute=Recompute.NONE,
            micro_batch_size=b,
            sequence_length=s,
            forward_s=1e-3 + 2e-6 * b * s + 3e-9 * b * s**2,
            forward_source=Source.MEASURED,
            backward_s=2e-3 * b,
            backward_source=Source.MEASURED,
            activation_bytes=0,
            activation_source=Source.ABSENT,
            workspace_bytes=0,
            workspace_source=Source.ABSENT,
        )
        for b, s in sorted(where)
    ]
