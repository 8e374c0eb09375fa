from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from probe_plans import probe_settings

from shardwright.io import BadInput
from shardwright.io.table import Row, Table
from shardwright.types import (
    DataParallel,
    GradientReduction,
    Measurement,
    Model,
    Precision,
    Recompute,
    SequenceParallel,
)
from shardwright.types.model_profile import LayerRow, StateRow, read_model_profile, write_model_profile
from shardwright_profile.model.fit import fit_profile
from shardwright_profile.model.probes import make_probes

_SECONDS = st.floats(1e-6, 1.0)
_BYTES = st.integers(0, 10**9)


def _rows(table: Table[Row], name: str) -> NDArray[Any]:
    return np.flatnonzero(table["type"] == name.encode())


@settings(max_examples=25, deadline=None)
@given(
    base_s=_SECONDS,
    first_s=_SECONDS,
    second_s=_SECONDS,
    first_bytes=_BYTES,
    second_bytes=_BYTES,
    ends_bytes=_BYTES,
    constant_s=_SECONDS,
    slope=st.floats(1e-9, 1e-3),
    overhead_s=_SECONDS,
    layers=st.sampled_from([(1, 2), (1, 3), (2, 5)]),
)
def test_fit_recovers_the_constants_of_a_linear_world(
    make_model,
    make_cluster,
    make_measurement,
    make_constants,
    base_s,
    first_s,
    second_s,
    first_bytes,
    second_bytes,
    ends_bytes,
    constant_s,
    slope,
    overhead_s,
    layers,
):
    layer_s = {"encoder": first_s, "decoder": second_s}
    layer_bytes = {"encoder": first_bytes, "decoder": second_bytes}
    constants = make_constants(
        base_s=base_s,
        layer_s=layer_s,
        layer_bytes=layer_bytes,
        workspace_bytes=50,
        ends_bytes=ends_bytes,
        optimizer_constant_s=constant_s,
        optimizer_s_per_parameter=slope,
        overhead_s=overhead_s,
    )
    model = make_model(("encoder", "encoder", "decoder"))
    plans = make_probes([model], make_cluster((1, 2)), "cpu-2", probe_settings(layers=layers)).plans
    profile = fit_profile([(Path("m.json"), make_measurement(plans, constants))])
    table = profile.layers
    for name in layer_s:
        rows = _rows(table, name)
        assert len(rows) == 3 * 2 * 2
        samples = table["micro_batch_size"][rows]
        tolerance = 1e-9 * (base_s + sum(layer_s.values()))
        np.testing.assert_allclose(table["forward_s"][rows], samples * layer_s[name], rtol=1e-9, atol=tolerance)
        passes = np.where(table["recompute"][rows] == b"full", 3, 2)
        backward_s = passes * samples * layer_s[name]
        np.testing.assert_allclose(table["backward_s"][rows], backward_s, rtol=1e-9, atol=2 * tolerance)
        assert (table["activation_bytes"][rows] == samples * layer_bytes[name]).all()
        assert (table["workspace_bytes"][rows] == 50).all()
    for name, factor, held_bytes in (("embedding", 1, 7), ("head", 2, 13)):
        rows = _rows(table, name)
        assert set(table["recompute"][rows]) == {b"none"}
        np.testing.assert_allclose(table["forward_s"][rows], factor * base_s)
        np.testing.assert_allclose(table["backward_s"][rows], 2 * factor * base_s)
        assert (table["activation_bytes"][rows] == held_bytes).all()
    _check_states(model, profile.states, layer_bytes, ends_bytes, slope, constant_s)
    np.testing.assert_allclose(profile.process["step_overhead_s"], [overhead_s + constant_s], rtol=1e-4)
    assert profile.process["process_bytes"].tolist() == [101]
    assert profile.process["communicator_bytes"].tolist() == [0], "over gloo there are none"
    assert profile.process["resident_bytes"].tolist() == [1001]


def _check_states(
    model: Model,
    states: Table[StateRow],
    layer_bytes: Mapping[str, int],
    ends_bytes: int,
    slope: float,
    constant_s: float,
) -> None:
    for row in range(len(states["type"])):
        name, tp_size = states["type"][row].decode(), int(states["tp_size"][row])
        parameters = model.types[name].parameter_count(tp_size)
        tolerance = 1e-9 * constant_s
        np.testing.assert_allclose(states["optimizer_s"][row], slope * parameters, rtol=1e-6, atol=tolerance)
        assert states["reduction_ranks"][row] == 2 // tp_size
        if name in layer_bytes:
            assert states["parameter_bytes"][row] == layer_bytes[name]
            assert states["gradient_bytes"][row] == layer_bytes[name]
            assert states["optimizer_bytes"][row] == 2 * layer_bytes[name]
    for tp_size in (1, 2):
        rows = [r for n in ("embedding", "head") for r in _rows(states, n) if states["tp_size"][r] == tp_size]
        embedding, head = (model.types[name].parameter_count(tp_size) for name in ("embedding", "head"))
        assert states["parameter_bytes"][rows].sum() == ends_bytes
        assert states["optimizer_bytes"][rows].sum() == 2 * ends_bytes
        assert abs(states["parameter_bytes"][rows[0]] - ends_bytes * embedding / (embedding + head)) <= 1


