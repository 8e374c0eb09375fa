"""The chain of rules, run for real over a stub of the stages' commands."""

import csv
import json
import re
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from documented import rebuilding_rows

ROOT = Path(__file__).parents[2]


def _of(calls, command):
    return [call[1:] for call in calls if call[0] == command]


def _options(arguments):
    return {key: value for key, value in pairwise(arguments) if key.startswith("--")}


def test_everything_that_is_asked_for_comes_out(finished):
    files = (
        "report.html",
        "report.json",
        "summary.txt",
        "grid.csv",
        f"runs/{finished.run('demo')}/DONE.json",
        "plans/tight.prediction.json",
    )
    for path in files:
        assert (finished.folder / "results" / path).stat().st_size > 0
    rows = list(csv.DictReader((finished.folder / "results" / "grid.csv").open()))
    assert [row["search"] for row in rows] == ["llama2-70b", "roomy", "tight"]
    assert "chosen" in (finished.folder / "results" / "summary.txt").read_text()


def test_the_plan_for_a_real_cluster_comes_first_and_is_estimated(finished):
    summary = (finished.folder / "results" / "summary.txt").read_text()
    assert re.findall(r"^plan (\S+)", summary, re.M) == ["llama2-70b", "roomy", "tight"]
    page = (finished.folder / "results" / "report.html").read_text()
    assert re.findall(r'<div class="answer"><b>(.*?)</b>', page) == ["llama2-70b", "roomy", "tight"]
    calls = [_options(call) for call in _of(finished.calls(), "shardwright profile analytic")]
    made = {call.get("--hardware-out") or call["--out"] for call in calls}
    assert made == {"results/hardware/h100x64.h5", "results/profiles/llama2-70b@h100.h5"}
    measured = [_options(call)["--out"] for call in _of(finished.calls(), "shardwright train measure")]
    assert not any("llama2-70b" in path for path in measured)


def test_every_job_leaves_a_log_and_a_benchmark(finished):
    for kind in ("logs", "benchmarks"):
        found = {path.relative_to(finished.folder / "results" / kind).parts[0] for path in
                 (finished.folder / "results" / kind).rglob("*") if path.is_file()}  # fmt: skip
        rules = {"describe", "hardware", "probes", "measure", "fit", "search", "run", "validate", "prepare"}
        assert rules <= {name.partition(".")[0] for name in found}


def test_the_stages_are_called_with_what_the_configuration_says(finished):
    calls, config = finished.calls(), yaml.safe_load((finished.folder / "config.yaml").read_text())
    (hardware,) = _of(calls, "shardwright profile hardware")
    assert _options(hardware)["--time-budget"] == str(config["clusters"]["laptop"]["hardware_time_budget_s"])
    described = {call[0]: call for call in _of(calls, "shardwright train describe")}
    assert set(described) == {"results/models/demo", "results/models/llama2-70b"}
    describe = described["results/models/demo"]
    assert _options(describe)["--sequence-length"] == "128"
    runs = {_options(run)["--out"]: _options(run) for run in _of(calls, "shardwright train run")}
    tight = finished.run("demo-tight")
    assert runs[f"results/runs/{finished.run('demo')}"]["--steps"] == str(config["runs"]["demo"]["steps"])
    assert runs[f"results/runs/{tight}"]["--checkpoints"] == f"results/checkpoints/{tight}"
    assert runs[f"results/runs/{tight}"]["--log-dir"] == f"results/logs/ranks/{tight}"
    (prepare,) = _of(calls, "shardwright train prepare")
    assert _options(prepare)["--glob"] == "*.py"


def test_a_second_call_runs_nothing(finished):
    assert "Nothing to be done" in finished.snakemake("all", "grid", "-n").output


def test_what_would_run_is_told_without_a_number_of_cores(finished):
    finished.configure(lambda config: config["clusters"]["laptop"].update(hardware_time_budget_s=5))
    asked = finished.snakemake("profiles", "-n", cores=())
    assert (asked.status, asked.jobs) == (0, {"hardware": 1})


