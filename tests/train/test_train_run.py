"""The command trains, saves, stops in order, resumes bit for bit, and refuses what it cannot do in one line."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from context_plans import with_context
from forked_command import Command, forked_command
from random_plans import random_plan
from tiny_models import CONFIGS, SEQUENCE_LENGTH, tiny

from shardwright.io import read_document, sha256_of_file, write_document
from shardwright.types import Plan, RunResult, StopNote
from shardwright_train.checkpoints.folders import folder_of_run, latest_checkpoint
from shardwright_train.data.prepare import prepare
from shardwright_train.data.tokens import DataFolder
from shardwright_train.models.base import describe, family_named
from shardwright_train.training.stopping import Grace

STEPS = 6


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of a vocabulary that the tiny model has, smaller than any BPE's; a part is learned."""
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(text), "*.txt", 260, 1.0, folder / "data")
    files = DataFolder(folder / "data")
    described = files.read_description()
    marks = np.random.default_rng(0).random(described.tokens) < 0.3
    files.targets.write_bytes(marks.astype(np.uint8).tobytes())
    marked = {"targets": int(marks.sum()), "targets_sha256": sha256_of_file(files.targets)}
    write_document(files.description, msgspec.structs.replace(described, **marked))
    return folder


@pytest.fixture(scope="module")
def plan_file(work: Path) -> Path:
    write_document(work / "plan.json", random_plan(tiny("llama", vocab_size=260), 0, 2, "float32"))
    return work / "plan.json"


def arguments(work: Path, plan: Path, name: str, *more: str) -> list[str]:
    command = ["run", str(plan), "--data", str(work / "data"), "--steps", str(STEPS), "--checkpoint-every", "2"]
    command += ["--learning-rate", "0.01", "--checkpoints", str(work / name / "checkpoints")]
    return [*command, "--out", str(work / name), *more]


def start(work: Path, plan: Path, name: str, *more: str) -> Command:
    return forked_command(arguments(work, plan, name, *more))


def as_users_do(work: Path, plan: Path, name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "shardwright_train.cli", *arguments(work, plan, name)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: "subprocess.Popen[str] | Command") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(work: Path, plan_file: Path) -> Path:
    status, _, err = finish(as_users_do(work, plan_file, "unbroken"))
    assert status == 0, err
    return work / "unbroken"


def test_a_run_leaves_a_line_per_step_and_a_last_word(unbroken: Path) -> None:
    done = read_document(unbroken / "DONE.json", RunResult)
    found = losses(unbroken)
    assert len(found) == done.steps == STEPS
    assert (done.first_loss, done.final_loss) == (found[0], found[-1])
    assert found[-1] < found[0]
    lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    assert all(line["mfu"] is None and len(line["peak_memory_bytes"]) == 2 for line in lines)
    assert "save_s" not in lines[0] and lines[-1]["save_s"] > 0


def test_a_run_that_was_over_says_the_same_again_elsewhere(work: Path, plan_file: Path, unbroken: Path) -> None:
    """Nor does it train again where names and prices have changed."""
    checkpoints = str(unbroken / "checkpoints")
    plan = json.loads(plan_file.read_text()) | {"name": "renamed"}
    plan["cluster"]["name"] = "elsewhere"
    for node_type in plan["cluster"]["node_types"].values():
        node_type |= {"usd_per_hour": 123.0, "memory_bytes": 2 * node_type["memory_bytes"]}
    dearer = plan_file.with_name("dearer.json")
    dearer.write_text(json.dumps(plan))
    status, _, err = finish(start(work, dearer, "again", "--checkpoints", checkpoints))
    assert status == 0, err
    before, after = (read_document(work / name / "DONE.json", RunResult) for name in ("unbroken", "again"))
    assert (after.first_loss, after.final_loss) == (before.first_loss, before.final_loss)
    assert after.checkpoint == before.checkpoint and Path(after.checkpoint).is_dir()


def test_a_run_stopped_by_a_signal_resumes_bit_for_bit(work: Path, plan_file: Path, unbroken: Path) -> None:
    stopped = start(work, plan_file, "stopped")
    folder = folder_of_run(work / "stopped" / "checkpoints", read_document(plan_file, Plan))
    deadline = time.monotonic() + 90
    while latest_checkpoint(folder) is None and time.monotonic() < deadline and stopped.poll() is None:
        time.sleep(0.01)
    stopped.send_signal(signal.SIGHUP)
    status, _, err = finish(stopped)
    assert status == 75, err
    assert err.count("error:") == 1 and "run the same command to resume" in err
    assert not (work / "stopped" / "DONE.json").exists()
    note = read_document(work / "stopped" / "STOPPED.json", StopNote)
    assert (note.reason, note.steps, note.checkpoint) == ("signal", STEPS, str(latest_checkpoint(folder)))
    assert f"stopped after step {note.step} of {STEPS}" in err
    status, _, err = finish(start(work, plan_file, "stopped", "--deterministic"))
    assert status == 0, err
    assert "tried each pipeline stage alone" in err, "on a resume, too: the first step must find its kernels loaded"
    assert not (work / "stopped" / "STOPPED.json").exists()
    assert losses(work / "stopped") == losses(unbroken)