def test_embedding_and_head_that_are_not_divided_are_fitted_to_probes_of_whole_layers(
    make_model, make_cluster, make_measurement, make_constants
):
    model = make_model(whole_ends=True)
    settings = probe_settings(sequence_parallel=(SequenceParallel.NONE,), micro_batch_sizes=(2, 4))
    plans = make_probes([model], make_cluster((1, 2)), "cpu-2", settings).plans
    profile = fit_profile([(Path("m.json"), make_measurement(plans, make_constants(gather_s=0.1)))])
    layers, states = profile.layers, profile.states
    sizes = {name: {int(layers["tp_size"][row]) for row in _rows(layers, name)} for name in model.types}
    assert sizes == {"embedding": {1}, "block": {1, 2}, "head": {1}}
    found = {(states["type"][row].decode(), int(states["tp_size"][row])): row for row in range(len(states["type"]))}
    assert found.keys() == {("embedding", 1), ("block", 1), ("block", 2), ("head", 1)}
    row = found["block", 2]
    assert (states["reduction_s"][row], states["reduction_ranks"][row]) == (0, 1)
    # The line goes through all probes: the optimizer's time is in proportion to what a rank updates.
    for (name, tp_size), row in found.items():
        updated_s = make_constants().optimizer_s_per_parameter * model.types[name].parameter_count(tp_size)
        np.testing.assert_allclose(states["optimizer_s"][row], updated_s, rtol=1e-6)


def test_equal_measurements_give_equal_bytes_in_whatever_order_they_come(
    plans, make_measurement, make_constants, tmp_path
):
    halves = [(Path(f"{i}.json"), make_measurement(plans[i::2], make_constants())) for i in range(2)]
    whole = make_measurement(plans[::-1], make_constants())
    for name, measurements in (("a", halves), ("b", halves[::-1]), ("c", [(Path("w.json"), whole)])):
        write_model_profile(tmp_path / f"{name}.h5", fit_profile(measurements))
    one, *others = ((tmp_path / f"{name}.h5").read_bytes() for name in "abc")
    assert others == [one, one]
    assert read_model_profile(tmp_path / "a.h5").origin.precision == "float32/float32/float32"


def test_sources_are_measured_for_layers_and_derived_elsewhere(plans, make_measurement, make_constants):
    profile = fit_profile([(Path("m.json"), make_measurement(plans, make_constants()))])
    layers = Table.from_rows(LayerRow, (row for row in profile.layers.rows if row.recompute is Recompute.NONE))
    for table, source in ((layers, b"measured"), (profile.states, b"derived"), (profile.process, b"derived")):
        sources = [values for name, values in table.columns.items() if name.endswith("_source")]
        assert sources
        assert {value for values in sources for value in values} == {source}


