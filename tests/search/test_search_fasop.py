"""FASOP's space and table: candidates and partitions against all there are, formulas by hand, and what is refused."""

import ast
import csv
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
from command_calls import call as call_app
from made_up import LENGTH, VOCABULARY, make_hardware, make_mixed_cluster, make_model, make_profile, make_request
from msgspec.structs import replace

from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.types.cluster import NodeType
from shardwright_formats.types.hardware_profile import write_hardware_profile
from shardwright_formats.types.model import Heads, Region
from shardwright_formats.types.model_profile import write_model_profile
from shardwright_formats.types.plan import Plan
from shardwright_formats.types.prediction import Prediction
from shardwright_search.cli import APP
from shardwright_search.fasop.estimate import batches, estimate_of, estimates
from shardwright_search.fasop.exhaustive import check
from shardwright_search.fasop.foreign import joined
from shardwright_search.fasop.partition import (
    Pipelines,
    fastest_partitions,
    least_bottlenecks,
    least_sums,
    pipeline_times,
    stage_times,
)
from shardwright_search.fasop.problem import LayerKind, NodeCosts, Problem
from shardwright_search.fasop.space import Candidate, candidates, rotations
from shardwright_search.space.budget import GIB

call = partial(call_app, APP)
COLUMNS = (
    "mbs,tp,dp,pp,node placement,num_a100,num_a10,partition,estimated time (s/step),pipeline time,DP all-reduce time,"
    "embedding layer all-reduce time,price_per_step,is_oom,oom_gpumem,is_fsdp_oom,fsdpoom_gpumem,train_cost"
)


def all_cuts(layers, stages):
    return np.array([(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)])


def random_pipelines(rng):
    """Layers of few different times, so that many partitions are equal, on one to three speeds."""
    layers = int(rng.integers(1, 10))
    stages, speeds = int(rng.integers(1, layers + 1)), int(rng.integers(1, 4))
    times = rng.integers(1, 6, layers) * rng.choice([1, 2, 9], (speeds, 1)) + rng.integers(0, 2, (speeds, layers))
    table = np.concatenate([np.zeros((speeds, 1), np.int64), np.cumsum(times, axis=1)], axis=1)
    number = 6
    return Pipelines(table, rng.integers(0, speeds, (number, stages)), rng.integers(0, 6, (number, stages)))


@pytest.mark.parametrize("seed", range(6))
def test_partitions_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    raised = 0
    for _ in range(60):
        pipelines = random_pipelines(rng)
        further = rng.choice([0, 1, 2, 8], len(pipelines.rows))
        least, chosen = least_bottlenecks(pipelines), fastest_partitions(pipelines, further + 1)
        found, every = pipeline_times(pipelines, chosen, further), all_cuts(pipelines.layers, pipelines.rows.shape[1])
        within = least_sums(pipelines, least)
        for number in range(len(pipelines.rows)):
            one = pipelines.some(np.full(len(every), number))
            times = stage_times(one, every)
            assert least[number] == times.max(axis=1).min()
            assert found[number] == pipeline_times(one, every, further[number]).min()
            inside = times[times.max(axis=1) <= least[number]]
            assert stage_times(pipelines, within)[number].sum() == inside.sum(axis=1).min()
            raised += stage_times(pipelines, chosen)[number].max() > least[number]
    assert raised > 2  # the fastest is not always that of the least bottleneck


def problem(**changes):
    """Two types of nodes of two devices, and a model of three blocks."""
    fast, slow = (
        NodeCosts(
            name=name,
            limit_gib=limit,
            usd_per_hour=usd,
            send_inside=8e9,
            send_between=between,
            reduce_inside=4e9,
            reduce_between=between / 2,
            shares_inside=name == "slow",
        )
        for name, limit, usd, between in (("fast", 40.0, 36.0, 2e9), ("slow", 20.0, 18.0, 1e9))
    )
    kinds = (LayerKind.EMBEDDING, *[LayerKind.BLOCK] * 3, LayerKind.HEAD)
    work = np.array([10, 100, 100, 100, 50]) * 10**9
    layer_ps = {
        (name, tp, size): work * size * slowness // tp + 10**8
        for name, slowness in (("fast", 1), ("slow", 3))
        for tp in (1, 2)
        for size in (1, 2, 4, 8)
    }
    parameters = {tp: np.array([6e6, 4e6, 4e6, 4e6, 6e6]) / tp for tp in (1, 2)}
    usual = {
        "node_types": (fast, slow),
        "devices_per_node": 2,
        "batch": 8,
        "max_pp_size": 3,
        "kinds": kinds,
        "layer_ps": layer_ps,
        "parameters": parameters,
        "reduced": parameters,
        "tied": 6_000_000,
        "outer_once": True,
        "hidden": 512,
        "sequence_length": 128,
        "vocabulary": 11_719,
        "heads": 8,
    }
    return Problem(**(usual | changes))