def test_another_memory_budget_searches_that_search_alone(finished):
    finished.configure(lambda config: config["searches"]["tight"].update(memory_gib=0.125))
    asked = finished.snakemake("plans", "-n")
    assert asked.jobs == {"write_search": 1, "search": 1}
    assert "results/plans/tight.json" in asked.output
    assert "output: results/plans/roomy.json" not in asked.output


def test_another_sequence_length_profiles_that_model_again_and_does_all_below(finished):
    finished.configure(lambda config: config["models"]["demo"].update(sequence_length=64))
    assert finished.snakemake("all", "-n").jobs == {
        "describe": 1, "probes": 1, "measure": 1, "fit": 1, "picture": 1, "search": 2, "run": 2, "validate": 2,
        "correct": 2, "report": 1,
    }  # fmt: skip


def test_what_one_search_taught_is_given_to_another_that_asks_for_it(finished):
    taught = [call for call in _of(finished.calls(), "shardwright correct") if "roomy" in call[0]]
    assert [_options(call) for call in taught] == [
        {
            "--hardware": "results/hardware/laptop.h5", "--profile": "results/profiles/demo@cpu.h5",
            "--out": "results/corrections/roomy.json",
        }
    ]  # fmt: skip
    assert not any("--correction" in call for call in _of(finished.calls(), "shardwright plan"))
    finished.configure(lambda config: config["searches"]["tight"].update(correction="roomy"))
    done = finished.snakemake("plans")
    assert (done.status, done.jobs) == (0, {"search": 1}), done.output
    (*_, search) = _of(finished.calls(), "shardwright plan")
    assert _options(search)["--correction"] == "results/corrections/roomy.json"


def test_a_load_of_experts_is_given_to_the_search_that_says_it_and_another_one_searches_again(finished):
    """A ratio as it is; a run's when it is done; a file's content counts, not its date."""

    def searched(imbalance):
        finished.configure(lambda config: config["searches"]["tight"].update(imbalance=imbalance))
        done = finished.snakemake("plans")
        assert done.status == 0, done.output
        (*_, search) = _of(finished.calls(), "shardwright plan")
        return done.jobs, _options(search).get("--imbalance")

    load, name = finished.folder / "load.json", str(finished.folder / "load.json")
    text = (ROOT / "core/examples/expert_load.json").read_text()
    assert searched(1.5) == ({"search": 1}, "1.5")
    assert searched(2) == ({"search": 1}, "2.0")
    assert searched("demo") == ({"search": 1}, f"results/runs/{finished.run('demo')}/load.json")
    load.write_text(text)
    assert searched(name) == ({"search": 1}, name)
    load.write_text(text)
    assert searched(name)[0] == {}
    load.write_text(text.replace('"last_step": ', '"last_step": 9'))
    assert searched(name)[0] == {"search": 1}
    assert searched(None) == ({"search": 1}, None)


def test_a_run_begins_with_weights_and_leaves_a_model_where_it_is_told_to(finished):
    """A switch takes no value."""
    said = {"weights": "/models/demo", "new_weights": True, "checkpoint_async": False, "export": True}
    finished.configure(lambda config: config["runs"]["demo"].update(said))
    done = finished.snakemake("runs")
    assert (done.status, done.jobs) == (0, {"write_run_settings": 1, "run": 1, "convert": 1}), done.output
    run = _of(finished.calls(), "shardwright train run")[-1]
    (converted,) = _of(finished.calls(), "shardwright train convert")
    words = " ".join(run)
    assert "--weights /models/demo --new-weights --" in words and "--checkpoint-sync --" in words
    assert "export" not in words
    folder = f"results/runs/{finished.run('demo')}"
    assert converted[0] == f"{folder}/DONE.json"
    assert _options(converted) == {
        "--plan": "results/plans/roomy.json", "--copy-from": "/models/demo", "--out": f"{folder}/model",
    }  # fmt: skip
    assert (finished.folder / folder / "model" / "config.json").is_file()
    finished.configure(lambda config: config["runs"]["demo-tight"].update(export=True))
    assert finished.snakemake("runs").status == 0
    copied = _options(_of(finished.calls(), "shardwright train convert")[-1])["--copy-from"]
    assert copied == f"results/data/{finished.data('stdlib')}"


