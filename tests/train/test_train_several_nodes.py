"""A plan for two nodes is run and measured by two launchers, which meet as srun says or by address and number."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from command_calls import call
from forked_command import forked_command
from launchers import Place, by_address, by_slurm, free_port
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.launch import accelerator
from shardwright.types import Cluster, Measurement, NodeGroup, Plan, RunResult
from shardwright_train.cli import APP
from shardwright_train.data.prepare import prepare


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a plan for two nodes of one rank each."""
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(folder / "text"), "*.txt", 260, 1.0, folder / "data")
    plan = random_plan(tiny("llama", vocab_size=260), 1, 2, "float32", stages=2)
    write_document(folder / "plan.json", _placed(plan, "cpu"))
    return folder


def _placed(plan: Plan, device: str) -> Plan:
    (node_type,) = plan.cluster.node_types.values()
    node_type = msgspec.structs.replace(node_type, device=device, devices_per_node=1)
    cluster = Cluster(name="two", nodes=(NodeGroup(node_type="one", count=2),), node_types={"one": node_type})
    return msgspec.structs.replace(plan, cluster=cluster)


def _both(places: list[Place], *arguments: object) -> None:
    """Run a command on both nodes, to its good end."""
    started = [forked_command((*arguments, *options), variables) for options, variables in places]
    errors = [command.communicate(timeout=300)[1] for command in started]
    assert [command.returncode for command in started] == [0, 0], errors


def _both_as_users_do(places: list[Place], *arguments: object) -> None:
    """The same, each from its own line."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "shardwright_train.cli", *map(str, (*arguments, *options))],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        for options, variables in places
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors


def test_a_run_of_two_nodes_starts_under_srun_and_goes_on_by_address(work: Path, tmp_path: Path) -> None:
    """Both nodes share the run's folder: its lock is node 0's alone."""
    folders = ("--data", work / "data", "--checkpoints", tmp_path / "kept", "--out", tmp_path / "out")
    _both(by_slurm(2, tmp_path), "run", work / "plan.json", *folders, "--steps", 2)
    assert read_document(tmp_path / "out" / "DONE.json", RunResult).steps == 2
    _both(
        by_address(2, tmp_path), "run", work / "plan.json", *folders, "--steps", 3, "--learning-rate-schedule", "cosine"
    )
    done = read_document(tmp_path / "out" / "DONE.json", RunResult)
    assert (done.steps, done.final_loss < done.first_loss) == (3, True)
    assert not list(tmp_path.rglob("LOCK"))


def test_two_nodes_measure_a_plan_under_srun(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "measured" / "out.json"
    _both(by_slurm(2, tmp_path), "measure", work / "plan.json", "--out", out, "--steps", 1, "--warmup-steps", 1)
    (measured,) = read_document(out, Measurement).plans
    assert [rank.rank for rank in measured.ranks] == [0, 1]
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_the_line_of_each_node_is_printed_and_starts_it(work: Path, tmp_path: Path) -> None:
    command = ["measure", work / "plan.json", "--out", tmp_path / "out.json", "--steps", 1, "--warmup-steps", 1]
    asked = subprocess.run(
        [sys.executable, "-m", "shardwright_train.cli", *map(str, command)], capture_output=True, text=True, timeout=300
    )
    assert (asked.returncode, asked.stderr.count("\n")) == (2, 1), asked.stderr
    assert "plan.json: is for 2 nodes, --nnodes is 1: start it on every node: the lines are printed" in asked.stderr
    lines = [shlex.split(line, comments=True) for line in asked.stdout.splitlines()[1:]]
    assert [line[-1] for line in lines] == ["0", "1"]
    words = " ".join(lines[0]).replace(":29500 ", f":{free_port()} ")  # whatever else runs on this machine
    port = words.split("--rendezvous ")[1].split()[0]
    told = [tuple(line[line.index("--nnodes") :]) for line in lines]
    _both_as_users_do([(tuple(port if ":" in word else word for word in each), {}) for each in told], *command)
    assert read_document(tmp_path / "out.json", Measurement).plans


@pytest.mark.parametrize("command", ["run", "measure"])
def test_a_plan_for_devices_that_are_not_here_is_one_line_at_once(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(accelerator, "DRIVERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    write_document(tmp_path / "plan.json", _placed(read_document(work / "plan.json", Plan), "NVIDIA A100-SXM4-80GB"))
    options = {
        "run": ("--data", work / "data", "--steps", 1, "--out", tmp_path / "o", "--checkpoints", tmp_path / "c"),
        "measure": ("--out", tmp_path / "out.json"),
    }
    nodes = ("--nnodes", 2, "--node-rank", 1, "--rendezvous", "127.0.0.1:1")
    ended = call(APP, command, tmp_path / "plan.json", *options[command], *nodes)
    words = (
        "plan.json: is for NVIDIA A100-SXM4-80GB, but this machine has no GPU driver: start it on the cluster's nodes"
    )
    assert (ended.exit_code, ended.stderr.count("\n"), words in ended.stderr) == (2, 1, True), ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("option", ["--data", "--out", "--checkpoints"])
def test_a_file_where_a_folder_is_wanted_is_one_line(work: Path, tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("mine")
    folders = {"--data": work / "data", "--out": tmp_path / "o", "--checkpoints": tmp_path / "c"}
    given = [part for pair in (folders | {option: tmp_path / "file"}).items() for part in pair]
    nodes = ("--nnodes", 2, "--node-rank", 1, "--rendezvous", "127.0.0.1:1")
    ended = call(APP, "run", work / "plan.json", *given, "--steps", 1, *nodes)
    remedy = "pass one that `prepare` wrote" if option == "--data" else "name another"
    assert (ended.exit_code, ended.stderr.count("\n")) == (2, 1)
    assert f"file: is not a folder: {remedy}" in ended.stderr


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("data.json", '{"format": ', "data.json: "),
        ("blend.json", '{"format": "shardwright.blend", "version": 1, "datasets": []}', "blend.json: "),
        ("notes.txt", "mine", "data.json: "),
    ],
)
def test_data_that_cannot_be_read_is_one_line_and_leaves_nothing(
    work: Path, tmp_path: Path, file: str, content: str, message: str
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / file).write_text(content)
    given = ("--data", tmp_path / "bad", "--steps", 1, "--out", tmp_path / "o", "--checkpoints", tmp_path / "c")
    nodes = ("--nnodes", 2, "--node-rank", 1, "--rendezvous", "127.0.0.1:1")
    ended = call(APP, "run", work / "plan.json", *given, *nodes)
    assert (ended.exit_code, ended.stderr.count("\n"), message in ended.stderr) == (2, 1, True), ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