@pytest.mark.parametrize("counts", [(1, 0), (2, 1), (1, 2), (0, 4)])
def test_candidates_are_all_that_divide(counts):
    devices = 2 * sum(counts)
    shapes = {
        (tp, dp, pp, size)
        for tp, dp, pp, size in product((1, 2), range(1, devices + 1), range(1, 4), range(1, 9))
        if tp * dp * pp == devices and 8 % (dp * size) == 0
    }
    found = list(candidates(problem(), counts))
    assert len(found) == len(set(found))
    assert {own[1:] for own in found} == shapes
    assert {own.nodes for own in found} == set(rotations(counts))


def test_nodes_are_placed_in_rotation():
    assert rotations((2, 1)) == ((0, 0, 1), (0, 1, 0), (1, 0, 0))
    assert rotations((0, 3)) == ((1, 1, 1),)


def test_a_step_by_hand():
    """Three stages of tp 1 x dp 2 on a fast and two slow nodes: every stage a node, every send between nodes."""
    own = Candidate((0, 1, 1), 1, 2, 3, 2)  # two microbatches
    found = estimate_of(problem(), own, (3, 1, 1))
    num_bytes = 2 * 128 * 512 * 2
    first, second = num_bytes / (1e9 / 2), num_bytes / (1e9 / 2)  # the slower end; two ranks share it
    stages = [0.4203 + first, 0.6001 + first + second, 0.3001 + second]
    assert found.pipeline_s == pytest.approx(sum(stages) + max(stages), rel=1e-9)
    # The first stage reduces an embedding and two blocks over two ranks inside a node; the last a head.
    assert found.reduction_s == pytest.approx(2 * 1 / 2 * 14e6 * 2 / 4e9, rel=1e-9)
    assert found.tied_s == pytest.approx(6e6 * 2 / (0.5e9 / 2), rel=1e-9)
    assert found.usd_per_step == pytest.approx((36 + 18 + 18) / 3600 * found.step_s)
    assert estimate_of(problem(tied=0), own, (3, 1, 1)).tied_s == 0


def test_a_stage_on_several_node_types_runs_as_the_slowest_and_has_the_least_memory():
    own = Candidate((0, 1, 1, 1), 2, 2, 2, 2)
    found = estimate_of(problem(), own, (3, 2))
    send = 2 * 128 * 512 * 2 / (1e9 / 4)
    stages = [(10 + 200) * 3e-3 + 3e-4 + send, (100 + 50) * 3e-3 + 2e-4 + send]
    assert found.pipeline_s == pytest.approx(sum(stages) + max(stages), rel=1e-9)
    limited = replace(problem().node_types[1], limit_gib=0.05)
    tight = estimate_of(problem(node_types=(problem().node_types[0], limited)), own, (3, 2))
    assert tight.memory.is_oom and not found.memory.is_oom


def test_memory_by_hand():
    """18 bytes a parameter, or 6 and a share of 12; activations of as many microbatches as there are stages."""
    own = Candidate((0, 1, 1), 1, 2, 3, 2)
    found = estimate_of(problem(), own, (3, 1, 1)).memory
    numel, in_flight = 2 * 128 * 512, 2
    first = numel * 3 * in_flight + 2 * numel * in_flight * (10 + 24 + 5 * 8 * 128 / 512)
    second = numel * in_flight * (10 + 24 + 5 * 8 * 128 / 512)
    last = 4 * 2 * 128 * (512 + 11_719)
    plain = [14e6 * 18 + first, 4e6 * 18 + second, 6e6 * 18 + last]
    shared = [14e6 * 12 + first, 4e6 * 12 + second, 6e6 * 12 + last]
    left = [limit - 1.1 * own / GIB for limit, own in zip((40, 20, 20), plain, strict=True)]
    tightest = left.index(min(left))
    assert found.gib == pytest.approx(1.1 * plain[tightest] / GIB, rel=1e-9)
    assert found.sharded_gib == pytest.approx(1.1 * shared[tightest] / GIB, rel=1e-9)