def test_another_number_of_steps_trains_that_run_alone(finished):
    finished.configure(lambda config: config["runs"]["demo"].update(steps=300))
    assert finished.snakemake("runs", "-n").jobs == {"write_run_settings": 1, "run": 1}


def test_a_new_model_leaves_what_is_there_alone(finished):
    def add(config):
        config["models"]["other"] = config["models"]["demo"] | {"num_hidden_layers": 4}
        config["searches"]["other"] = config["searches"]["roomy"] | {"model": "other"}

    finished.configure(add)
    assert finished.snakemake("plans", "-n").jobs == {
        "write_model_config": 1, "describe": 1, "probes": 1, "measure": 1, "fit": 1, "write_search": 1, "search": 1,
    }  # fmt: skip


def test_what_is_analytic_is_estimated_and_not_measured(finished):
    def planned(config):
        told = {
            "runtime": "nanotron",
            "fused": True,
            "context_mib": 0,
            "communicator_mib": 1,
            "allocator_slack_mib": 2048,
        }
        config["profiles"]["cpu"] |= {"source": "analytic", "sequence_lengths": [64], "estimate": told}
        config["clusters"]["laptop"] |= {
            "hardware": "analytic", "inter_node_gbit_s": 400, "overlap_slowdowns": "1.25:1.1", "runtime": "torchtitan",
        }  # fmt: skip

    finished.configure(planned)
    done = finished.snakemake("plans")
    assert done.status == 0, done.output
    assert {"analytic_hardware", "analytic_profile"} <= set(done.jobs)
    assert not {"hardware", "probes", "measure", "fit"} & set(done.jobs)
    every = [_options(call) for call in _of(finished.calls(), "shardwright profile analytic")]
    calls = [options for options in every if "h100" not in options["--cluster"]]
    (hardware,) = [options for options in calls if "--hardware-out" in options]
    (profile,) = [options for options in calls if "--out" in options]
    assert (hardware["--hardware-out"], hardware["--inter-node-gbit-s"]) == ("results/hardware/laptop.h5", "400")
    assert (hardware["--overlap-slowdowns"], hardware["--runtime"]) == ("1.25:1.1", "torchtitan")
    assert (profile["--out"], profile["--node-type"]) == ("results/profiles/demo@cpu.h5", "cpu")
    assert [profile[f"--{key}-mib"] for key in ("context", "communicator", "allocator-slack")] == ["0", "1", "2048"]
    assert profile["--runtime"] == "nanotron" and "--fused" in profile
    assert not any("mib" in option for option in hardware)
    assert profile["--settings"] == "results/settings/cpu.json" and profile["--model"] == "results/models/demo@64.json"
    finished.configure()
    assert {"hardware", "probes", "measure", "fit"} <= set(finished.snakemake("plans", "-n").jobs)


_ROWS = rebuilding_rows()


def test_the_rows_of_the_table_are_found():
    assert len(_ROWS) > 20


@pytest.mark.parametrize(("path", "value", "runs"), [row[1:] for row in _ROWS], ids=[row[0] for row in _ROWS])
def test_what_is_made_again_is_what_the_documentation_says(finished, path, value, runs):
    def change(config):
        *sections, key = path.split(".")
        for name in sections:
            config = config[name]
        assert config.get(key) != yaml.safe_load(value)
        config[key] = yaml.safe_load(value)

    finished.configure(change)
    asked = finished.snakemake("all", "-n")
    assert asked.status == 0, asked.output
    told = (f"{rule} {count}" if count > 1 else rule for rule, count in asked.jobs.items())
    assert (", ".join(told) or "nothing") == runs


def test_a_failed_run_keeps_its_checkpoints_and_shows_its_error(finished):
    before = finished.run("demo")
    finished.configure(lambda config: config["runs"]["demo"].update(steps=300))
    done = finished.snakemake("runs", fails="shardwright train run")
    assert done.status == 1
    assert "error: some.json: something is wrong: do something" in done.output
    assert (finished.folder / "results" / "checkpoints" / before / "metrics.jsonl").exists()
    assert (finished.folder / "results" / "runs" / before / "DONE.json").exists()
    assert not (finished.folder / "results" / "runs" / finished.run("demo") / "DONE.json").exists()


