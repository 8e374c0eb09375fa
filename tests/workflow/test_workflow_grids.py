"""The grids that are shipped, and the tables that are made of their answers."""

import json
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import msgspec
import pandas as pd
import pytest
import yaml
from msgspec.structs import fields
from sample_results import write_sample_results

from configuration import load_workflow
from configuration_normal import folder_of_run
from grids import GridFile, read_grids
from shardwright.io import BadInput, read_document, write_document
from shardwright.types import Cluster, Plans, Prediction
from shardwright_search.cli import APP
from shardwright_search.space.request import CellAnswer, Grid, GridAnswers, SearchRequest, Space

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
WORKFLOW = load_workflow(CONFIG, "config/config.yaml")
GRIDS = read_grids([ROOT / "config"], WORKFLOW)


def test_three_grids_are_shipped():
    assert sorted(GRIDS) == ["fasop", "galvatron", "laptop"]


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_every_pair_has_each_space_once_at_each_size(name):
    grid = GRIDS[name]
    for pair in grid.pairs:
        raw = json.loads(grid.cells_json(*pair))
        cells = msgspec.convert({"searches": raw["searches"]}, Grid).searches
        sizes = {(cell.memory_gib, cell.global_batch_size) for cell in cells}
        assert len(cells) == len(sizes) * len(grid.settings.spaces)
        assert {str(cell.space) for cell in cells} == set(grid.settings.spaces)
        for path, each in grid.published(*pair):
            assert (each.memory_gib, each.global_batch_size) in sizes
            assert f"{Path(path).stem}-full" in {cell.name for cell in cells}


def test_clusters_of_published_tables_are_clusters():
    grid = GRIDS["galvatron"]
    raw = json.loads(grid.cluster_json("a100-2x8"))
    assert msgspec.convert({k: v for k, v in raw.items() if k not in ("format", "version")}, Cluster).num_devices == 16


def test_a_mixed_cluster_has_the_nodes_links_and_profiles_of_its_parts():
    grid = GRIDS["fasop"]
    raw = json.loads(grid.cluster_json("fasop-1a100-3a10"))
    cluster = msgspec.convert({k: v for k, v in raw.items() if k not in ("format", "version")}, Cluster)
    assert [(group.node_type, group.count) for group in cluster.nodes] == [("a100", 1), ("a10", 3)]
    assert cluster.node_types["a10"].device == "A10" and cluster.num_devices == 16
    inputs = grid.inputs("bert", "fasop-1a100-3a10")
    assert [Path(path).stem for path in inputs.hardware] == ["fasop-a100-8x4", "fasop-a10-4x4"]
    assert [Path(path).stem for path in inputs.profile] == ["fasop-bert@A100", "fasop-bert@A10"]
    cells = shlex.split(grid.commands("bert", "fasop-1a100-3a10")[-1])
    assert (cells.count("--hardware"), cells.count("--profile")) == (2, 2)


def _parsed(line):
    """The name and the options of a line for `shardwright batch`."""
    words = shlex.split(line)
    name = "import galvatron" if words[0] == "import" else words[0]
    return name, APP.commands[name].parse(name, words[len(name.split()) :])


def test_published_plans_are_imported_and_priced_before_the_cells_by_commands_that_exist():
    (imported, plan), (priced, evaluated), (searched, cells) = map(
        _parsed, GRIDS["galvatron"].commands("llama-7b-hf", "a100-1x8")
    )
    assert (imported, priced, searched) == ("import galvatron", "evaluate", "grid")
    assert plan.out == evaluated.plan and evaluated.out == plan.out.with_suffix(".prediction.json")
    assert str(plan.out) == "results/grids/galvatron/plans/llama-7b-hf@a100-1x8/m36-b64.json"
    assert str(cells.grid) == "results/grids/galvatron/asked/llama-7b-hf@a100-1x8.json"
    assert str(cells.out) == "results/grids/galvatron/answers/llama-7b-hf@a100-1x8.json"
    words = GRIDS["fasop"].front_words("bert")
    assert len(APP.commands["rent"].parse("rent", words[1:]).profile) == 2


