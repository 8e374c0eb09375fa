"""What measured plans teach: factors come back as they were put in."""

from pathlib import Path

import msgspec
import pytest
from command_calls import call
from made_up import make_curve
from measured import FACTORS, PLAIN, a_plan, measured_as, three_plans
from msgspec.structs import replace

from shardwright.io import BadInput, read_document, sha256_of_file, write_document
from shardwright.key import rows_by_key
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright.types.measurement import Measurement
from shardwright.types.model_profile import Quantity, write_model_profile
from shardwright.types.plan import GradientReduction
from shardwright.types.prediction import Correction, Term
from shardwright.types.strategy import DataParallel
from shardwright_search.cli import APP
from shardwright_search.cost_model.calibration import check_learned_from, corrected, evidence_of, factor_of, learned
from shardwright_search.cost_model.plan import evaluate


@pytest.fixture
def world(make):
    """A model, a cluster of four devices and their profiles."""
    model, cluster = make.model(), make.cluster(4)
    return model, cluster, make.profiles(model, cluster, reduction_s_per_parameter=1e-8)


def correction_of(factors, hardware: Path, profile: Path) -> Correction:
    return Correction(
        factors=factors, plans_sha256=("0" * 64,), measurements_sha256=("0" * 64,),
        hardware_sha256=sha256_of_file(hardware), profiles_sha256=(sha256_of_file(profile),), warnings=(),
    )  # fmt: skip


def test_the_factors_that_were_put_in_come_out(world):
    measured = [measured_as(plan, world[2], FACTORS) for plan in three_plans(world)]
    factors, warnings = learned(one for each in measured for one in evidence_of(each, world[2]))
    assert {term: of.factor for term, of in factors.items()} == pytest.approx(FACTORS, rel=1e-5)
    assert {(of.num_plans, of.num_ranks) for of in factors.values()} == {(3, 12)}
    assert warnings == ()


@pytest.mark.parametrize("reduction_s_per_parameter", [0.0, 1e-8])
def test_corrected_profiles_predict_what_was_measured(world, make, tmp_path, reduction_s_per_parameter):
    model, cluster, _ = world
    profiles = make.profiles(model, cluster, reduction_s_per_parameter=reduction_s_per_parameter)
    plan = a_plan(world, pp=2, data_parallel=DataParallel.DDP)
    factors, _ = learned(evidence_of(measured_as(plan, profiles, FACTORS), profiles))
    (tmp_path / "p").write_text("p")
    correction = correction_of(factors, tmp_path / "p", tmp_path / "p")
    usual, better = (evaluate(plan, each).estimate for each in (profiles, corrected(profiles, correction)))
    for before, after in zip(usual.stages, better.stages, strict=True):
        for term in (Term.FORWARD, Term.BACKWARD, Term.GRADIENT_SYNC):
            assert after.time_terms_s[term] == pytest.approx(FACTORS[term] * before.time_terms_s[term], rel=1e-6)
        assert after.time_terms_s["optimizer"] == pytest.approx(3 * before.time_terms_s["optimizer"], rel=1e-6)
        assert after.memory_bytes == pytest.approx(1.125 * before.memory_bytes, rel=1e-5)
    assert corrected(profiles, correction).step_overhead_s == pytest.approx(3 * profiles.step_overhead_s)
    assert factor_of(correction, Term.MEMORY) == pytest.approx(1.125, rel=1e-5)


def test_curves_of_a_profile_are_corrected_like_its_points(world, tmp_path):
    (tmp_path / "p").write_text("p")
    factors, _ = learned(evidence_of(measured_as(a_plan(world), world[2], FACTORS), world[2]))
    names = ("forward_s", "backward_s", "activation_bytes")
    curves = [make_curve(1.0, 2.0, 4.0, quantity=Quantity(name)) for name in names]
    profiles = world[2]._replace(fits=rows_by_key(curves, "sequence_length"))
    (changed,) = corrected(profiles, correction_of(factors, tmp_path / "p", tmp_path / "p")).fits.values()
    by_name = {curve.quantity: (curve.constant, curve.linear, curve.quadratic) for curve in changed}
    assert by_name["forward_s"] == pytest.approx((1.5, 3.0, 6.0))
    assert by_name["backward_s"] == pytest.approx((1.25, 2.5, 5.0))
    assert by_name["activation_bytes"] == (1.0, 2.0, 4.0)


def test_what_every_microbatch_reduces_is_no_part_of_its_backward_pass(world):
    plan = a_plan(world, data_parallel=DataParallel.ZERO2)
    plan = msgspec.structs.replace(plan, gradient_reduction=GradientReduction.EVERY_MICROBATCH)
    factors, _ = learned(evidence_of(measured_as(plan, world[2], FACTORS), world[2]))
    assert factors[Term.BACKWARD].factor == pytest.approx(1.25)
    assert Term.GRADIENT_SYNC not in factors


def test_what_was_not_learned_stays_as_it_is(world, tmp_path):
    (tmp_path / "p").write_text("p")
    nothing = correction_of({}, tmp_path / "p", tmp_path / "p")
    plan = a_plan(world)
    assert evaluate(plan, corrected(world[2], nothing)) == evaluate(plan, world[2])


def test_one_microbatch_tells_forward_and_memory_alone(world):
    measured = measured_as(a_plan(world, pp=1, microbatches=1), world[2], FACTORS)
    factors, warnings = learned(evidence_of(measured, world[2]))
    assert factors.keys() == {Term.FORWARD, Term.MEMORY}
    assert "backward: no measured plan distinguishes it, so that it stays as predicted" in warnings
    assert "forward: thin: 1 plan(s)" in warnings


