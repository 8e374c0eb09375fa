"""Each documented edit of a run or its data, with the real commands: it begins a run, and the old one stays whole."""

import json
import re
import shutil
import socket
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import yaml
from forked_command import forked_command
from random_plans import random_plan
from sample_results import an_estimate
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.types import Prediction, RunResult

ROOT = Path(__file__).parents[2]
FEWER = {"runs.demo.steps": "6", "data.stdlib.vocab_size": "258"}
"""Values in place of a row's, which would take longer, or are more than the tiny model has."""
ROWS = re.findall(
    r"^\| (.+) \| `((?:runs|data)\..+?): (.+)` \| (.+) \|$", (ROOT / "docs" / "rebuilding.md").read_text(), re.M
)
PROGRAM = f"""#!{sys.executable} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked, asked.makefile("rw") as said:
    asked.connect(os.environ["SHARDWRIGHT_SERVER"])
    said.write(json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]) + "\\n")
    said.flush()
    status, output, errors = json.loads(said.readline())
sys.stdout.write(output)
sys.stderr.write(errors)
sys.exit(status)
"""
"""Hands the command to the tests' process, which has one forked: starting Python with PyTorch takes seconds."""


def _serve(server):
    while True:
        try:
            connection, _ = server.accept()
        except OSError:  # closed: the tests are over
            return
        with connection, connection.makefile("rw") as stream:
            words, environment, folder = json.loads(stream.readline())
            command = forked_command(words, environment, working_folder=Path(folder))
            said = command.communicate(timeout=300)
            stream.write(json.dumps([command.returncode, *said]) + "\n")


@pytest.fixture(scope="module")
def trained(_finished_folder, workspace_in, tmp_path_factory):
    """A workspace in which a run of four steps has been trained by the real command, on text that the real one made."""
    folder = tmp_path_factory.mktemp("trained") / "workspace"
    shutil.copytree(_finished_folder, folder, symlinks=True)
    program = folder / "bin/shardwright"
    program.write_text(PROGRAM)
    (folder / "text").mkdir()
    (folder / "text/a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000)
    plan = random_plan(tiny("llama", vocab_size=260), 0, 1, "float32")
    prediction = read_document(folder / "results/plans/roomy.prediction.json", Prediction)
    predicted = msgspec.structs.replace(
        prediction, plan_sha256=plan.sha256, estimate=an_estimate(plan, 0.1), runners_up=()
    )
    write_document(folder / "results/plans/roomy.json", plan)
    write_document(folder / "results/plans/roomy.prediction.json", predicted)
    workspace = workspace_in(folder)
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDWRIGHT_SERVER", str(folder / "server"))
        server.bind(str(folder / "server"))
        server.listen()
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        workspace.configure(_small)
        done = workspace.snakemake("results/runs/demo.done")
        assert done.status == 0, done.output
        yield workspace
        server.shutdown(socket.SHUT_RDWR)


def _small(config):
    config["data"]["stdlib"] = {"text": "text", "glob": "*.txt", "vocab_size": 260, "max_mib": 0.02}
    config["runs"]["demo"].update(steps=4, checkpoint_every=2, warmup_steps=1)


def _changed(path, value):
    def change(config):
        _small(config)
        *sections, key = path.split(".")
        for name in sections:
            config = config[name]
        assert config.get(key) != value
        config[key] = value

    return change


def _files(workspace, run):
    """What is kept of a run: its result, the loss of each step, and its checkpoints."""
    results = workspace.folder / "results"
    kept = [results / "runs" / run / name for name in ("DONE.json", "metrics.jsonl", "settings.json")]
    kept += [path for path in (results / "checkpoints" / run).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in kept}


@pytest.mark.parametrize(("path", "value"), [row[1:3] for row in ROWS], ids=[row[0] for row in ROWS])
def test_an_edit_leaves_the_run_as_it_was_and_undone_finds_it_done(trained, path, value):
    before, said = trained.run("demo"), yaml.safe_load(FEWER.get(path, value))
    files = _files(trained, before)
    assert len([path for path in files if path.name == "checkpoint.json"]) == 2
    trained.configure(_changed(path, said))
    done = trained.snakemake("results/runs/demo.done")
    assert done.status == 0, done.output
    after = trained.run("demo")
    config = yaml.safe_load((trained.folder / "config.yaml").read_text())["runs"]["demo"]
    result = read_document(trained.folder / "results/runs" / after / "DONE.json", RunResult)
    assert result.steps == config["steps"]
    assert (after == before) == (path == "runs.demo.checkpoint_every")
    assert _files(trained, before) == files
    trained.configure(_small)
    undone = trained.snakemake("results/runs/demo.done", "-n")
    assert undone.jobs == ({"run": 1} if after == before else {}), undone.output


def test_the_rows_of_the_table_are_found():
    assert {path for _, path, *_ in ROWS} >= {"data.stdlib.max_mib", "runs.demo.steps", "runs.demo.learning_rate"}
