"""Layers that no probe has twice: those that change the shape of what they hand on."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from probe_plans import probe_settings

from shardwright.types import BoundaryTensor
from shardwright_profile.model import layers
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import layer_counts, make_probes

LAYERS = {"low": 2e-3, "merge": 3e-3, "high": 1e-3, "join": 1e-3, "top": 4e-3}


@pytest.fixture
def pyramid(make_model):
    """A model of three levels, whose merges have 30 and 10 operations, and whose blocks have 20 each."""
    model = make_model(("low", "low", "merge", "high", "join", "top"))
    sizes = {"embedding": 64, "low": 64, "merge": 32, "high": 32, "join": 16, "top": 16}
    operations = {"merge": 30, "join": 10}

    def level(name, kind):
        outputs = (BoundaryTensor(name="states", sequence_length=4, features=sizes[name]),) if name in sizes else ()
        return msgspec.structs.replace(kind, outputs=outputs, forward_flops_per_sample=operations.get(name, 20))

    return msgspec.structs.replace(model, types={name: level(name, kind) for name, kind in model.types.items()})


@pytest.fixture
def fitted(pyramid, make_cluster, make_measurement, make_constants):
    """The profile of the pyramid in a linear world."""

    def fit():
        plans = make_probes([pyramid], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
        held = {name: 100 * (number + 1) for number, name in enumerate(LAYERS)}
        constants = make_constants(base_s=1e-12, layer_s=LAYERS, layer_bytes=held)
        return fit_profile([(Path("m.json"), make_measurement(plans, constants))])

    return fit


def _row(table, name):
    chosen = (table["type"] == name.encode()) & (table["recompute"] == b"none") & (table["tp_size"] == 1)
    (place, *_) = np.flatnonzero(chosen & (table["micro_batch_size"] == 1))
    return place


def test_only_what_changes_no_shape_is_repeated(pyramid, make_cluster):
    assert pyramid.reshaping == ("merge", "join")
    probes = make_probes([pyramid], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
    counts = [layer_counts(plan.model) for plan in probes]
    assert {count["merge"] for count in counts} == {count["join"] for count in counts} == {1}
    assert {tuple(count[name] for name in ("low", "high", "top")) for count in counts} == {
        (1, 1, 1), (3, 1, 1), (1, 3, 1), (1, 1, 3), (3, 3, 3)
    }  # fmt: skip


def test_they_take_what_the_others_leave_of_the_shortest_probe(fitted, monkeypatch):
    monkeypatch.setattr(layers, "LIKELY", 0.0)
    table = fitted().layers
    merge, join = (_row(table, name) for name in ("merge", "join"))
    # 4 ms by operations: 30 and 10 of 40.
    np.testing.assert_allclose([table["forward_s"][row] for row in (merge, join)], [3e-3, 1e-3], rtol=1e-6)
    np.testing.assert_allclose([table["backward_s"][row] for row in (merge, join)], [6e-3, 2e-3], rtol=1e-6)
    assert table["forward_source"][merge] == b"derived"
    # 200 + 400 bytes and the segment's 11, by 128 and 64 elements handed on.
    assert [table["activation_bytes"][row] for row in (merge, join)] == [611 * 2 // 3, 611 // 3]


def test_what_noise_hides_is_as_fast_for_an_operation_as_the_layer_before(fitted):
    """The made-up repeats are so unlike that their errors hide what is left."""
    profile = fitted()
    merge, join, low, high = (_row(profile.layers, name) for name in ("merge", "join", "low", "high"))
    for time in ("forward_s", "backward_s"):
        column = profile.layers[time]
        np.testing.assert_allclose([column[merge], column[join]], [1.5 * column[low], column[high] / 2], rtol=1e-6)
    assert "hidden by noise: forward time of merge, join in 'toy@cpu-2" in profile.provenance.notes


def test_their_parameters_have_a_share_of_what_is_left(fitted, pyramid):
    states = fitted().states
    names = ("embedding", "merge", "join", "head")
    rows = {name: np.flatnonzero((states["type"] == name.encode()) & (states["tp_size"] == 1))[0] for name in names}
    left = 3000 + 200 + 400
    counts = {name: pyramid.types[name].parameter_count() for name in names}
    for name, row in rows.items():
        assert states["parameter_bytes"][row] == pytest.approx(left * counts[name] / sum(counts.values()), abs=3)
    assert sum(states["parameter_bytes"][row] for row in rows.values()) == left