def test_fasops_grid_has_its_batches_its_clusters_and_the_seconds_that_it_states():
    grid = GRIDS["fasop"]
    cells = {pair: json.loads(grid.cells_json(*pair))["searches"] for pair in grid.pairs}
    batches = {pair: {cell["global_batch_size"] for cell in of} for pair, of in cells.items()}
    assert {model: sizes for (model, _), sizes in batches.items()} == {"gpt2XL": {64}, "bert": {256}, "T5": {128}}
    names = {cell["name"] for of in cells.values() for cell in of}
    assert {"whole-b64-full", "whole-b256-fasop"} <= names
    assert not any("memory_gib" in cell for of in cells.values() for cell in of)
    stated = json.loads(grid.published_times_json)
    assert {(each["model"], each["cluster"]) for each in stated["cells"]} == set(grid.pairs)
    assert stated["fronts"]["gpt2XL"]["4xa100"] == 0.5978 and "FASOP" in stated["source"]


def test_two_made_up_node_types_of_this_machine_are_planned_with_the_profile_of_each():
    grid = GRIDS["laptop"]
    inputs = grid.inputs("demo-mixed", "laptop-mixed")
    assert inputs.cluster == "results/clusters/laptop-mixed.json" and inputs.model == "results/models/demo.json"
    assert inputs.hardware == ("results/hardware/laptop-mixed.h5",)
    assert inputs.profile == ("results/profiles/demo@fast.h5", "results/profiles/demo@slow.h5")
    mixed = WORKFLOW.cluster("laptop-mixed")
    assert {name: (of["device"], of["devices_per_node"]) for name, of in mixed["node_types"].items()} == {
        "fast": ("cpu", 1), "slow": ("cpu/2", 1),
    }  # fmt: skip
    # They share this machine's memory, and so they do where they are profiled.
    assert WORKFLOW.cluster("1xslow")["node_types"]["slow"]["devices_per_node"] == 2


def test_even_plans_are_made_by_commands_that_exist():
    (made, asked), (priced, evaluated), _ = map(_parsed, GRIDS["laptop"].commands("demo-mixed", "laptop-mixed"))
    assert (made, asked.pp_size, asked.num_microbatches, asked.global_batch_size) == ("uniform", 2, 8, 32)
    assert str(asked.out) == "results/grids/laptop/plans/demo-mixed@laptop-mixed/even-b32.json" == str(evaluated.plan)
    assert priced == "evaluate" and len(evaluated.profile) == 2
    for model, asked in (("demo-experts", (1, 2, None)), ("demo-long", (2, None, None))):
        (_, parsed), *_ = map(_parsed, GRIDS["laptop"].commands(model, "laptop"))
        assert (parsed.cp_size, parsed.ep_size, parsed.etp_size) == asked
    assert len(GRIDS["laptop"].commands("demo", "laptop")) == 1


def test_what_is_searched_on_this_machine_was_profiled():
    grid, (usual,) = GRIDS["laptop"], (f.default for f in fields(SearchRequest) if f.name == "recompute")
    for name, cluster in grid.pairs:
        model = CONFIG["models"].get(name, CONFIG["models"]["demo"])
        profiled = set(CONFIG["profiles"][model["profile"]]["recompute"])
        for cell in json.loads(grid.cells_json(name, cluster))["searches"]:
            assert set(cell.get("recompute", usual)) <= profiled, cell["name"]


def test_a_load_of_experts_is_given_to_the_searches_of_a_model_and_to_its_even_plans(tmp_path):
    models = yaml.safe_load((ROOT / "config/grids/laptop.yaml").read_text())["models"]
    models["demo-experts"] |= {"imbalance": "demo", "even": {"pp": 2, "num_microbatches": 2}}
    models["demo-mixed"]["imbalance"] = 1.5
    grid = _written(tmp_path, "laptop", {"models": models})
    run = folder_of_run(WORKFLOW.settings, "demo")
    assert grid.waits_for("demo-experts", "laptop")["load"] == [f"results/runs/{run}/DONE.json"]
    assert grid.load_sha256("demo-experts") == "" and grid.waits_for("demo", "laptop")["load"] == []
    _, *priced = grid.commands("demo-experts", "laptop")
    assert len(priced) == 2 and all(f"--imbalance results/runs/{run}/load.json" in line for line in priced)
    assert "--imbalance 1.5" in grid.commands("demo-mixed", "laptop-mixed")[-1]
    assert not any("--imbalance" in line for line in grid.commands("demo", "laptop"))
    models["demo-experts"]["imbalance"] = "load.jsn"
    with pytest.raises(BadInput, match=r"models.demo-experts.imbalance: 'load.jsn' is neither a file nor a run"):
        _written(tmp_path / "other", "laptop", {"models": models})