def test_sharded_states_get_smaller_beyond_12_ranks():
    """FASOP's int(12/dp) is 0 there: its estimate is that of states that take nothing."""
    wide = problem(devices_per_node=16, batch=64, layer_ps=problem().layer_ps)
    own = Candidate((0,), 1, 16, 1, 4)
    found = estimate_of(wide, own, (5,)).memory
    numel = 4 * 128 * 512
    activations = numel + 3 * numel * 44 + 4 * 4 * 128 * (512 + 11_719)
    assert found.sharded_gib == pytest.approx(1.1 * (24e6 * (6 + 12 / 16) + activations) / GIB, rel=1e-9)


def test_the_least_sum_of_links_binds_a_ring():
    """Stage 1 of tp 2 x dp 2 spans two slow nodes: both tensor-parallel ranks' rings share the link between them."""
    own = Candidate((0, 0, 1, 1), 2, 2, 2, 2)
    found = estimate_of(problem(), own, (3, 2))
    stages = [7e6 / (1e9 / 2), 5e6 / (0.5e9 / 2)]
    assert found.reduction_s == pytest.approx(2 * 1 / 2 * 2 * max(stages), rel=1e-9)


def test_every_candidate_stays_the_fastest_first_and_all_partitions_agree():
    """Those out of memory among them; no partition of any candidate gives less than the chosen one."""
    little = tuple(replace(own, limit_gib=0.3) for own in problem().node_types)
    own = problem(node_types=little, parameters={tp: 2 * of for tp, of in problem().parameters.items()})
    every = [*candidates(own, (2, 1)), *candidates(own, (1, 0))]  # of two and three stages, and of one and two
    found = estimates(own, every)
    assert sorted(e.candidate for e in found) == sorted(every)
    assert [e.step_s for e in found] == sorted(e.step_s for e in found)
    assert {e.memory.is_oom for e in found} == {True, False}
    for estimate in found:
        cuts = all_cuts(5, estimate.candidate.pp_size)
        least = min(estimate_of(own, estimate.candidate, np.diff(cut)).pipeline_s for cut in cuts)
        assert estimate.pipeline_s == pytest.approx(least, rel=1e-12)
    results = [check(own, batch) for batch in batches(own, every)]
    assert sum(result.tried for result in results) == len(every) and not any(result.wrong for result in results)


def test_the_check_finds_a_partition_that_is_not_the_best(monkeypatch):
    own = problem()
    every = [Candidate((0, 1, 1), 1, 2, 3, 2)]
    even = lambda pipelines, counts: np.array([[0, 1, 2, 5]])  # noqa: E731
    monkeypatch.setattr("shardwright_search.fasop.exhaustive.fastest_partitions", even)
    (result,) = [check(own, batch) for batch in batches(own, every)]
    assert len(result.wrong) == 1 and "is possible" in result.wrong[0]


@pytest.fixture
def world(tmp_path):
    """Files of a mixed cluster of a100 and a10, as options."""
    attention = Heads(queries="hidden", keys="hidden", heads=8, kv_heads=8, head_features=8)
    model = make_model(layers=6)
    block = replace(model.types["block"], regions=(Region(name="attention", attention=attention),))
    model = replace(model, types=model.types | {"block": block})
    cluster = make_mixed_cluster(a100=(1, 2, GIB), a10=(2, 2, GIB))
    request = make_request(space="fasop")
    for name, document in (("c", cluster), ("model", model), ("s", request)):
        write_document(tmp_path / f"{name}.json", document)
    options = []
    for device, slow in (("a100", 1.0), ("a10", 3.0)):
        write_model_profile(tmp_path / f"{device}.h5", make_profile(model, device=device, slow=slow))
        write_hardware_profile(tmp_path / f"{device}-links.h5", make_hardware(cluster, device=device))
        options += ["--profile", tmp_path / f"{device}.h5", "--hardware", tmp_path / f"{device}-links.h5"]
    names = (("--cluster", "c"), ("--model", "model"), ("--search", "s"))
    return tmp_path, [word for option, name in names for word in (option, tmp_path / f"{name}.json")] + options


