"""`verify`: a plan and its certificate are checked, and whatever is changed in either is noticed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from command_calls import Called, call
from msgspec.structs import replace
from rest_long import rest_long

from shardwright.io import read_document, write_document
from shardwright.types import (
    Attention,
    Certificate,
    GradientReduction,
    LayerStrategy,
    PipelineStage,
    Plan,
    Precision,
    Recompute,
    Schedule,
    Strategy,
)
from shardwright_search.cli import APP


def roles(paths: dict[str, Path], *names: str) -> list[str]:
    return [part for role in names for part in (f"--{role}", str(paths[role]))]


def verify(paths: dict[str, Path], plan: Path, certificate: Path) -> Called:
    return call(APP, "verify", plan, certificate, *roles(paths, "hardware", "profile", "search"))


@pytest.fixture
def searched(make, files, tmp_path) -> tuple[dict[str, Path], Path, Path]:
    """The files of a search, its plan and its certificate."""
    model, cluster = make.model(4), make.cluster()
    paths = files(model, cluster, make.request(memory_gib=4 / 1024), make.profile(model))
    plan, certificate = tmp_path / "a.json", tmp_path / "a.certificate.json"
    result = call(APP, "plan", *roles(paths, *paths), "--out", plan, "--certificate", certificate)
    assert result.exit_code == 0, result.output
    return paths, plan, certificate


def changed(path: Path, **fields: object) -> None:
    write_document(path, replace(read_document(path, Certificate), **fields))


def refused(called: Called, what: str) -> bool:
    *_, line = called.stderr.splitlines()
    return called.exit_code == 2 and line.startswith("error: ") and what in line and not called.stdout


def test_a_certificate_is_verified_and_the_gap_told(searched):
    paths, plan, certificate = searched
    result = verify(paths, plan, certificate)
    assert result.exit_code == 0, result.output
    count = len(read_document(certificate, Certificate).configurations)
    assert result.stdout.startswith("verified: no plan takes less than ")
    told = r"less than ([\d.]+) ms (?s:.*)this plan takes ([\d.]+) ms: no plan is more than ([\d.]+)% faster"
    bound_ms, plan_ms, gap = map(float, re.search(told, result.stdout).groups())
    bound_ps = read_document(certificate, Certificate).bound_ps
    assert bound_ms * 1e9 <= bound_ps and gap / 100 >= plan_ms * 1e9 / bound_ps - 1
    assert f"{count} configurations confirmed in" in result.stdout


def test_a_certificate_of_muon_is_verified_and_holds_for_no_other_optimizer(make, files, tmp_path):
    model, plan, certificate = make.model(4), tmp_path / "a.json", tmp_path / "a.certificate.json"
    paths = files(model, make.cluster(), make.request(memory_gib=4 / 1024, optimizer="muon"), make.profile(model))
    result = call(APP, "plan", *roles(paths, *paths), "--out", plan, "--certificate", certificate)
    assert result.exit_code == 0, result.output
    result = verify(paths, plan, certificate)
    assert result.exit_code == 0 and result.stdout.startswith("verified: "), result.output
    asked = json.loads(paths["search"].read_text())
    paths["search"].write_text(json.dumps(asked | {"optimizer": "adamw"}))
    assert verify(paths, plan, certificate).exit_code == 2


def test_a_bound_that_was_raised_is_refused(searched):
    paths, plan, certificate = searched
    bound = read_document(certificate, Certificate).bound_ps
    changed(certificate, bound_ps=bound * 1.001)
    assert refused(verify(paths, plan, certificate), "does not confirm its bound: batch 8")
    changed(certificate, bound_ps=bound * 0.99)
    assert verify(paths, plan, certificate).exit_code == 0


def test_a_bound_beyond_all_measure_is_refused_where_it_is_read(searched):
    paths, plan, certificate = searched
    whole = json.loads(certificate.read_text())
    for bound_ps in (5e-324, 0.5, 0.0, -1.0, 1e22):
        certificate.write_text(json.dumps(whole | {"bound_ps": bound_ps}))
        assert refused(verify(paths, plan, certificate), f"{certificate}: Expected `float`")
    certificate.write_text(json.dumps(whole | {"bound_ps": 1.0}))
    assert verify(paths, plan, certificate).exit_code == 0


def test_dual_values_that_were_changed_confirm_less(searched):
    """Any dual values are a proof of something: these of too little."""
    paths, plan, certificate = searched
    proofs = read_document(certificate, Certificate).configurations
    loose = [
        replace(p, bands=tuple(replace(b, slowest_weights=(0.0,), exposed_weights=(0.0,)) for b in p.bands))
        for p in proofs
    ]
    changed(certificate, configurations=tuple(loose))
    assert refused(verify(paths, plan, certificate), "does not confirm its bound: batch 8")


def test_a_configuration_that_is_left_out_added_or_told_twice_is_noticed(searched):
    paths, plan, certificate = searched
    proofs = read_document(certificate, Certificate).configurations
    changed(certificate, configurations=proofs[1:])
    assert refused(
        verify(paths, plan, certificate), f"leaves out a configuration of the space: {proofs[0].configuration}"
    )
    changed(certificate, configurations=(*proofs, replace(proofs[0], configuration="batch 9")))
    assert refused(verify(paths, plan, certificate), "has a configuration that the space does not have: batch 9")
    changed(certificate, configurations=(*proofs, proofs[0]))
    assert refused(verify(paths, plan, certificate), "has several proofs of one configuration")


def test_other_files_than_the_searchs_are_refused(searched, make, tmp_path):
    paths, plan, certificate = searched
    other = tmp_path / "other.json"
    write_document(other, replace(make.request(memory_gib=4 / 1024), name="other"))
    assert refused(verify(paths | {"search": other}, plan, certificate), "was made with another search than")
    swapped = paths | {"profile": paths["hardware"], "hardware": paths["profile"]}
    assert verify(swapped, plan, certificate).exit_code == 2
    write_document(other, replace(read_document(plan, Plan), name="other"))
    assert refused(verify(paths, other, certificate), "is the certificate of another plan than")


def rehashed(plan: Path, certificate: Path, **fields: object) -> None:
    """Change a plan, and let its certificate say that it is of the changed one."""
    write_document(plan, replace(read_document(plan, Plan), **fields))
    changed(certificate, plan_sha256=read_document(plan, Plan).sha256)


OUTSIDE = {
    "another gradient_reduction than the search file's": {"gradient_reduction": GradientReduction.EVERY_MICROBATCH},
    "another attention than the search file's": {"attention": Attention.EAGER},
    "another precision than the search file's": {"precision": Precision(tf32=True)},
    "another compile than the search file's": {"compile": True},
    "batch 16, pp": {"global_batch_size": 16},
    "options that no search sets": {"fused": ("norm",)},
}


@pytest.mark.parametrize(("outside", "fields"), OUTSIDE.items())
def test_a_plan_that_is_not_of_the_search_file_is_refused_under_its_own_hash(searched, outside, fields):
    """Reduced in every microbatch the plan takes longer than it was said to."""
    paths, plan, certificate = searched
    rehashed(plan, certificate, **fields)
    assert refused(verify(paths, plan, certificate), f"a.json: is outside the space of {paths['search']}: {outside}")


def test_a_strategy_or_ranks_that_the_space_does_not_have_are_refused(searched):
    paths, plan, certificate = searched
    layers = read_document(plan, Plan).layers
    rehashed(plan, certificate, layers=(replace(layers[0], recompute=Recompute.MLP), *layers[1:]))
    assert refused(verify(paths, plan, certificate), "s.json: layers[0] as tp")
    alone = Strategy(tp_size=1, dp_size=1)
    stages = [PipelineStage(ranks=(rank,), layers=((2 - 2 * rank, 4 - 2 * rank),)) for rank in (1, 0)]
    layers = tuple(LayerStrategy(tp_size=1, dp_size=1, type="block", recompute=Recompute.FULL) for _ in range(4))
    rehashed(plan, certificate, stages=tuple(stages), embedding=alone, head=alone, layers=layers, num_microbatches=8)
    assert refused(verify(paths, plan, certificate), "s.json: the ranks of stage 0")


def test_a_plan_of_the_space_that_is_beyond_the_budget_is_refused(searched):
    paths, plan, certificate = searched
    kept = Strategy(tp_size=1, dp_size=2)
    layers = tuple(LayerStrategy(tp_size=1, dp_size=2, type="block") for _ in range(4))
    stages = (PipelineStage(ranks=(0, 1), layers=((0, 4),)),)
    rehashed(plan, certificate, stages=stages, embedding=kept, head=kept, layers=layers, num_microbatches=1)
    assert refused(verify(paths, plan, certificate), f"bytes a rank, the budget is {4 << 20}: give the plan")


def test_a_plan_for_another_cluster_or_model_than_is_given_is_refused(searched, make, tmp_path):
    paths, plan, certificate = searched
    files = ["hardware", "profile", "search", "cluster", "model"]
    result = call(APP, "verify", plan, certificate, *roles(paths, *files))
    assert result.exit_code == 0 and "--cluster" not in result.stdout
    assert "the cluster and the model are the plan's: --cluster and --model" in verify(paths, plan, certificate).stdout
    for role, other in (("cluster", make.cluster(memory_bytes=1 << 31)), ("model", replace(make.model(4), name="x"))):
        write_document(tmp_path / "other.json", other)
        result = call(APP, "verify", plan, certificate, *roles(paths | {role: tmp_path / "other.json"}, *files))
        assert refused(result, f"a.json: is for another {role} than {tmp_path / 'other.json'}")


def test_a_negative_dual_value_is_refused_where_it_is_read(searched):
    paths, plan, certificate = searched
    document = msgspec.json.decode(certificate.read_bytes())
    document["configurations"][0]["bands"][0]["exposed_weights"][0] = -1.0
    certificate.write_bytes(msgspec.json.encode(document))
    assert refused(verify(paths, plan, certificate), "exposed_weights")


def leaves(value: object, way: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the way to every number, text, null and list of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from leaves(inner, (*way, key))
    if not isinstance(value, dict):
        yield way


def forged(document: dict, rng: np.random.Generator) -> dict:
    """A certificate of which one or more values are anything else, some by a little."""
    document = msgspec.json.decode(msgspec.json.encode(document))
    ways = [way for way in leaves(document) if way[0] not in ("format", "version")]
    for _ in range(int(rng.integers(1, 4))):
        *outer, last = ways[int(rng.integers(len(ways)))]
        held = document
        try:
            for key in outer:
                held = held[key]
            value = held[last]
        except (IndexError, KeyError, TypeError):
            continue  # An outer value was replaced before.
        number = value if isinstance(value, float) else 1.0
        others = [
            0.0,
            1e15,
            5e-324,
            1e-300,
            -1.0,
            number * rng.uniform(0, 2),
            number * (1 + 1e-9),
            None,
            "x",
            [],
            10**400,
        ]
        held[last] = [*value, *value[:1]] if isinstance(value, list) else others[int(rng.integers(len(others)))]
    return document


@pytest.mark.parametrize("block", rest_long(1, range(10)))
def test_a_certificate_with_any_value_forged_is_refused_in_one_line_or_true(searched, block):
    paths, plan, certificate = searched
    whole, rng = msgspec.json.decode(certificate.read_bytes()), np.random.default_rng(block)
    for _ in range(40):
        document = forged(whole, rng)
        certificate.write_text(json.dumps(document))
        result = verify(paths, plan, certificate)
        if result.exit_code == 0:
            assert read_document(certificate, Certificate).bound_ps <= whole["bound_ps"] * (1 + 2e-9), document
        else:
            assert refused(result, str(certificate)), (document, result.output)


def test_a_space_with_interleaved_schedules_has_no_certificate(make, files, tmp_path):
    model, cluster = make.model(4), make.cluster()
    request = make.request(schedules=(Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B))
    paths = files(model, cluster, request, make.profile(model))
    result = call(
        APP,
        "plan",
        *roles(paths, *paths),
        "--out",
        tmp_path / "a.json",
        "--certificate",
        tmp_path / "a.certificate.json",
    )
    assert refused(result, "certificates do not cover interleaved_1f1b")
    assert not (tmp_path / "a.json").exists() and not (tmp_path / "a.certificate.json").exists()