def test_a_checkpoint_of_other_settings_is_refused(work: Path, plan_file: Path, unbroken: Path) -> None:
    before = (unbroken / "DONE.json").read_bytes()
    status, _, err = finish(start(work, plan_file, "unbroken", "--seed", "1"))
    assert (status, err.count("\n")) == (2, 1)
    assert "another seed" in err
    status, _, err = finish(start(work, plan_file, "unbroken", "--loss-on", "all"))
    assert (status, err.count("\n")) == (2, 1)
    assert "other data" in err
    assert (unbroken / "DONE.json").read_bytes() == before


def test_a_branch_goes_on_under_another_plan_with_the_same_samples(work: Path, unbroken: Path) -> None:
    """Later checkpoints of the trunk stay as they are; asked again, the branch goes on where it was."""
    other = work / "other.json"
    write_document(other, random_plan(tiny("llama", vocab_size=260), 4, 2, "float32"))
    status, _, err = finish(start(work, work / "plan.json", "kept", "--keep-every", "2"))
    assert status == 0, err
    trunk = folder_of_run(work / "kept" / "checkpoints", read_document(work / "plan.json", Plan))
    begin, before = trunk / "step-00000002", sorted(trunk.iterdir())
    stopped = ("--resume-from", str(begin), "--checkpoints", str(work / "kept" / "checkpoints"))
    status, _, err = finish(start(work, other, "branch", *stopped, "--max-time-s", "1", "--checkpoint-every", "1"))
    assert status in (0, 75), err
    status, _, err = finish(start(work, other, "branch", *stopped))
    assert status == 0, err
    assert losses(work / "branch") == pytest.approx(losses(unbroken), rel=1e-4)
    assert sorted(trunk.iterdir()) == before
    done = read_document(work / "branch" / "DONE.json", RunResult)
    record = json.loads((Path(done.checkpoint) / "checkpoint.json").read_bytes())
    assert record["parent"] == str(begin) and record["progress"]["step"] == STEPS


def test_a_branch_goes_on_with_longer_samples_of_which_ranks_share_the_positions(work: Path, unbroken: Path) -> None:
    config = CONFIGS["llama"] | {"vocab_size": 260, "rope_theta": 5e5}
    model = describe(family_named("llama", "test"), config, "longer", 2 * SEQUENCE_LENGTH)
    plan = with_context(random_plan(model, 42, 2, "float32", stages=1), 42)
    assert any(layer.cp_size > 1 for layer in plan.layers)
    write_document(work / "long.json", plan)
    begin = Path(read_document(unbroken / "DONE.json", RunResult).checkpoint)
    before = json.loads((begin / "checkpoint.json").read_bytes())["progress"]["samples"]
    branch = "--resume-from", str(begin), "--steps", str(STEPS + 2)
    status, _, err = finish(start(work, work / "long.json", "long", *branch))
    assert (status, err.count("\n")) == (2, 1) and "--allow-length-change" in err
    status, _, err = finish(start(work, work / "long.json", "long", *branch, "--allow-length-change"))
    assert status == 0, err
    done = read_document(work / "long" / "DONE.json", RunResult)
    record = json.loads((Path(done.checkpoint) / "checkpoint.json").read_bytes())
    assert record["began"] == {"step": STEPS, "samples": -(-before // 2)}
    assert max(losses(work / "long")[-2:]) < losses(unbroken)[0]


def test_another_learning_rate_is_no_quiet_change(work: Path, plan_file: Path, unbroken: Path) -> None:
    status, _, err = finish(start(work, plan_file, "unbroken", "--learning-rate", "0.02"))
    assert (status, err.count("\n")) == (2, 1)
    assert "was saved with learning_rate 0.01, now 0.02 is requested" in err and "--resume-from" in err


def test_tokens_that_are_not_those_that_were_prepared_are_refused(work: Path, plan_file: Path) -> None:
    shutil.copytree(work / "data", work / "changed")
    tokens = bytearray((work / "changed" / "tokens.bin").read_bytes())
    tokens[0] ^= 1
    (work / "changed" / "tokens.bin").write_bytes(tokens)
    status, _, err = finish(start(work, plan_file, "unprepared", "--data", str(work / "changed")))
    assert (status, err.count("\n")) == (2, 1)
    assert "tokens.bin: its SHA-256 differs from the one in data.json: prepare the data again" in err


def test_a_locked_run_is_refused(work: Path, plan_file: Path) -> None:
    import fcntl

    folder = folder_of_run(work / "locked" / "checkpoints", read_document(plan_file, Plan))
    folder.mkdir(parents=True)
    with (folder / "LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, _, err = finish(start(work, plan_file, "locked"))
    assert (status, err.count("\n")) == (2, 1)
    assert "another run is using it" in err


def test_a_grace_time_that_is_too_short_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A stop beside a save under way takes the rest of the step and two saves, each the longest there was."""
    grace = Grace(given_s=10.0, saves=2).after(4.0, []).after(3.0, [1.0, 3.0])
    assert capsys.readouterr().err == ""
    grace = grace.after(3.0, [1.0, 3.0, 3.5])
    told = capsys.readouterr().err
    assert told.startswith("warning: --grace-s 10: a stop takes 11.0 s (a step 4.0 s, a save 3.5 s)")
    grace.after(9.0, [5.0])
    Grace(given_s=None, saves=1).after(1e6, [1e6])
    assert capsys.readouterr().err == ""