def rows_of(path: Path):
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_the_command_writes_the_table_and_a_plan(world):
    folder, options = world
    out, plan_file = folder / "t.csv", folder / "p.json"
    called = call("fasop", *options, "--out", out, "--plan", plan_file, "--exhaustive-partition", "--steps", 1000)
    assert called.exit_code == 0, called.output
    assert out.read_text().splitlines()[0] == COLUMNS
    rows, plan = rows_of(out), read_document(plan_file, Plan)
    assert f"{len(rows)} candidates" in called.output and "partitions are the best of all" in called.output
    times = [float(row["estimated time (s/step)"]) for row in rows]
    assert times == sorted(times) and {row["num_a10"] for row in rows} == {"2"}
    for row in rows:
        parts = ("pipeline time", "DP all-reduce time", "embedding layer all-reduce time")
        assert sum(float(row[part]) for part in parts) == pytest.approx(float(row["estimated time (s/step)"]))
        assert float(row["train_cost"]) == pytest.approx(1000 * float(row["price_per_step"]))
        assert float(row["price_per_step"]) == pytest.approx(float(row["estimated time (s/step)"]) * 3 * 3.6 / 3600)
        assert sum(ast.literal_eval(row["partition"])) == 8
    types = plan.cluster.node_type_of_rank
    placed = [name for stage in plan.stages for name in (types[rank] for rank in stage.ranks)][::2]
    assert any(ast.literal_eval(row["node placement"]) == placed for row in rows if int(row["pp"]) == len(plan.stages))
    assert [a[1] for a, b in pairwise(s.layers[0] for s in plan.stages) if a[1] == b[0]] == [
        stage.layers[0][1] for stage in plan.stages[:-1]
    ]
    assert read_document(folder / "p.prediction.json", Prediction).plan_sha256 == plan.sha256


def test_a_foreign_partition_is_taken_where_it_is_faster():
    """The own one has both blocks whose gradients are large on one stage: it does not look at the all-reduce."""
    reduced = np.array([6e6, 3e9, 3e9, 4e6, 6e6])
    own = problem(tied=0, outer_once=False, reduced={tp: reduced / tp for tp in (1, 2)})
    candidate = Candidate((1, 1), 1, 2, 2, 4)
    (mine,) = estimates(own, [candidate])
    every = [estimate_of(own, candidate, np.diff(cuts)) for cuts in all_cuts(5, 2)]
    best, worst = (pick(every, key=lambda e: e.step_s) for pick in (min, max))
    assert best.step_s < mine.step_s < worst.step_s
    assert joined(own, [mine], {candidate: best.partition}) == [best]
    assert joined(own, [mine], {candidate: worst.partition}) == [mine]


def test_a_table_joins_itself_and_what_is_no_row_is_refused(world):
    folder, options = world
    assert call("fasop", *options, "--out", folder / "t.csv").exit_code == 0
    again = call("fasop", *options, "--out", folder / "u.csv", "--foreign", folder / "t.csv")
    assert again.exit_code == 0 and "0 of" in again.stdout and "are faster, and taken" in again.stdout
    table = (folder / "t.csv").read_text()
    assert (folder / "u.csv").read_text() == table
    head, first, *_ = table.splitlines()
    names, cells = head.split(","), next(csv.reader([first]))
    for name, value, told in (
        ("partition", "[1, 2]", "does not cut 8 layers"),
        ("partition", "[1, 2", "is no row"),
        ("node placement", "['h100']", "is no row of FASOP's fields with nodes of a100 and a10"),
        ("mbs", "3", "is no candidate"),
        ("tp", "", "is no row"),
    ):
        changed = [value if own == name else cell for own, cell in zip(names, cells, strict=True)]
        with (folder / "bad.csv").open("w") as lines:
            csv.writer(lines).writerows([names, changed])
        called = call("fasop", *options, "--out", folder / "v.csv", "--foreign", folder / "bad.csv")
        assert called.exit_code == 2 and called.stderr.count("\n") == 1, called.stderr
        assert "bad.csv: line 2 " in called.stderr and told in called.stderr and not (folder / "v.csv").exists()
    (folder / "bad.csv").write_text("mbs,tp\n1,1\n")
    called = call("fasop", *options, "--out", folder / "v.csv", "--foreign", folder / "bad.csv")
    assert called.exit_code == 2 and "has no column 'dp'" in called.stderr


