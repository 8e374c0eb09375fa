"""The commands end to end: files in, files out, exit codes, and one line when something is wrong."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from command_calls import Called
from command_calls import call as call_app

from shardwright.command.options import options_of
from shardwright.io import read_document, write_document
from shardwright.types import Plan, Prediction, Recompute
from shardwright_search.cli import APP
from shardwright_search.explain.printing import show_rich, table

call = partial(call_app, APP)


def options(paths: dict[str, Path], *roles: str) -> list[object]:
    return [part for role in roles for part in (f"--{role}", paths[role])]


@pytest.fixture
def inputs(make, files):
    model, cluster = make.model(4), make.cluster()
    return files(model, cluster, make.request(memory_gib=4 / 1024), make.profile(model))


def plan(paths: dict[str, Path], out: Path, *further: str) -> Called:
    files = options(paths, "cluster", "model", "hardware", "profile", "search")
    return call("plan", *files, "--out", out, *further)


def test_plan_writes_the_plan_and_its_prediction(inputs, tmp_path):
    out = tmp_path / "plans" / "a.json"
    result = plan(inputs, out)
    assert result.exit_code == 0, result.output
    found, prediction = read_document(out, Plan), read_document(tmp_path / "plans/a.prediction.json", Prediction)
    assert prediction.plan_sha256 == found.sha256
    assert prediction.memory_budget_bytes == 4 << 20 >= prediction.estimate.memory_bytes
    assert set(prediction.inputs_sha256) == {"cluster", "model", "hardware", "profile", "search"}
    for words in ("predicted", "ms a step", "of 4.0 MiB", "proof: closed form", "bounding 8 configurations"):
        assert words in result.output
    before = out.read_bytes(), (tmp_path / "plans/a.prediction.json").read_bytes()
    assert plan(inputs, out).exit_code == 0
    assert (out.read_bytes(), (tmp_path / "plans/a.prediction.json").read_bytes()) == before


def test_a_prediction_names_the_version_that_made_it_and_the_plan_does_not(inputs, tmp_path, monkeypatch):
    made = []
    for release in ("1.0", "2.0"):
        monkeypatch.setattr("shardwright.io.versions.version", lambda _package, release=release: release)
        assert plan(inputs, tmp_path / "a.json").exit_code == 0
        prediction = read_document(tmp_path / "a.prediction.json", Prediction)
        assert prediction.versions == f"shardwright {release}"
        made.append((read_document(tmp_path / "a.json", Plan).sha256, msgspec.structs.replace(prediction, versions="")))
    assert made[0] == made[1]


@pytest.mark.parametrize("role", ["hardware", "profile", "model", "cluster"])
def test_a_truncated_result_is_named_and_is_to_be_deleted(inputs, tmp_path, role):
    inputs[role].write_bytes(inputs[role].read_bytes()[:-40])
    result = plan(inputs, tmp_path / "a.json")
    (line,) = result.stderr.splitlines()
    assert (result.exit_code, line.startswith(f"error: {inputs[role]}: ")) == (2, True)
    assert line.endswith("a result of the workflow is made again once you delete it")


def test_a_truncated_plan_is_named_and_is_to_be_deleted(inputs, tmp_path):
    assert plan(inputs, tmp_path / "a.json").exit_code == 0
    (tmp_path / "a.json").write_text((tmp_path / "a.json").read_text()[:-40])
    result = call("explain", tmp_path / "a.json", *options(inputs, "hardware", "profile", "search"))
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {tmp_path}/a.json: not valid JSON")
    assert result.stderr.rstrip().endswith("a result of the workflow is made again once you delete it")


@pytest.mark.parametrize(("out", "told"), [(".", "is a folder: choose another name"), ("/", "--out: '/' has no name")])
def test_a_plan_needs_the_name_of_a_file(inputs, tmp_path, monkeypatch, out, told):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    result = plan(inputs, Path(out))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and told in result.stderr
    assert list((tmp_path / "here").iterdir()) == []


def test_an_infeasible_search_exits_with_3_and_writes_nothing(inputs, make, tmp_path):
    write_document(inputs["search"], make.request(memory_gib=1 / 1024))
    result = plan(inputs, tmp_path / "a.json")
    assert result.exit_code == 3
    *_, line = result.stderr.splitlines()
    assert line.startswith(f"error: {inputs['search']}: no plan fits: even the leanest (batch 8,")
    assert "bytes a rank in pipeline stage" in line and "raise memory_gib to at least 0.00" in line
    assert not list(tmp_path.glob("a*"))


def test_a_missing_profile_point_exits_with_2_and_writes_nothing(inputs, make, files, tmp_path):
    model = make.model(4)
    paths = files(model, make.cluster(), make.request(tp_sizes=(1, 2)), make.profile(model, tp_sizes=(1,)))
    result = plan(paths, tmp_path / "a.json")
    assert result.exit_code == 2
    *_, line = result.stderr.splitlines()
    assert line.startswith(f"error: {paths['profile']}: no point for embedding tp_size 2") and "probes again" in line
    assert not list(tmp_path.glob("a*"))


def test_a_misspelt_key_of_the_search_file_exits_with_2(inputs, tmp_path):
    raw = json.loads(inputs["search"].read_text())
    inputs["search"].write_text(json.dumps(raw | {"memory_gb": 3}))
    result = plan(inputs, tmp_path / "a.json")
    assert result.exit_code == 2 and "memory_gb" in result.stderr and len(result.stderr.splitlines()) == 1


def test_neither_file_appears_when_the_prediction_cannot_be_written(inputs, tmp_path):
    (tmp_path / "a.prediction.json").mkdir()
    assert plan(inputs, tmp_path / "a.json").exit_code != 0
    assert not (tmp_path / "a.json").exists()


def test_evaluate_agrees_with_the_search(inputs, tmp_path):
    plan(inputs, tmp_path / "a.json")
    profiles = options(inputs, "hardware", "profile")
    result = call("evaluate", tmp_path / "a.json", *profiles, "--out", tmp_path / "p.json")
    assert result.exit_code == 0, result.output
    searched = read_document(tmp_path / "a.prediction.json", Prediction)
    evaluated = read_document(tmp_path / "p.json", Prediction)
    assert evaluated.estimate == searched.estimate and evaluated.proof is None


def test_uniform_makes_a_valid_plan_without_profiles(inputs, tmp_path):
    out = tmp_path / "u.json"
    result = call(
        "uniform", *options(inputs, "model", "cluster"), "--global-batch-size", 8, "--num-microbatches", 4,
        "--pp", 2, "--data-parallel", "zero3", "--recompute", "full", "--schedule", "gpipe",
        "--precision-compute", "bfloat16", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    made = read_document(out, Plan)
    assert [stage.layers for stage in made.stages] == [((0, 2),), ((2, 4),)]
    assert {layer.recompute for layer in made.layers} == {Recompute.FULL}
    assert made.precision.compute == "bfloat16" and made.layers[0].data_parallel == "ddp"  # one rank: nothing to shard
    result = call("uniform", *options(inputs, "model", "cluster"), "--global-batch-size", 8, "--tp", 3, "--out", out)
    assert result.exit_code == 2 and "tp 3 x pp 1 does not divide 2 devices" in result.stderr
    other = tmp_path / "v.json"
    result = call("uniform", *options(inputs, "model", "cluster"), "--global-batch-size", 3, "--out", other)
    assert result.exit_code == 2 and "dp_size 2 does not divide the 3 samples" in result.stderr
    assert not other.exists()


def test_explain_shows_terms_binding_and_runners_up(inputs, tmp_path):
    plan(inputs, tmp_path / "a.json", "--runners-up")
    result = call("explain", tmp_path / "a.json", *options(inputs, "hardware", "profile"))
    assert result.exit_code == 0, result.output
    for words in ("gradient_sync (once a step)", "activations", "of the budget", "runners-up", "is the slowest"):
        assert words in result.output
    (tmp_path / "a.prediction.json").unlink()
    alone = call("explain", tmp_path / "a.json", *options(inputs, "hardware", "profile"))
    assert alone.exit_code == 0 and "runners-up" not in alone.output


def test_runners_up_are_looked_for_where_they_are_asked_for_alone(inputs, tmp_path, monkeypatch):
    assert plan(inputs, tmp_path / "asked.json", "--runners-up").exit_code == 0
    asked = read_document(tmp_path / "asked.prediction.json", Prediction)
    assert len(asked.runners_up) > 2
    with monkeypatch.context() as without:
        without.setattr("shardwright_search.search.best_elsewhere", None)
        assert plan(inputs, tmp_path / "plain.json").exit_code == 0
    assert (tmp_path / "plain.json").read_bytes() == (tmp_path / "asked.json").read_bytes()
    plain = read_document(tmp_path / "plain.prediction.json", Prediction)
    assert plain == msgspec.structs.replace(asked, runners_up=())


def test_export_takes_a_runner_up_by_its_number(inputs, tmp_path):
    assert plan(inputs, tmp_path / "a.json", "--runners-up").exit_code == 0
    runners_up = read_document(tmp_path / "a.prediction.json", Prediction).runners_up

    def exported(name: str, *given: object) -> tuple[int, str]:
        result = call("export", *given, "--to", "galvatron", "--out", tmp_path / name)
        return result.exit_code, (tmp_path / name).read_text() if result.exit_code == 0 else ""

    seen = [exported("chosen", tmp_path / "a.json")]
    for number, runner_up in enumerate(runners_up, 1):
        write_document(tmp_path / f"{number}.json", runner_up.plan)
        seen.append(exported(f"by-number-{number}", tmp_path / "a.json", "--runner-up", number))
        assert seen[-1] == exported(f"by-file-{number}", tmp_path / f"{number}.json")
    assert len({text for code, text in seen if code == 0}) > 1
    beyond = call("export", tmp_path / "a.json", "--runner-up", 99, "--to", "galvatron", "--out", tmp_path / "none")
    assert beyond.exit_code == 2 and not (tmp_path / "none").exists()
    assert beyond.stderr.endswith("search with --runners-up, or give a lower number\n")


def test_explain_looks_for_the_runners_up_that_a_prediction_lacks(inputs, tmp_path):
    shown = []
    for name, further in (("asked", ["--runners-up"]), ("plain", [])):
        plan(inputs, tmp_path / f"{name}.json", *further)
        result = call("explain", tmp_path / f"{name}.json", *options(inputs, "hardware", "profile", "search"))
        assert result.exit_code == 0, result.output
        shown.append(result.stdout)
    assert "runners-up, against this plan" in shown[0] and shown[0] == shown[1]
    without_search = call("explain", tmp_path / "plain.json", *options(inputs, "hardware", "profile"))
    assert "runners-up, against this plan" not in without_search.output


def test_plan_names_a_batch_size_that_the_devices_divide(make, files, tmp_path):
    model, cluster = make.model(4), make.cluster(3)
    paths = files(model, cluster, make.request(global_batch_size=8), make.profile(model))
    result = plan(paths, tmp_path / "a.json")
    assert result.exit_code == 0, result.output
    *_, smaller, larger = result.stdout.splitlines()
    for size, line in ((6, smaller), (9, larger)):
        assert line.startswith(f"global_batch_size {size} gives ") and line.endswith("3 devices divide it, and not 8")
    assert read_document(tmp_path / "a.json", Plan).global_batch_size == 8


def test_a_name_in_a_table_is_shown_as_it_is_not_taken_for_a_style(capsys):
    show_rich(table("[/red]", ["[/bold]"], [["[red]"]]))
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("[/red]", "[/bold]", "[red]"))


@pytest.mark.parametrize("columns", [None, 60, 100])
def test_tables_are_as_wide_as_the_terminal_at_most_and_100_columns_if_there_is_none(
    capsys, monkeypatch, columns, usual_width
):
    """Sixteen stages of nine characters, and a plan in many words: numbers and names are whole."""
    if columns is not None:
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
    numbers = [f"{stage + 100}.123  9%" for stage in range(16)]
    show_rich(table("times", ["term", *(f"stage {stage}" for stage in range(16))], [["forward", *numbers]]))
    show_rich(table("plans", ["", "plan", "ms"], [["best", "tp1 x dp8 zero3 " * 20, "1.5"]]))
    printed = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = [line for line in printed.splitlines() if line[:1] in "┃│┏┡├└"]
    assert max(map(len, lines)) <= (columns or usual_width) < 16 * 15
    assert all(sum(number in line for line in lines) == 1 for number in numbers)
    assert sum("forward" in line for line in lines) == sum("term" in line for line in lines) > 1
    assert sum(line.count("zero3") for line in lines) == 20 and not any("…" in line for line in lines)


def test_explain_refuses_the_prediction_of_another_plan(inputs, tmp_path):
    plan(inputs, tmp_path / "a.json")
    other = msgspec.structs.replace(read_document(tmp_path / "a.json", Plan), name="other")
    write_document(tmp_path / "a.json", other)
    result = call("explain", tmp_path / "a.json", *options(inputs, "hardware", "profile"))
    assert result.exit_code == 2 and "is the prediction of another plan" in result.stderr


def test_search_never_imports_torch():
    code = "import sys, shardwright_search.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_command_that_prices_plans_takes_the_load_of_experts():
    commands = {name: {each.name for each in options_of(command.options)} for name, command in APP.commands.items()}
    priced = {name for name, taken in commands.items() if {"--profile", "--gpus"} & taken}
    others = {"correct", "new", "place"}  # the last takes it as --load, without which it has nothing to do
    assert {name for name, taken in commands.items() if "--imbalance" in taken} == priced - others
