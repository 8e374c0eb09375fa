"""The command of FASOP's space: its table, the plan beside it, foreign partitions, and what is refused."""

import ast
import csv
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
from command_calls import call as call_app
from made_up import LENGTH, VOCABULARY, make_hardware, make_mixed_cluster, make_model, make_profile, make_request
from msgspec.structs import replace

from shardwright_formats.io import read_document, write_document
from shardwright_formats.types import GIB, Heads, Model, NodeType, Plan, Prediction, Region
from shardwright_formats.types.hardware_profile import write_hardware_profile
from shardwright_formats.types.model_profile import write_model_profile
from shardwright_search.cli import APP

call = partial(call_app, APP)
COLUMNS = (
    "mbs,tp,dp,pp,node placement,num_a100,num_a10,partition,estimated time (s/step),pipeline time,DP all-reduce time,"
    "embedding layer all-reduce time,price_per_step,is_oom,oom_gpumem,is_fsdp_oom,fsdpoom_gpumem,train_cost"
)


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


def test_the_fastest_candidate_is_planned_where_its_stage_spans_node_types(world):
    """All-reduces that take no time: one stage of all ranks."""
    folder, options = world
    write_document(folder / "c.json", cluster := make_mixed_cluster(a100=(1, 2, GIB), a10=(1, 2, GIB)))
    model = read_document(folder / "model.json", Model)
    for device in ("a100", "a10"):
        links = make_hardware(cluster, latency_s=1e-12, bytes_per_s=1e15, device=device)
        write_hardware_profile(folder / f"{device}-links.h5", links)
        write_model_profile(folder / f"{device}.h5", make_profile(model, device=device))
    assert call("fasop", *options, "--out", folder / "t.csv", "--plan", folder / "p.json").exit_code == 0
    assert rows_of(folder / "t.csv")[0]["pp"] == "1"
    plan, prediction = read_document(folder / "p.json", Plan), read_document(folder / "p.prediction.json", Prediction)
    assert [stage.ranks for stage in plan.stages] == [(0, 1, 2, 3)] and prediction.plan_sha256 == plan.sha256


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
