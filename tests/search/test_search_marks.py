"""A prediction says which of its numbers nobody measured, once for each kind and profile."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shardwright.types import LayerStrategy, PipelineStage, Plan, Schedule, Strategy
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.profiles import index_profiles

SEEN = "analytic, nothing was measured: median error 19 %."


@pytest.fixture
def priced(make):
    """Prices a plan of two ranks, tensor parallel unless said, with profiles that a test has marked."""
    model, cluster = make.model(), make.cluster()

    def warnings(profile=None, hardware=None, notes="", tp_size=2):
        sharding = {"tp_size": tp_size, "dp_size": 2 // tp_size}
        plan = Plan(
            name="p", model=model, cluster=cluster, global_batch_size=4, num_microbatches=1,
            schedule=Schedule.ONE_F_ONE_B, stages=(PipelineStage(ranks=(0, 1), layers=((0, 4),)),),
            embedding=Strategy(**sharding), head=Strategy(**sharding),
            layers=tuple(LayerStrategy(type="block", **sharding) for _ in range(4)),
        )  # fmt: skip
        layers = make.profile(model) if profile is None else profile
        layers = replace(layers, provenance=msgspec.structs.replace(layers.provenance, notes=notes))
        links = make.hardware(cluster) if hardware is None else hardware
        return evaluate(plan, index_profiles(links, Path("d/h.h5"), layers, Path("d/m.h5"))).warnings

    return warnings


def marked(make, table, columns, source, rows=slice(None)):
    """The usual profile with the sources of some numbers replaced, and 0 for what is absent."""
    profile = make.profile(make.model())
    changed = {name: values.copy() for name, values in getattr(profile, table).columns.items()}
    for number, column in columns.items():
        changed[column][rows] = source
        if source == "absent":
            changed[number][rows] = 0
    return replace(profile, **{table: getattr(profile, table).replace(**changed)})


def test_measured_profiles_leave_nothing_to_say(priced):
    assert priced() == ()


def test_an_analytic_profile_is_told_in_one_line_with_the_error_that_was_seen(priced, make):
    (line,) = priced(make.profile(make.model(), source="analytic"), notes=f"made in January\n{SEEN}\nmore")
    assert line == (
        "analytic: activation_bytes, backward_s, forward_s, workspace_bytes of m.h5: "
        "nothing was measured: median error 19 %"
    )


def test_assumed_and_analytic_numbers_of_one_profile_have_a_line_each(priced, make):
    profile = marked(make, "states", {"optimizer_s": "optimizer_source"}, "assumed")
    layers = make.profile(make.model(), source="analytic").layers
    assert [line.partition(":")[0] for line in priced(replace(profile, layers=layers))] == ["analytic", "assumed"]
    assert priced(profile) == ("assumed: optimizer_s of m.h5",)


def test_numbers_that_the_plan_does_not_lean_on_are_not_told(priced, make):
    profile = make.profile(make.model())
    for name, count in (("tp_size", 1), ("tp_size", 4)):
        rows = profile.layers[name] == count
        assert priced(marked(make, "layers", {"forward_s": "forward_source"}, "assumed", rows)) == ()
    rows = profile.layers["tp_size"] == 2
    told = priced(marked(make, "layers", {"forward_s": "forward_source"}, "assumed", rows))
    assert told == ("assumed: forward_s of m.h5",)


def test_the_hardware_profile_is_told_too(priced, make):
    hardware = make.hardware(make.cluster())
    points = hardware.points.replace(source=["analytic"] * len(hardware.points))
    provenance = msgspec.structs.replace(
        hardware.provenance, notes="analytic, nothing was measured: median error 23 %."
    )
    told = priced(hardware=replace(hardware, points=points, provenance=provenance))
    assert told == ("analytic: messages of h.h5: nothing was measured: median error 23 %",)


def test_overlap_is_told_where_nobody_measured_it(priced, make):
    assert priced(hardware=make.hardware(make.cluster())) == (), "no data parallelism"
    (told,) = priced(hardware=make.hardware(make.cluster()), tp_size=1)
    assert told.startswith("absent: overlap of h.h5: collectives of data parallelism are counted as if nothing")
    hardware = make.hardware(make.cluster(), overlap=[(Collective.ALL_REDUCE, 2, 1.25, 1.0)])
    provenance = msgspec.structs.replace(hardware.provenance, notes="analytic.\nassumed: they take 1.25 times as long.")
    overlap = hardware.overlap.replace(source=["assumed"] * len(hardware.overlap))
    told = priced(hardware=replace(hardware, overlap=overlap, provenance=provenance), tp_size=1)
    assert told == ("assumed: overlap of h.h5: they take 1.25 times as long",)


def test_what_is_absent_is_told_once_for_each_kind(priced, make):
    profile = marked(make, "states", {"optimizer_s": "optimizer_source", "reduction_s": "reduction_source"}, "absent")
    absent = {"step_overhead_source": ["absent"], "step_overhead_s": [0], "resident_source": ["absent"]}
    process = profile.process.replace(**absent, resident_bytes=[0])
    assert priced(replace(profile, process=process)) == (
        "absent: optimizer_s: counted as 0",
        "absent: step_overhead_s: counted as 0",
    )


def test_a_block_whose_time_is_uncertain_is_told_where_the_plan_has_it(priced, make):
    profile = make.profile(make.model())

    def with_errors(share, rows):
        errors = np.zeros_like(profile.layers["backward_s"])
        errors[rows] = share * profile.layers["backward_s"][rows]
        return replace(profile, layers=profile.layers.replace(backward_error_s=errors))

    blocks, of_two = profile.layers["type"] == b"block", profile.layers["tp_size"] == 2
    assert priced(with_errors(0.19, blocks)) == ()
    assert priced(with_errors(0.5, ~blocks)) == (), "embedding and head are no differences of probes"
    assert priced(with_errors(0.5, blocks & ~of_two)) == (), "the plan has no such layer"
    (line,) = priced(with_errors(0.31, blocks & of_two))
    assert line == (
        "uncertain: time of block tp_size 2 sequence_parallel none recompute none of m.h5: a standard error of 31%: "
        "measure it on a quieter machine or with a larger min_time_s"
    )


def test_layers_that_wait_for_their_host_are_told_where_the_plan_has_them(priced):
    (line,) = priced(notes="Of a file.\nlaunch-bound: block takes 50 us.\nlaunch-bound: decoder takes 51 us.")
    assert line == "launch-bound: block takes 50 us: m.h5"