def test_grids_of_own_models_need_a_configuration_that_has_them():
    other = json.loads(json.dumps(CONFIG).replace('"demo"', '"other"'))
    assert sorted(read_grids([ROOT / "config"], load_workflow(other, "other.yaml"))) == ["fasop", "galvatron"]


def test_a_mixed_cluster_of_unknown_ones_is_one_line(tmp_path):
    folder = tmp_path / "config" / "grids"
    folder.mkdir(parents=True)
    good = yaml.safe_load((ROOT / "config" / "grids" / "fasop.yaml").read_text())
    mixed = {"m": {"nodes_of": {"fasop-a10-8x4": 1, "nowhere": 1}}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(good | {"mixed_clusters": mixed}))
    with pytest.raises(BadInput, match=r"mixed_clusters\.m: there is no cluster 'nowhere'"):
        GridFile(tmp_path / "config/grids/mine.yaml", WORKFLOW)


def _written(folder, name, change):
    """A shipped grid with some keys replaced, in a folder of its own."""
    (folder / "config" / "grids").mkdir(parents=True)
    good = yaml.safe_load((ROOT / "config" / "grids" / f"{name}.yaml").read_text())
    (folder / "config" / "grids" / "mine.yaml").write_text(yaml.safe_dump(good | change))
    return GridFile(folder / "config/grids/mine.yaml", WORKFLOW)


def test_a_front_is_searched_over_nodes_with_prices():
    grid = GRIDS["fasop"]
    assert list(grid.settings.fronts) == ["gpt2XL", "bert", "T5"]
    raw = json.loads(grid.front_json("bert"))
    request = msgspec.convert({k: v for k, v in raw.items() if k not in ("format", "version")}, SearchRequest)
    assert (request.space, request.global_batch_size, request.memory_gib, request.max_tp_size) == ("full", 256, None, 4)
    cluster = json.loads(grid.cluster_json(grid.settings.fronts["bert"].cluster))
    assert {name: of["usd_per_hour"] for name, of in cluster["node_types"].items()} == {"a100": 32.7726, "a10": 9.773}
    assert Path(grid.front_waits_for("T5")["profile"][1]).stem == "fasop-T5@A10"


@pytest.mark.parametrize(
    ("front", "says"),
    [
        ({"model": "nobody"}, "fronts.f: there is no model 'nobody': add it to models"),
        ({"cluster": "nowhere"}, "fronts.f: there is no cluster 'nowhere': add it to clusters"),
        ({"cluster": "fasop-1a100-7a10"}, "fronts.f: nodes of a10 have no price: give them usd_per_hour"),
        ({"space": "nowhere"}, "space"),
    ],
)
def test_a_front_that_cannot_be_is_one_line(tmp_path, front, says):
    good = {"model": "bert", "cluster": "fasop-p4d-g5", "global_batch_size": 128}
    assert _written(tmp_path / "good", "fasop", {"fronts": {"f": good}}).fronts
    with pytest.raises(BadInput, match=says):
        _written(tmp_path, "fasop", {"fronts": {"f": good | front}})


