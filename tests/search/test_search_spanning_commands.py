"""Plans that span node types through the commands, over sub-clusters, and what is said of them."""

from pathlib import Path

import numpy as np
import pytest
from command_calls import call
from made_up import make_hardware, make_mixed_cluster, make_profile, make_request
from mixed_worlds import MIB, SLOWNESS, profiles_of
from msgspec.structs import replace
from test_search_spanning import every_plan

from shardwright.io import read_document, write_document
from shardwright.types import GIB, Plan, Prediction
from shardwright.types.hardware_profile import write_hardware_profile
from shardwright.types.model_profile import write_model_profile
from shardwright_search.cli import APP
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.rent.front import find_front, sub_clusters
from shardwright_search.search import Infeasible, SearchAnswer, find_best
from shardwright_search.space.request import Offers

FILE = Path("s.json")


def test_the_front_over_sub_clusters_has_plans_that_span(make):
    model, cluster = make.model(1), make_mixed_cluster(a=(1, 1, GIB), c=(1, 1, GIB))
    profiles = profiles_of(model, cluster, {"a": 4e9, "c": 4e9}, tp_sizes=(1,))
    request = make_request(
        global_batch_size=64,
        num_microbatches=[1, 2],
        data_parallel=["ddp", "zero3"],
        recompute=["none"],
        stage_widths="any",
        span_node_types=True,
        tp_sizes=[1],
        objective="step_time",
    )
    offered = sub_clusters(cluster, Offers(), FILE, FILE)
    front = find_front(request, model, offered, profiles, FILE, lambda _: None)
    points = []
    for own in offered:
        plans = every_plan(request, model, own.cluster)
        best_s = min(evaluate(plan, profiles, timeline=False).objective_ps for plan in plans) * 1e-12
        points.append((best_s, best_s / 3600 * own.usd_per_hour))
    best = [own for own in points if not any(t <= own[0] and u <= own[1] and (t, u) != own for t, u in points)]
    found = sorted(front.answers[number].price[:2] for number in front.points)
    assert np.array(found) == pytest.approx(np.array(sorted(best)), rel=1e-9)
    spanning = 0
    for number in front.points:
        chosen, instance = front.answers[number].best, front.spaces[number].instance
        ranks = instance.stage_ranks(chosen.target.configuration.configuration, chosen.priced.solution)
        spanning += any(len({instance.costs.cluster.node_type_of_rank[r] for r in own}) > 1 for own in ranks)
    assert spanning


def test_the_commands_take_plans_that_span_node_types(make, tmp_path):
    """Planned, certified and verified; then evaluated, simulated and explained."""
    model, cluster = make.model(3, tied=True), make_mixed_cluster(a=(1, 2, GIB), c=(1, 2, GIB))
    request = make_request(
        global_batch_size=8,
        num_microbatches=[1],
        recompute=["none"],
        data_parallel=["ddp"],
        pp_sizes=[1, 2],
        span_node_types=True,
    )
    names = {"cluster": cluster, "model": model, "search": request}
    for name, document in names.items():
        write_document(tmp_path / f"{name}.json", document)
    profiles = []
    for device in "ac":
        links = make_hardware(cluster, bytes_per_s=1e11, device=device)
        write_hardware_profile(tmp_path / f"{device}-links.h5", links)
        write_model_profile(tmp_path / f"{device}.h5", make_profile(model, device=device, slow=SLOWNESS[device]))
        profiles += ["--hardware", tmp_path / f"{device}-links.h5", "--profile", tmp_path / f"{device}.h5"]
    given = [word for name in names for word in (f"--{name}", tmp_path / f"{name}.json")]
    plan, proof = tmp_path / "plan.json", tmp_path / "proof.json"
    done = call(APP, "plan", *given, *profiles, "--out", plan, "--certificate", proof)
    assert done.exit_code == 0, done.output
    types = cluster.node_type_of_rank
    found, prediction = read_document(plan, Plan), read_document(tmp_path / "plan.prediction.json", Prediction)
    assert any(len({types[rank] for rank in stage.ranks}) > 1 for stage in found.stages)
    assert prediction.proof is not None and prediction.proof.gap == 0
    search = ["--search", tmp_path / "search.json"]
    for words in (
        ["verify", plan, proof, *profiles, *search],
        ["evaluate", plan, *profiles, "--out", tmp_path / "evaluated.json"],
        ["simulate", plan, *profiles],
        ["explain", plan, *profiles, *search],
    ):
        done = call(APP, *words)
        assert done.exit_code == 0, (words[0], done.output)


def test_the_least_memory_of_a_stage_that_spans_is_of_the_type_that_has_least(make):
    """The other's process takes more, which counts for both."""
    model, cluster = make.model(2), make_mixed_cluster(a=(1, 1, GIB), c=(1, 1, GIB))
    profiles = profiles_of(model, cluster, {"a": 1e9, "c": 1e9}, tp_sizes=(1,))
    profiles = profiles.each(lambda own: own._replace(process_bytes=MIB * (1 + 3 * (own.origin.device == "c"))))
    request = make_request(num_microbatches=[1], pp_sizes=[1], recompute=["none"], span_node_types=True)

    def search(bytes_of_a: int) -> SearchAnswer | Infeasible:
        budgets = {"a": bytes_of_a / GIB, "c": 0.5}
        return find_best(replace(request, memory_gib=budgets), model, cluster, profiles, FILE, lambda _: None)

    lacking = search(5 * MIB)
    assert isinstance(lacking, Infeasible) and lacking.exact and lacking.missing_bytes == lacking.min_bytes - 5 * MIB
    assert isinstance(search(lacking.min_bytes - 1), Infeasible)
    found = search(lacking.min_bytes)
    assert isinstance(found, SearchAnswer) and found.chosen.evaluation.estimate.memory_bytes == lacking.min_bytes