def test_where_nothing_was_predicted_nothing_is_learned(world):
    measured = measured_as(a_plan(world, pp=2, tp=2), world[2], FACTORS)
    factors, _ = learned(evidence_of(measured, world[2]))
    assert factors.keys() == set(Term) - {Term.GRADIENT_SYNC}


def test_plans_that_contradict_one_another_are_told(world):
    slow, fast, middle = (PLAIN | {Term.FORWARD: factor} for factor in (1.5, 0.5, 1.25))
    measured = [
        measured_as(plan, world[2], factors)
        for plan, factors in zip(three_plans(world), (slow, fast, middle), strict=True)
    ]
    factors, warnings = learned(one for each in measured for one in evidence_of(each, world[2]))
    assert factors[Term.FORWARD].factor == pytest.approx(1.25)
    assert (factors[Term.FORWARD].lowest, factors[Term.FORWARD].highest) == pytest.approx((0.5, 1.5))
    assert [w for w in warnings if w.startswith("forward: plans contradict")] == [
        "forward: plans contradict one another: from 0.50 to 1.50 of what is predicted"
    ]


def test_no_factor_of_memory_refuses_a_plan_that_ran(world):
    twice = [measured_as(plan, world[2], PLAIN | {Term.MEMORY: 2.0}) for plan in three_plans(world)[:2]]
    ran = measured_as(three_plans(world)[2], world[2], PLAIN)
    stages = evaluate(ran.plan, world[2]).estimate.stages
    fullest = max(stage.memory_bytes for stage in stages)
    cluster = world[1]
    (name,) = cluster.node_types
    tight = replace(cluster.node_types[name], memory_bytes=round(1.5 * fullest))
    ran = replace(ran, plan=replace(ran.plan, cluster=replace(cluster, node_types={name: tight})))
    factors, warnings = learned(one for each in (*twice, ran) for one in evidence_of(each, world[2]))
    assert factors[Term.MEMORY].factor == pytest.approx(1.5, rel=1e-3)
    assert any(w.startswith("memory: 1.500, not the median 2.000") for w in warnings)
    assert factors[Term.MEMORY].factor * fullest <= tight.memory_bytes * (1 + 1e-12)


def test_a_reduction_lost_in_noise_gives_no_factor(world):
    measured = measured_as(a_plan(world), world[2], PLAIN | {Term.GRADIENT_SYNC: -0.5})
    factors, warnings = learned(evidence_of(measured, world[2]))
    assert Term.GRADIENT_SYNC not in factors
    assert "gradient_sync: noise outweighs it in the measured plans, so that it stays as predicted" in warnings


def test_a_plan_measured_twice_is_one_plan(world):
    evidence = evidence_of(measured_as(a_plan(world), world[2], FACTORS), world[2])
    factors, _ = learned((*evidence, *evidence))
    assert (factors[Term.FORWARD].num_plans, factors[Term.FORWARD].num_ranks) == (1, 8)


def test_a_correction_holds_for_the_profiles_it_was_learned_from_alone(tmp_path):
    paths = [tmp_path / name for name in ("h.h5", "m.h5", "other.h5")]
    for path in paths:
        path.write_text(path.name)
    hardware, profile, other = paths
    correction = correction_of({}, hardware, profile)
    check_learned_from(correction, tmp_path / "c.json", hardware, [profile])
    with pytest.raises(BadInput, match=r"c\.json: was learned from other profiles than h\.h5, other\.h5"):
        check_learned_from(correction, tmp_path / "c.json", hardware, [other])


@pytest.fixture
def measurement(world, make, tmp_path):
    """Files of both profiles and of three measured plans."""
    model, cluster, profiles = world
    write_hardware_profile(tmp_path / "h.h5", make.hardware(cluster))
    write_model_profile(tmp_path / "m.h5", make.profile(model, reduction_s_per_parameter=1e-8))
    measured = tuple(measured_as(plan, profiles, FACTORS) for plan in three_plans(world))
    document = Measurement(
        device="cpu",
        backend="gloo",
        date="2026-01-31",
        versions="torch 0",
        attention="sdpa",
        allocator="",
        plans=measured,
    )
    write_document(tmp_path / "meas.json", document)
    return document


def test_the_command_leaves_the_profiles_alone_and_names_what_it_learned_from(measurement, tmp_path):
    before = [(tmp_path / name).read_bytes() for name in ("h.h5", "m.h5")]
    called = call(
        APP, "correct", "--hardware", tmp_path / "h.h5", "--profile", tmp_path / "m.h5", tmp_path / "meas.json",
        "--out", tmp_path / "c.json",
    )  # fmt: skip
    assert called.exit_code == 0, called.output
    assert "forward: 1.500 x predicted (1.500 to 1.500; 3 plans)" in called.output
    correction = read_document(tmp_path / "c.json", Correction)
    assert correction.measurements_sha256 == (sha256_of_file(tmp_path / "meas.json"),)
    assert correction.plans_sha256 == tuple(each.plan.sha256 for each in measurement.plans)
    check_learned_from(correction, tmp_path / "c.json", tmp_path / "h.h5", [tmp_path / "m.h5"])
    assert [(tmp_path / name).read_bytes() for name in ("h.h5", "m.h5")] == before


def test_a_measurement_of_another_device_is_refused(measurement, tmp_path):
    write_document(tmp_path / "meas.json", msgspec.structs.replace(measurement, device="H100"))
    called = call(
        APP, "correct", "--hardware", tmp_path / "h.h5", "--profile", tmp_path / "m.h5", tmp_path / "meas.json",
        "--out", tmp_path / "c.json",
    )  # fmt: skip
    assert called.exit_code == 2
    assert "was measured on 'H100', the profile on 'cpu'" in called.output
    assert not (tmp_path / "c.json").exists()
