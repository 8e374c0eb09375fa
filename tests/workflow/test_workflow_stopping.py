"""When a run asks for the signal at which it stops in order, and what a changed prediction reruns."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml
from sample_results import write_sample_results

from configuration import load_workflow
from shardwright.io import read_document, write_document
from shardwright.types import Plan, Prediction, StepMetrics
from shardwright_train.checkpoints.folders import METRICS, folder_of_run
from slurm_jobs import SAVE_BYTES_PER_S, START_S, signal_lead_s

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path):
    write_sample_results(tmp_path, search="roomy", run="demo")
    return tmp_path / "plans/roomy.json", tmp_path / "plans/roomy.prediction.json"


def lead_s(files, job_min=1440, grace_s=None, parent=None):
    plan, prediction = files
    return signal_lead_s(plan, prediction, plan.parent / "kept", parent, grace_s, job_min)


def as_large_as_llama_70b(files, nodes):
    """Write the plan for so many nodes, its model's embedding as large as a model of 70B parameters."""
    plan = json.loads(files[0].read_text())
    plan["model"]["types"]["embedding"]["parameters"] = [{"name": "wte", "shape": [70_000_000, 1000]}]
    plan["model"]["tied"], devices = [], sum(len(stage["ranks"]) for stage in plan["stages"])
    name = plan["cluster"]["nodes"][0]["node_type"]
    plan["cluster"]["nodes"] = [{"node_type": name, "count": nodes}]
    plan["cluster"]["node_types"][name]["devices_per_node"] = devices // nodes
    files[0].write_text(json.dumps(plan))
    prediction = json.loads(files[1].read_text())
    prediction["plan_sha256"] = read_document(files[0], Plan).sha256
    files[1].write_text(json.dumps(prediction))


def test_the_signal_comes_two_steps_and_two_saves_before_the_end(files):
    plan, prediction = read_document(files[0], Plan), read_document(files[1], Prediction)
    for step_s in (0.5, 100.0):
        slow = msgspec.structs.replace(prediction.estimate, simulated_step_time_s=step_s)
        write_document(files[1], msgspec.structs.replace(prediction, estimate=slow))
        saves_s = 2 * 12 * plan.model.parameter_count / SAVE_BYTES_PER_S / plan.cluster.num_nodes
        assert 0 <= lead_s(files) - (START_S + 2 * step_s + saves_s) < 1
    assert lead_s(files, grace_s=12.5) == 13


def test_a_selected_runner_up_has_a_step_of_its_own(files):
    prediction = read_document(files[1], Prediction)
    slow = msgspec.structs.replace(prediction.runners_up[0].estimate, simulated_step_time_s=300.0)
    runner_up = msgspec.structs.replace(prediction.runners_up[0], estimate=slow)
    write_document(files[1], msgspec.structs.replace(prediction, runners_up=(runner_up,)))
    write_document(files[0], runner_up.plan)
    assert lead_s(files) > 630


def test_each_node_saves_at_the_assumed_rate_and_a_measured_save_replaces_it(files):
    as_large_as_llama_70b(files, nodes=1)
    assert 8400 < lead_s(files) < 8500
    as_large_as_llama_70b(files, nodes=2)
    assert 4200 < lead_s(files) < 4300
    write_metrics(folder_of_run(files[0].parent / "kept", read_document(files[0], Plan)))
    assert 130 <= lead_s(files) < 140


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"save_s": ]}', b'{"step":1,"save_s":"x"}', b'{"step":1,"save_s":3.0}'),
        *(bytes([0, 200]) + b'"save_s"}', b"[" * 5000 + b'"save_s"}'),
    ],
)
def test_a_damaged_line_of_a_runs_metrics_is_one_warning(files, line, capsys):
    folder = folder_of_run(files[0].parent / "kept", read_document(files[0], Plan))
    write_metrics(folder)
    whole = lead_s(files)
    (folder / METRICS).write_bytes(line + b"\n" + (folder / METRICS).read_bytes())
    assert lead_s(files) == whole
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "metrics.jsonl: line 1 (" in said and "not taken into account" in said