def test_tied_weights_are_updated_once(make_model, make_cluster, make_measurement, make_constants):
    plans = make_probes([make_model(tied=True)], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
    profile = fit_profile([(Path("m.json"), make_measurement(plans, make_constants(overhead_s=0.0)))])
    assert profile.process["step_overhead_s"][0] == pytest.approx(4e-3, rel=1e-6)
    parameters = [plans[0].model.types["block"].parameter_count(tp_size) for tp_size in (1, 2)]
    rows = _rows(profile.states, "block")
    np.testing.assert_allclose(profile.states["optimizer_s"][rows], 1e-7 * np.array(parameters), rtol=1e-6)


def test_optimizer_times_that_fall_with_the_parameters_all_go_to_the_step(plans, make_measurement, make_constants):
    constants = make_constants(optimizer_constant_s=1.0, optimizer_s_per_parameter=-1e-6)
    profile = fit_profile([(Path("m.json"), make_measurement(plans, constants))])
    assert (profile.states["optimizer_s"] == 0).all()
    assert profile.process["step_overhead_s"][0] == pytest.approx(1.0, rel=0.01)


def test_a_negative_start_of_the_optimizer_line_is_no_time_given_back(plans, make_measurement, make_constants):
    constants = make_constants(optimizer_constant_s=-1e-3, optimizer_s_per_parameter=1e-5, overhead_s=0.0)
    profile = fit_profile([(Path("m.json"), make_measurement(plans, constants))])
    assert (profile.states["optimizer_s"] > 0).all()
    assert profile.process["step_overhead_s"][0] == pytest.approx(0.0, abs=1e-12)


def test_probes_under_ulysses_cost_layers_but_tell_nothing_of_split_parameters(
    make_model, make_cluster, make_measurement, make_constants
):
    asked = probe_settings(sequence_parallel=(SequenceParallel.ULYSSES,))
    plans = make_probes([make_model()], make_cluster((1, 2)), "cpu-2", asked).plans
    profile = fit_profile([(Path("m.json"), make_measurement(plans, make_constants()))])
    assert set(profile.layers["sequence_parallel"]) == {b"none", b"ulysses"}
    assert set(profile.states["tp_size"]) == {1}


def _refusal(measurements: Sequence[Measurement]) -> str:
    with pytest.raises(BadInput) as caught:
        fit_profile([(Path(f"{i}.json"), measurement) for i, measurement in enumerate(measurements)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_layer_that_takes_no_time_is_refused_with_both_probes_and_their_values(
    plans, make_measurement, make_constants
):
    message = _refusal([make_measurement(plans, make_constants(layer_s={"block": 0.0}))])
    assert "forward time" in message
    assert "block=1' (0.001 s)" in message
    assert "block=3' (0.001 s)" in message
    assert message.endswith("measure both with more --steps on a quieter machine")


def test_fewer_bytes_with_more_layers_are_refused(plans, make_measurement, make_constants):
    constants = make_constants(layer_bytes={"block": -1}, ends_bytes=10**6)
    assert "activation memory of" in _refusal([make_measurement(plans, constants)])


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_probe_without_its_partner_is_refused(plans, make_measurement, make_constants, dropped):
    kept = [plan for i, plan in enumerate(plans) if i != dropped]
    assert "has no partner with more layers of type 'block'" in _refusal([make_measurement(kept, make_constants())])


def test_a_probe_measured_twice_is_refused(plans, make_measurement, make_constants):
    measurement = make_measurement(plans, make_constants())
    assert "was already measured in 0.json" in _refusal([measurement, measurement])


def test_measurements_that_cannot_be_compared_are_refused(
    plans, make_model, make_cluster, make_measurement, make_constants
):
    measured = make_measurement(plans, make_constants())
    other = make_probes([make_model(("other",) * 4)], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
    assert "architecture_sha256 is" in _refusal([measured, make_measurement(other, make_constants())])
    other_device = make_measurement(plans, make_constants(), device="gpu")
    assert _refusal([measured, other_device]).startswith("1.json: device is 'gpu', but 'cpu' in 0.json")
    halved = probe_settings(precision=Precision(compute="bfloat16"))
    in_bfloat16 = make_probes([make_model()], make_cluster((1, 2)), "cpu-2", halved).plans
    message = _refusal([measured, make_measurement(in_bfloat16, make_constants())])
    assert "precision is 'float32/bfloat16/float32', but 'float32/float32/float32' in 0.json" in message
    compiled = make_probes([make_model()], make_cluster((1, 2)), "cpu-2", probe_settings(compile=True)).plans
    message = _refusal([measured, make_measurement(compiled, make_constants())])
    assert "precision is 'float32/float32/float32 compiled', but 'float32/float32/float32' in 0.json" in message


def test_plans_that_are_no_probes_are_refused(plans, make_measurement, make_constants):
    def measured_with(**changes: object) -> Measurement:
        changed = msgspec.structs.replace(plans[0], **changes)
        return make_measurement([changed, *plans[1:]], make_constants())

    every = GradientReduction.EVERY_MICROBATCH
    assert "it has 2 microbatches, so each of them gathers or reduces" in _refusal(
        [measured_with(num_microbatches=2, global_batch_size=4)]
    )
    assert "every microbatch reduces gradients" in _refusal([measured_with(gradient_reduction=every)])


def test_every_combination_asked_for_is_in_the_profile(plans, make_measurement, make_constants):
    table = fit_profile([(Path("m.json"), make_measurement(plans, make_constants()))]).layers
    found = {
        (int(t), s.decode(), r.decode(), int(m))
        for n, t, s, r, m in zip(
            *(table[c] for c in ("type", "tp_size", "sequence_parallel", "recompute", "micro_batch_size")), strict=True
        )
        if n == b"block"
    }
    strategies = ((1, "none"), (2, "none"), (2, "megatron"))
    assert found == {(t, s, r, m) for (t, s), r, m in product(strategies, ("none", "full"), (1, 4))}


def test_reduction_time_is_shared_out_by_gradient_bytes(make_model, make_cluster, make_measurement, make_constants):
    """Every probe reduces for base_s / 3: the line through zero over the probes' bytes, by least squares."""
    constants = make_constants(base_s=0.3)
    plans = make_probes([make_model()], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
    measured = make_measurement(plans, constants)
    states = fit_profile([(Path("m.json"), measured)]).states
    for tp_size in (1, 2):
        sizes = [
            max(r.memory.gradients_bytes for r in m.ranks)
            for m in measured.plans
            if m.plan.embedding.tp_size == tp_size and m.plan.embedding.data_parallel is DataParallel.DDP
        ]
        rate = sum(size * 0.1 for size in sizes) / sum(size**2 for size in sizes)
        rows = states["tp_size"] == tp_size
        np.testing.assert_allclose(states["reduction_s"][rows], rate * states["gradient_bytes"][rows])


def test_times_are_brought_to_one_speed_of_the_machine(plans, make_measurement, make_constants):
    """Every other probe was measured while the machine took 1.5 times as long for everything, reference included."""
    even = fit_profile([(Path("m.json"), make_measurement(plans, make_constants(overhead_s=0.0)))])
    slowed = make_constants(
        base_s=1.5e-3, layer_s={"block": 3e-3}, optimizer_constant_s=6e-3, optimizer_s_per_parameter=1.5e-7,
        overhead_s=0.0, reference_s=0.0225,
    )  # fmt: skip
    usual = make_constants(overhead_s=0.0)
    uneven = fit_profile(
        [(Path(f"{i}.json"), make_measurement([plan], slowed if i % 2 else usual)) for i, plan in enumerate(plans)]
    )
    assert even.process["reference_s"].tolist() == [0.015]
    by = float(uneven.process["reference_s"][0]) / 0.015
    np.testing.assert_allclose(uneven.layers["forward_s"], by * even.layers["forward_s"], rtol=1e-9)
    np.testing.assert_allclose(uneven.states["reduction_s"], by * even.states["reduction_s"], rtol=1e-9)
    np.testing.assert_allclose(uneven.states["optimizer_s"], by * even.states["optimizer_s"], rtol=1e-6)


def test_a_reference_workload_that_was_disturbed_once_changes_no_time(plans, make_measurement, make_constants):
    usual, disturbed = make_constants(overhead_s=0.0), make_constants(overhead_s=0.0, reference_s=0.045)
    even = fit_profile([(Path("m.json"), make_measurement(plans, usual))])
    whole = make_measurement(plans, usual)
    odd = make_measurement(plans[4:5], disturbed).plans
    spoiled = msgspec.structs.replace(whole, plans=(*whole.plans[:4], *odd, *whole.plans[5:]))
    assert fit_profile([(Path("m.json"), spoiled)]).layers.rows == even.layers.rows


@pytest.mark.parametrize("types", [("block",) * 4, ("encoder", "encoder", "decoder")])
def test_zero_is_probed_once_for_gathers_and_reductions(
    make_model, make_cluster, make_measurement, make_constants, types
):
    """Gathers add 6 ms forward and 12 ms backward to a microbatch, in which each end's is spared once."""
    names = tuple(dict.fromkeys(types))
    constants = make_constants(
        base_s=0.3, gather_s=6e-3, layer_s=dict.fromkeys(names, 2e-3), layer_bytes=dict.fromkeys(names, 640)
    )
    model = make_model(types)
    plans = make_probes([model], make_cluster((1, 2)), "cpu-2", probe_settings()).plans
    zero = [plan for plan in plans if plan.embedding.data_parallel is not DataParallel.DDP]
    assert [(str(p.embedding.data_parallel), p.embedding.dp_size, len(p.layers)) for p in zero] == [
        ("zero2", 2, 3 * len(names)), ("zero3", 2, 3 * len(names)),
    ]  # fmt: skip
    found = fit_profile([(Path("m.json"), make_measurement(plans, constants))]).states
    count = {name: model.types[name].parameter_count() for name in model.types}
    layers, ends = 3 * sum(count[name] for name in names), count["embedding"] + count["head"]
    for row in (row for row in found.rows if row.tp_size == 1):
        assert row.gather_s == pytest.approx(18e-3 * count[row.type] / (2 * layers + ends))
        assert row.scatter_s == pytest.approx(0.1 * count[row.type] / (layers + ends))
        assert (row.zero_ranks, row.zero_source) == (2, "derived")
    plain = [plan for plan in plans if plan not in zero]
    without = fit_profile([(Path("m.json"), make_measurement(plain, constants))]).states
    assert {(row.gather_s, row.scatter_s, str(row.zero_source)) for row in without.rows} == {(0.0, 0.0, "absent")}
