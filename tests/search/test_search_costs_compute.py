"""Time and memory of a layer, read off a profile: numbers worked out by hand."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from made_up import make_curve

from shardwright.estimate.settings import Grid, ProfileSettings
from shardwright.io import BadInput
from shardwright.io.table import Table
from shardwright.key import LayerKey
from shardwright.types import Recompute, SequenceParallel, Strategy
from shardwright.types.model_profile import FitMode, FitRow, Quantity
from shardwright_search.cost_model.compute import ComputeCost, layer_cost, states_of
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.time_model import TimeModel

BLOCK = LayerKey.from_strategy("block", Strategy(tp_size=1, dp_size=1), sequence_length=32)


def interpolated(profiles: Profiles, size: int, key: LayerKey = BLOCK) -> ComputeCost:
    return layer_cost(profiles, key, size, TimeModel.INTERPOLATE)


def curve(mode: str, quantity: str, size: int, length: int, *coefficients: float) -> FitRow:
    of = {"mode": FitMode(mode), "quantity": Quantity(quantity), "micro_batch_size": size, "sequence_length": length}
    return make_curve(*coefficients, **of)


@pytest.fixture
def fitted(make):
    """A profile with these curves, made of points at 1 to 8 samples of 32 tokens."""

    def with_curves(*rows: FitRow) -> Profiles:
        model, cluster = make.model(), make.cluster()
        profile = replace(make.profile(model), fits=Table.from_rows(FitRow, rows))
        return make.index(make.hardware(cluster), profile)

    return with_curves


def test_layer_time_is_interpolated_between_measured_samples(make):
    profiles = make.profiles(make.model(), make.cluster())
    exact, between = interpolated(profiles, 4), interpolated(profiles, 6)
    assert exact.figures.forward_s == pytest.approx(4.2e-4) and exact.figures.backward_s == pytest.approx(8.4e-4)
    assert between.figures.forward_s == pytest.approx(6.2e-4) and between.warning is None
    assert between.figures.activation_bytes == 120 * 6 * 32 * 64


def test_layer_time_outside_the_measured_range_is_extrapolated_with_a_warning(make):
    profiles = make.profiles(make.model(), make.cluster(), micro_batch_sizes=(2, 4))
    above, below = interpolated(profiles, 8), interpolated(profiles, 1)
    assert above.figures.forward_s == pytest.approx(8.2e-4) and below.figures.forward_s == pytest.approx(1.2e-4)
    assert above.warning is not None and "micro_batch_size 8, measured 2 to 4" in above.warning
    assert below.warning is not None


def test_one_measured_size_alone_cannot_be_extended(make):
    profiles = make.profiles(make.model(), make.cluster(), micro_batch_sizes=(2,))
    with pytest.raises(BadInput, match=r"^m\.h5: block .* micro_batch_size 4 cannot be extrapolated from \[2\]: add"):
        interpolated(profiles, 4)


@pytest.mark.parametrize(("size", "advice"), [(4, "set grid to full"), (8, "add it to micro_batch_sizes and set grid")])
def test_the_advice_for_a_further_length_is_followed(make, size, advice):
    """Property: settings that were changed as the message says measure what was asked for, and it has a price."""
    asked = {"tp_sizes": (1,), "sequence_parallel": (SequenceParallel.NONE,), "recompute": (Recompute.NONE,)}
    settings = ProfileSettings(**asked, micro_batch_sizes=(1, 2, 4), sequence_lengths=(16,))
    further = msgspec.structs.replace(BLOCK, sequence_length=16)

    def measured(settings: ProfileSettings) -> Profiles:
        def points(length: int) -> object:
            sizes = settings.sizes(length, 32)
            return make.profiles(make.model(), make.cluster(), micro_batch_sizes=sizes).layers[BLOCK]

        layers = {BLOCK: points(32), further: points(16)}
        return make.profiles(make.model(), make.cluster())._replace(layers=layers)

    with pytest.raises(BadInput, match=rf"micro_batch_size {size} cannot be extrapolated from \[1\]: {advice}"):
        interpolated(measured(settings), size, further)
    sizes = tuple(sorted({*settings.micro_batch_sizes, size})) if "add it" in advice else settings.micro_batch_sizes
    changed = msgspec.structs.replace(settings, grid=Grid.FULL, micro_batch_sizes=sizes)
    assert interpolated(measured(changed), size, further).warning is None


def test_times_that_an_extrapolation_makes_negative_are_refused(make):
    profiles = make.profiles(make.model(), make.cluster(), micro_batch_sizes=(4, 8))
    points = profiles.layers[BLOCK]
    steep = points._replace(values=points.values * np.array([[0.1, 1, 1, 1], [1, 1, 1, 1]]))
    with pytest.raises(BadInput, match="micro_batch_size 1 cannot be extrapolated"):
        interpolated(profiles._replace(layers={BLOCK: steep}), 1)


def test_a_missing_combination_is_named_with_its_remedy(make):
    profiles = make.profiles(make.model(), make.cluster(), tp_sizes=(1,))
    with pytest.raises(BadInput, match=r"^m\.h5: no point for block tp_size 2 sequence_parallel none .* sequence$"):
        interpolated(profiles, 4, msgspec.structs.replace(BLOCK, tp_size=2))
    with pytest.raises(BadInput, match=r"^m\.h5: no states for block tp_size 2"):
        states_of(profiles, "block", 2)


def test_static_times_are_proportional_and_batch_times_a_line(fitted):
    profiles = fitted(
        *(curve("static", name, 0, 32, 0.0, 3e-4, 0.0) for name in ("forward_s", "backward_s")),
        curve("static", "activation_bytes", 0, 32, 0.0, 1000.0, 0.0),
        *(curve("batch", name, 0, 32, 1e-4, 2e-4, 0.0) for name in ("forward_s", "backward_s")),
        curve("batch", "activation_bytes", 0, 32, 500.0, 900.0, 0.0),
    )
    static = layer_cost(profiles, BLOCK, 4, TimeModel.STATIC)
    assert (static.figures.forward_s, static.figures.activation_bytes) == pytest.approx((12e-4, 4000))
    batch = layer_cost(profiles, BLOCK, 4, TimeModel.BATCH)
    assert (batch.figures.backward_s, batch.figures.activation_bytes) == pytest.approx((9e-4, 4100))
    # what is held for a moment has no curve: the point measured at 4 samples
    assert batch.figures.workspace_bytes == 24 * 4 * 2048
    assert batch.warning is None
    beyond = layer_cost(profiles, BLOCK, 16, TimeModel.BATCH)
    assert beyond.warning is not None and "micro_batch_size 16, measured 1 to 8" in beyond.warning
    assert beyond.figures.workspace_bytes == 2 * 24 * 8 * 2048, "grows with the tokens from 8 samples"


def test_sequence_times_are_quadratic_in_a_length_that_was_never_profiled(fitted):
    """At 2 samples 1e-5 + 2e-6 s + 1e-8 s^2: 178.72 us at 48 tokens, and 4 samples take twice that."""
    quantities = ("forward_s", "backward_s", "activation_bytes")
    profiles = fitted(*(curve("sequence", name, 2, 0, 1e-5, 2e-6, 1e-8) for name in quantities))
    found = layer_cost(profiles, msgspec.structs.replace(BLOCK, sequence_length=48), 4, TimeModel.SEQUENCE)
    at_two = 1e-5 + 48 * 2e-6 + 48 * 48 * 1e-8
    assert at_two == pytest.approx(129.04e-6)
    assert (found.figures.forward_s, found.figures.backward_s) == pytest.approx((2 * at_two, 2 * at_two))
    assert found.figures.workspace_bytes == pytest.approx(24 * 4 * 2048 * 48 / 32)
    assert found.warning is not None
    assert "extrapolated" in found.warning and "sequence_length 48, nearest measured 32" in found.warning


def test_a_joint_curve_serves_every_size_and_length(fitted):
    quantities = ("forward_s", "backward_s", "activation_bytes")
    profiles = fitted(*(curve("joint", name, 0, 0, 1e-5, 2e-6, 1e-8) for name in quantities))
    found = layer_cost(profiles, msgspec.structs.replace(BLOCK, sequence_length=64), 3, TimeModel.SEQUENCE)
    assert found.figures.forward_s == pytest.approx(1e-5 + 3 * 64 * 2e-6 + 3 * 64**2 * 1e-8)


def test_a_curve_that_is_missing_is_told_and_the_points_serve(fitted):
    plain = layer_cost(fitted(), BLOCK, 6, TimeModel.BATCH)
    assert plain.figures == interpolated(fitted(), 6).figures
    assert plain.warning == "no batch curve of block: taken from its points, in proportion to the tokens"
    longer = layer_cost(fitted(), msgspec.structs.replace(BLOCK, sequence_length=64), 6, TimeModel.SEQUENCE)
    assert longer.figures == pytest.approx([2 * value for value in interpolated(fitted(), 6).figures])
    assert "no sequence curve of block" in str(longer.warning)
    assert "sequence_length 64, nearest measured 32" in str(longer.warning)


def test_a_curve_below_zero_is_refused(fitted):
    names = ("forward_s", "backward_s", "activation_bytes")
    falling = fitted(*(curve("batch", name, 0, 32, 1e-4, -1e-4, 0.0) for name in names))
    with pytest.raises(BadInput, match="the batch curve is negative at micro_batch_size 4"):
        layer_cost(falling, BLOCK, 4, TimeModel.BATCH)


def test_a_combination_without_any_point_has_no_curve_either(fitted):
    with pytest.raises(BadInput, match=r"^m\.h5: no point for block tp_size 3 .* probes again$"):
        layer_cost(fitted(), msgspec.structs.replace(BLOCK, tp_size=3), 4, TimeModel.BATCH)