def test_a_front_of_nodes_of_the_configuration_needs_their_price(tmp_path):
    front = {"f": {"model": "demo", "cluster": "laptop", "global_batch_size": 16}}
    with pytest.raises(BadInput, match=r"fronts\.f: nodes of cpu have no price: give them usd_per_hour"):
        _written(tmp_path, "laptop", {"fronts": front})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spaces": ["full", "nowhere"]}, "space"),
        ({"spaces": ["dp", "zero"]}, "spaces: full is missing, which the others are compared with: add it"),
        ({"memory_gib": [-1]}, "memory_gib"),
        ({"models": {"m": {"clusters": ["c"]}}}, "there is no cluster 'c'"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_grid_that_cannot_be_is_one_line(tmp_path, change, says):
    folder = tmp_path / "config" / "grids"
    folder.mkdir(parents=True)
    good = yaml.safe_load((ROOT / "config" / "grids" / "galvatron.yaml").read_text())
    (folder / "mine.yaml").write_text(yaml.safe_dump(good | change))
    with pytest.raises(BadInput, match=says) as error:
        GridFile(tmp_path / "config/grids/mine.yaml", WORKFLOW)
    assert str(error.value).startswith(str(folder / "mine.yaml"))


_STATED = {"cluster": "fasop-a10-8x4", "global_batch_size": 64, "step_s": 1.0, "plan": "dp"}


@pytest.mark.parametrize(
    ("time", "change", "says"),
    [
        ({"cluster": "fasop-a10-4x4"}, {}, "gpt2XL.published_times: there is no cluster 'fasop-a10-4x4'"),
        ({"space": "3d"}, {}, "gpt2XL.published_times: there is no space '3d': add it to spaces"),
        ({"step_s": 0}, {}, "step_s"),
        ({}, {"source_of_times": None}, "has no source: give source_of_times"),
    ],
)
def test_a_published_time_that_cannot_be_is_one_line(tmp_path, time, change, says):
    models = yaml.safe_load((ROOT / "config/grids/fasop.yaml").read_text())["models"]
    models["gpt2XL"]["published_times"] = [_STATED]
    assert _written(tmp_path / "good", "fasop", {"models": models}).published_times_json
    models["gpt2XL"]["published_times"] = [_STATED | time]
    with pytest.raises(BadInput, match=says):
        _written(tmp_path, "fasop", {"models": models} | change)


def test_a_size_that_only_a_published_time_has_is_searched(tmp_path):
    models = yaml.safe_load((ROOT / "config/grids/fasop.yaml").read_text())["models"]
    models["gpt2XL"]["published_times"] = [_STATED | {"global_batch_size": 32, "memory_gib": 20}]
    grid = _written(tmp_path, "fasop", {"models": models})
    (first, *_, last) = json.loads(grid.cells_json("gpt2XL", "fasop-a10-8x4"))["searches"]
    assert (first["name"], first["memory_gib"], first["global_batch_size"]) == ("m20-b32-dp", 20, 32)
    assert last["name"] == "whole-b64-full", "the whole device comes last"


def test_a_grid_is_one_job_for_each_pair(finished):
    asked = finished.snakemake("results/grids/galvatron.md", "-n")
    assert asked.status == 0, asked.output
    pairs = len(GRIDS["galvatron"].pairs)
    assert (asked.jobs["grid_searches"], asked.jobs["reference_sdist"], asked.jobs["grid_table"]) == (pairs, 1, 1)
    fronts = finished.snakemake("results/grids/fasop.md", "-n")
    assert (fronts.jobs["grid_front"], fronts.jobs["write_grid_front"], fronts.jobs["grid_table"]) == (3, 3, 1)
    own = finished.snakemake("results/grids/laptop.md", "-n")
    assert own.status == 0 and own.jobs["grid_measure"] == 4, own.output
    assert own.jobs["grid_searches"] == 4 and own.jobs["hardware"] == 1, own.output


def test_tables_hold_every_cell_and_say_why_there_is_no_plan(tmp_path):
    plan = write_sample_results(tmp_path / "results")
    prediction = read_document(tmp_path / "results" / "plans" / "roomy.prediction.json", Prediction)
    grid = Grid(searches=tuple(
        SearchRequest(name=f"m1-b16-{space}", memory_gib=1.0, global_batch_size=16, space=space)
        for space in (Space.DP, Space.TP, Space.FULL)
    ))  # fmt: skip
    keys = ["0" * 64, "1" * 64, "2" * 64]
    answers = GridAnswers(cells=tuple(
        CellAnswer(name=cell.name, key=key, reason="no plan fits: it lacks 5 bytes" if place == 1 else None)
        for place, (cell, key) in enumerate(zip(grid.searches, keys, strict=True))
    ))  # fmt: skip
    name, cells = tmp_path / "grids" / "g", tmp_path / "cells"
    write_document(name / "asked" / "m@c.json", grid)
    write_document(name / "answers" / "m@c.json", answers)
    estimate = prediction.estimate
    slow = msgspec.structs.replace(estimate, simulated_step_time_s=2 * estimate.simulated_step_time_s)
    for key, found in ((keys[0], slow), (keys[2], estimate)):
        write_document(cells / f"{key}.json", msgspec.structs.replace(plan, name=f"cell-{key[0]}"))
        write_document(cells / f"{key}.prediction.json", msgspec.structs.replace(prediction, estimate=found))
    measured = tmp_path / "results" / "measurements" / "plans" / "roomy.json"
    published = name / "plans" / "m@c" / "m1-b16.json"
    write_document(published.with_suffix(".prediction.json"), msgspec.structs.replace(prediction, estimate=slow))
    write_document(published, plan)
    command = [sys.executable, ROOT / "workflow/scripts/grid_tables.py", "tables", name, "--folder", cells]
    subprocess.run(command, check=True, timeout=300)
    table = pd.read_csv(f"{name}.csv")
    assert table["space"].tolist() == ["dp", "tp", "full"]
    assert table["reason"].tolist()[1] == "no plan fits: it lacks 5 bytes"
    assert table["reason"].isna().tolist() == [True, False, True]
    assert table["predicted_step_s"][0] == 2 * table["predicted_step_s"][2]
    page = Path(f"{name}.md").read_text()
    assert "3 cells, 1 without a plan" in page and "| 2.00 | 2.00 |" in page
    even, large = (
        name / "plans" / "m@c" / "even-b16.json",
        msgspec.structs.replace(estimate.stages[0], memory_bytes=2**31),
    )
    for stages, told in (
        (estimate.stages, "nan"),
        ((large,), "does not fit: it exceeds the budget by 1073741824 bytes"),
    ):
        own = msgspec.structs.replace(estimate, stages=stages)
        write_document(even, plan)
        write_document(even.with_suffix(".prediction.json"), msgspec.structs.replace(prediction, estimate=own))
        subprocess.run([*command, "--measured", measured], check=True, timeout=300)
        (*_, row) = rows = pd.read_csv(f"{name}.csv").to_dict("records")
        assert rows[0]["measured_step_s"] == rows[2]["measured_step_s"] == pytest.approx(0.21), (
            "one plan, measured once"
        )
        assert (row["space"], row["memory_gib"], str(row["reason"])) == ("even", 1.0, told)
    asked = [*command[:2], "plans", name / "answers" / "m@c.json", "--folder", cells, "--given", even.parent]
    other = msgspec.structs.replace(plan, name="even", num_microbatches=8)
    for beside, count, in_turns in ((plan, 1, ()), (other, 2, ((0, 1),))):
        write_document(even, beside)
        write_document(cells / f"{keys[2]}.json", msgspec.structs.replace(plan, name="m1-b32-full"))
        subprocess.run([*asked, "--out", tmp_path / "plans.json"], check=True, timeout=300)
        found = read_document(tmp_path / "plans.json", Plans)
        assert (len(found.plans), found.in_turns) == (count, in_turns), "equal decisions are measured once"
    write_document(cells / f"{keys[2]}.json", plan)
    for path in (published, published.with_suffix(".prediction.json"), even, even.with_suffix(".prediction.json")):
        path.unlink()
    none = tuple(msgspec.structs.replace(cell, reason="no plan fits") for cell in answers.cells)
    write_document(name / "answers" / "m@c.json", GridAnswers(cells=none))
    subprocess.run(command, check=True, timeout=300)
    assert "3 cells, 3 without a plan" in Path(f"{name}.md").read_text()


def test_many_cells_are_searched_in_parts_and_the_job_of_all_waits_for_them(tmp_path):
    few = _written(tmp_path / "few", "laptop", {})
    assert few.answered_parts("demo", "laptop") == []
    batches = list(range(16, 16 * 11, 16))
    many = _written(tmp_path / "many", "laptop", {"global_batch_size": batches, "memory_gib": [0.1, 0.2]})
    whole = json.loads(many.cells_json("demo", "laptop"))["searches"]
    assert len(whole) == 160
    assert many.answered_parts("demo", "laptop") == [
        f"results/grids/mine/answers/demo@laptop/{part}.json" for part in range(3)
    ]
    parts = [json.loads(many.part_json("demo", "laptop", part))["searches"] for part in range(3)]
    assert [len(part) for part in parts] == [64, 64, 32] and [*chain.from_iterable(parts)] == whole
    words = many.part_words("demo", "laptop")
    name, options = _parsed(f"grid part.json {' '.join(words)} --out answers.json")
    assert (name, str(options.folder), str(options.cluster)) == (
        "grid", "results/cells", "results/clusters/laptop.json",
    )  # fmt: skip