def write_metrics(folder):
    """Write the metrics of a run whose longest save took 50 s, with a line that was cut off."""
    folder.mkdir(parents=True)
    step = StepMetrics(
        step=1, loss=1.0, step_time_s=1.0, tokens_per_s=1.0, mfu=None, grad_norm=None, learning_rate=1.0,
        peak_memory_bytes=(1,), time_utc="",
    )  # fmt: skip
    saved = (msgspec.structs.replace(step, step=2 + i, save_s=save_s) for i, save_s in enumerate((40.0, 50.0)))
    lines = [msgspec.json.encode(each) for each in (step, *saved)]
    (folder / METRICS).write_bytes(b"\n".join([*lines, lines[-1].replace(b"50.0", b"90.0")[:-5]]))


def test_the_saves_of_a_branch_are_known_whose_checkpoint_lies_beside_the_configuration(files, tmp_path, monkeypatch):
    """The branch's folder is named for its checkpoint, which the run is given as it was found."""
    monkeypatch.chdir(tmp_path)
    checkpoint = tmp_path / "there/kept/step-00000004"
    checkpoint.mkdir(parents=True)
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
    config["runs"]["demo"]["resume_from"] = "kept/step-00000004"
    workflow = load_workflow(config, "there/config.yaml")
    (parent,) = workflow.parents_of("demo")
    assert parent in workflow.run_options("demo")
    write_metrics(folder_of_run(files[0].parent / "kept", read_document(files[0], Plan), checkpoint))
    assert 130 <= lead_s(files, parent=Path(parent)) < 140 and lead_s(files) < 130


def test_a_stop_is_given_a_quarter_of_the_job_and_the_way_out_is_named(files, capsys):
    as_large_as_llama_70b(files, nodes=1)
    assert lead_s(files, job_min=240) == lead_s(files, job_min=240) == 3600
    (warning,) = capsys.readouterr().err.splitlines()
    assert "may take 84" in warning and "runs.<name>.grace_s" in warning
    assert lead_s(files, job_min=240, grace_s=7000) == 7000


@pytest.mark.parametrize(
    ("content", "problem"), [(b"{", "not valid JSON"), (b"\xff", "not valid JSON"), (None, "is not the plan of")]
)
def test_a_damaged_or_edited_plan_is_one_line_and_a_stop_is_given_a_quarter_of_the_job(files, capsys, content, problem):
    plan, _ = files
    edited = plan.read_bytes().replace(b'"global_batch_size": 32', b'"global_batch_size": 64')
    plan.write_bytes(edited if content is None else content)
    assert lead_s(files, job_min=241) == lead_s(files, job_min=241) == 3615
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {plan}: {problem}") and "a quarter of the job's 241 min" in warning
    assert lead_s(files, grace_s=7) == 7


def test_a_damaged_plan_stops_no_target_of_a_workflow_on_this_machine(finished):
    (finished.folder / "results/plans/roomy.json").write_text("{")
    asked = finished.snakemake("profiles", "runs", "-n")
    assert asked.status == 0 and "error" not in asked.output.lower(), asked.output


def test_where_slurm_takes_the_job_a_damaged_plan_is_one_line_and_the_job_is_signalled_all_the_same(finished):
    """The stand-ins for Slurm's commands know one account; sbatch notes what it is asked for, and refuses it."""
    for name in ("sbatch", "scontrol", "sacctmgr", "sshare", "sinfo", "squeue"):
        program = finished.folder / "bin" / name
        program.write_text("#!/bin/sh\necho me\n" if name != "sbatch" else '#!/bin/sh\necho "$*" >> asked\nexit 1\n')
        program.chmod(0o755)

    def small(config):
        config["node_types"]["cpu"]["slurm"] = {"account": "me", "partition": "any", "runtime_min": 240}

    finished.configure(small)
    plan = finished.folder / "results/plans/roomy.json"
    plan.write_text("{")
    cores = ("--executor", "slurm", "--jobs", "1", "--slurm-init-seconds-before-status-checks", "1")
    called = finished.snakemake("results/runs/demo.done", cores=cores)
    assert called.status == 1
    (warning,) = [line for line in called.output.splitlines() if "roomy.json: " in line]
    assert warning.startswith("warning: results/plans/roomy.json: not valid JSON")
    assert "--signal=TERM@3600" in (finished.folder / "asked").read_text()


def test_another_prediction_of_the_same_plan_is_no_reason_to_train_again(finished):
    prediction = finished.folder / "results/plans/roomy.prediction.json"
    changed = json.loads(prediction.read_text())
    changed["estimate"]["simulated_step_time_s"] *= 100
    prediction.write_text(json.dumps(changed))
    assert "run" not in finished.snakemake("runs", "-n").jobs
