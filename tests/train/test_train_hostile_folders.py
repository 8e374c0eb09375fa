"""Whatever lies in a run's folders, and whoever else is at work there: one line, exit code 2, and nothing is lost."""

import shutil
import time
from pathlib import Path
from zlib import crc32

import pytest
from forked_command import Command, forked_command
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.launch.journal import journal_path
from shardwright.launch.lock import only_run
from shardwright.launch.nodes import Nodes
from shardwright.types import Plan
from shardwright_train.checkpoints.folders import RECORD, folder_of_run, latest_checkpoint
from shardwright_train.data.prepare import prepare

SAVED = "step-00000002"
FOR_EVER = ("--steps", "100000", "--checkpoint-every", "1", "--keep-checkpoints", "1")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a plan for two ranks, and a run that has saved its second and last step."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    prepare(str(folder / "text"), "*.txt", 260, 1.0, folder / "data")
    write_document(folder / "plan.json", random_plan(tiny("llama", vocab_size=260), 3, 2, "float32"))
    status, error = _ended(_start(folder, folder / "saved"))
    assert status == 0, error
    return folder


@pytest.fixture
def saved(work: Path, tmp_path: Path) -> Path:
    """A copy of that run: what it wrote, its checkpoints below."""
    return Path(shutil.copytree(work / "saved", tmp_path / "saved"))


def _start(work: Path, out: Path, *options: str) -> Command:
    command = ["run", str(work / "plan.json"), "--data", str(work / "data"), "--learning-rate", "0.01"]
    command += ["--learning-rate-schedule", "constant"]  # more steps follow
    return forked_command([*command, "--checkpoints", str(out / "kept"), "--out", str(out), "--steps", "2", *options])


def _ended(command: Command) -> tuple[int | None, str]:
    _, error = command.communicate(timeout=300)
    return command.returncode, error


def _folder(work: Path, out: Path) -> Path:
    return folder_of_run(out / "kept", read_document(work / "plan.json", Plan))


def _until_saved_after(command: Command, run: Path, step: int) -> None:
    until = time.monotonic() + 90
    while (latest := latest_checkpoint(run)) is None or latest.name <= f"step-{step:08d}":
        assert command.poll() is None and time.monotonic() < until, _ended(command)
        time.sleep(0.01)


def _left_of(file: Path) -> Path:
    """What a process of another host would have left of a file."""
    return file.with_name(f".{file.name}.{crc32(file.name.encode()):08x}.0123abcd-4711-12.tmp")


def test_a_folder_in_place_of_the_metrics_is_one_line_on_all_ranks(work: Path, saved: Path) -> None:
    metrics = _folder(work, saved) / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    status, error = _ended(_start(work, saved, "--steps", "3"))
    assert (status, error.count("\n")) == (2, 2), error
    assert error.endswith(f"error: {metrics}: is a folder: choose another name\n")


def test_records_that_a_tool_has_dropped_end_the_run_and_lose_nothing(work: Path, saved: Path) -> None:
    run = _folder(work, saved)
    (run / SAVED / RECORD).unlink()
    before = sorted(run.rglob("*"))
    status, error = _ended(_start(work, saved))
    assert (status, error.count("\n")) == (2, 1), error
    assert "none of its 1 checkpoints is undamaged" in error and "it has no checkpoint.json" in error
    assert sorted(run.rglob("*")) == before


def test_a_run_goes_on_from_a_linked_checkpoint_and_ends_when_its_lock_is_removed(
    work: Path, saved: Path, tmp_path: Path
) -> None:
    """As when checkpoints were moved to a larger disk; the link's target stays when its step is pruned."""
    run, moved = _folder(work, saved), tmp_path / "disk" / SAVED
    moved.parent.mkdir()
    shutil.move(run / SAVED, moved)
    (run / SAVED).symlink_to(moved)
    command = _start(work, saved, *FOR_EVER)
    _until_saved_after(command, run, 4)
    (run / "LOCK").unlink()
    with only_run(run / "LOCK", Nodes()):  # a second run comes in
        status, error = _ended(command)
        assert status == 2 and "Traceback" not in error, error
        assert error.splitlines()[-1].startswith(
            f"error: {run / 'LOCK'}: was removed or replaced while this run held it"
        )
        assert (run / "LOCK").exists()
    assert (moved / RECORD).is_file() and (run / SAVED).is_symlink()
    assert [path.name for path in run.glob("step-*")].count(SAVED) == 1 and len(list(run.glob("step-*"))) <= 3


def test_what_rank_0_alone_cannot_write_in_a_step_is_one_line(work: Path, saved: Path) -> None:
    """What a kill or a backup left of its files is gone by then; what others may be writing in --out is not."""
    run = _folder(work, saved)
    left = [_left_of(run / "metrics.jsonl"), _left_of(saved / "DONE.json"), run / ".seen-1-2"]
    kept = [_left_of(saved / "plan.json"), run / ".seen-1", saved / ".DONE.json.tmp"]
    for file in (*left, *kept):
        file.touch()
    command = _start(work, saved, *FOR_EVER)
    _until_saved_after(command, run, 3)
    assert [file.exists() for file in (*left, *kept)] == [False] * 3 + [True] * 3
    (run / "metrics.jsonl").rename(run / "aside")
    (run / "metrics.jsonl").mkdir()
    status, error = _ended(command)
    assert status == 4 and "Traceback" not in error, error
    assert error.splitlines()[-1] == f"error: {run / 'metrics.jsonl'}: Is a directory: choose the name of a file"


def test_runs_of_other_checkpoints_do_not_write_into_one_folder_at_once(work: Path, saved: Path) -> None:
    with only_run(saved / "LOCK.out", Nodes()):
        before = sorted(saved.rglob("*"))
        status, error = _ended(_start(work, saved, "--checkpoints", str(saved / "others")))
    assert (status, error.count("\n")) == (2, 1) and "LOCK.out: another run is using it" in error
    assert set(saved.rglob("*")) == set(before) - {saved / "LOCK.out"}


def test_a_bad_line_of_a_journal_is_one_line_on_all_ranks(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "measured.json"
    command = ("measure", work / "plan.json", "--steps", 2, "--warmup-steps", 1, "--out", out)
    journal_path(out).write_bytes(b"{}\n" * 2)
    status, error = _ended(forked_command(command))
    assert status == 2 and "Traceback" not in error, error
    line = error.splitlines()[-1]
    assert line.startswith(f"error: {journal_path(out)}: line 1 is not readable") and not out.exists()