def test_sub_clusters_are_all_there_and_a_type_without_nodes_has_its_column(world):
    folder, options = world
    assert call("fasop", *options, "--out", folder / "t.csv", "--sub-clusters").exit_code == 0
    rows = rows_of(folder / "t.csv")
    assert {(row["num_a100"], row["num_a10"]) for row in rows} == {
        (a, b) for a, b in product("01", "012") if (a, b) != ("0", "0")
    }
    alone = make_mixed_cluster(a100=(1, 2, GIB), a10=(2, 2, GIB))
    alone = replace(alone, nodes=alone.nodes[1:])
    write_document(folder / "c.json", alone)
    assert call("fasop", *options, "--out", folder / "t.csv").exit_code == 0
    assert {row["num_a100"] for row in rows_of(folder / "t.csv")} == {"0"}
    assert (folder / "t.csv").read_text().splitlines()[0] == COLUMNS


def test_what_is_out_of_memory_stays_and_no_plan_is_written(world):
    folder, options = world
    write_document(folder / "s.json", make_request(space="fasop", memory_gib=1e-5))
    called = call("fasop", *options, "--out", folder / "t.csv", "--plan", folder / "p.json")
    assert called.exit_code == 3 and called.stderr.count("\n") == 1 and "too little memory" in called.stderr
    assert {row["is_oom"] for row in rows_of(folder / "t.csv")} == {"True"} and not (folder / "p.json").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"space": "full"}, "s.json: space: full: set it to fasop"),
        ({"recompute": ["full"]}, "recompute: not known"),
        ({"num_microbatches": [2]}, "num_microbatches: not known"),
        ({"global_batch_size": {"min": 4, "max": 8, "step": 4}}, "a range has no price per step"),
        ({"memory_gib": 7}, "memory_gib 7 is more than a device has"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(world, changes, told):
    folder, options = world
    write_document(folder / "s.json", make_request(**{"space": "fasop"} | changes))
    called = call("fasop", *options, "--out", folder / "t.csv")
    assert (called.exit_code, called.stderr.count("\n")) == (2, 1) and told in called.stderr, called.stderr
    assert called.stderr.startswith("error: ") and not (folder / "t.csv").exists()


def test_nodes_of_unequal_size_and_models_without_attention_are_refused(world):
    folder, options = world
    cluster = make_mixed_cluster(a100=(1, 2, GIB), a10=(2, 2, GIB))
    wide = NodeType(device="a10", devices_per_node=4, memory_bytes=GIB)
    write_document(folder / "c.json", replace(cluster, node_types=cluster.node_types | {"a10": wide}))
    called = call("fasop", *options, "--out", folder / "t.csv")
    assert called.exit_code == 2 and "nodes of 2 and 4 devices" in called.stderr
    write_document(folder / "c.json", cluster)
    write_document(folder / "model.json", make_model(layers=6))
    called = call("fasop", *options, "--out", folder / "t.csv")
    assert called.exit_code == 2 and "has no attention" in called.stderr


def test_the_space_can_be_searched_exactly_too(world):
    """`plan` with space fasop: one strategy for all layers, plain data parallelism, nothing recomputed."""
    folder, options = world
    called = call("plan", *options, "--out", folder / "p.json")
    assert called.exit_code == 0, called.output
    plan = read_document(folder / "p.json", Plan)
    assert len({(s.tp_size, s.data_parallel, s.recompute, s.sequence_parallel) for s in plan.layers}) == 1
    assert (plan.layers[0].data_parallel, plan.layers[0].recompute) == ("ddp", "none") and plan.layers[0].tp_size <= 4
    assert VOCABULARY and LENGTH