def test_a_killed_snakemake_is_unlocked_and_goes_on_from_the_checkpoints(finished):
    results, run = finished.folder / "results", finished.run("demo")
    target, kept = f"results/runs/{run}/DONE.json", results / "checkpoints" / run
    shutil.rmtree(kept)
    shutil.rmtree(results / "runs" / run)
    killed = finished.snakemake(target, kills="shardwright train run")
    assert killed.status == -signal.SIGKILL
    (kept / "mark").write_text("of the run that was killed")
    refused = finished.snakemake(target)
    assert refused.status == 1 and "--rerun-incomplete" in refused.output
    locked = finished.snakemake(target, "--rerun-incomplete")
    assert locked.status == 1 and "--unlock" in locked.output
    assert finished.snakemake("--unlock").status == 0
    calls = len(_of(finished.calls(), "shardwright train run"))
    done = finished.snakemake(target, "--rerun-incomplete")
    assert done.status == 0, done.output
    (again,) = _of(finished.calls(), "shardwright train run")[calls:]
    assert _options(again)["--checkpoints"] == f"results/checkpoints/{run}"
    assert (kept / "mark").read_text() == "of the run that was killed"


def test_a_misspelt_key_is_one_line_and_exit_code_2(finished):
    finished.configure(lambda config: config["searches"]["tight"].update(memory_gb=1))
    done = finished.snakemake("plans", "-n")
    assert done.status == 2
    assert "error: config.yaml: searches.tight.memory_gb is not a known key: did you mean memory_gib?" in done.output
    assert "Traceback" not in done.output


def test_the_documents_are_what_the_configuration_says(finished):
    results = finished.folder / "results"
    assert json.loads((results / "searches" / "tight.json").read_text())["memory_gib"] == 0.048
    assert json.loads((results / "models" / "demo" / "config.json").read_text())["model_type"] == "llama"


def _demo(workspace):
    done = subprocess.run(
        ["bash", "workflow/scripts/demo.sh", "2"], cwd=workspace.folder, env=workspace.environment(), text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_demo_says_what_it_does_what_came_of_it_and_why_it_fails(finished):
    for name in ("Snakefile", "workflow", "config", "profiles"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, finished.folder / name)
    status, said, _ = _demo(finished)
    assert status == 0, said
    assert re.search(r"^ +\d+ s  write the report$", said, re.MULTILINE)
    assert "train demo" not in said
    assert re.search(r"chosen +200 ms +210 ms +1\.05", said)
    status, said, _ = _demo(finished)
    assert said.startswith("nothing to be done: all results are up to date\n")
    config = finished.folder / "config" / "config.yaml"
    text = config.read_text()
    config.write_text(
        re.sub(r"^    steps: (\d+ +# optimizer steps)$", r"    stepz: \1", text, count=1, flags=re.MULTILINE)
    )
    assert config.read_text() != text
    status, _, complaint = _demo(finished)
    assert status != 0
    assert "error: config/config.yaml: runs.demo.stepz is not a known key: did you mean steps?" in complaint


def test_a_run_that_may_lose_nodes_is_told_what_to_plan_again_with(finished):
    def change(config):
        config["runs"]["demo"].update(max_restarts=1, on_node_loss="replan")
        config["searches"]["roomy"]["imbalance"] = 1.5

    finished.configure(change)
    done = finished.snakemake("results/runs/demo.done", "-R", "run")
    assert done.status == 0, done.output
    given = _options(_of(finished.calls(), "shardwright train run")[-1])
    plans = _of(finished.calls(), "shardwright plan")
    plan = [call for call in plans if _options(call)["--out"].endswith("roomy.json")][-1]
    for name in ("hardware", "profile", "search", "imbalance"):
        assert given[f"--replan-{name}"] == _options(plan)[f"--{name}"]


def test_a_run_that_stops_in_order_is_resumed(finished):
    (finished.folder / (target := f"results/runs/{finished.run('demo')}/DONE.json")).unlink()
    calls = len(_of(finished.calls(), "shardwright train run"))
    done = finished.snakemake(target, stops="shardwright train run")
    assert done.status == 0, done.output
    first, *again = _of(finished.calls(), "shardwright train run")[calls:]
    assert again == [first, first]
