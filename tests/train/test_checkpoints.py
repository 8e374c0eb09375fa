"""A checkpoint is complete or none; what a user keeps beside it stays, and nothing that is loaded can execute."""

import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from saved_steps import IDENTITY, JOB, PLAN, progress_of, saved_steps, saver_of, tensors_of
from tiny_models import tiny

from shardwright.io import BadInput, OutOfMemory, RunFailed, ShardwrightError, Stopped, system_fault
from shardwright.launch.lock import only_run
from shardwright.launch.nodes import Nodes
from shardwright_train.checkpoints import tensors as saving
from shardwright_train.checkpoints.choice import (
    check_branch,
    check_same_run,
    check_shared,
    checkpoint_to_resume,
    newest_whole,
    read_whole,
)
from shardwright_train.checkpoints.folders import (
    RECORD,
    Beginning,
    Identity,
    adopt_older,
    complete_checkpoints,
    folder_of_run,
    identity_of,
    identity_of_tensors,
    named_checkpoints,
    prune,
)
from shardwright_train.checkpoints.tensors import read_tensors
from shardwright_train.engine.learning_rate import LearningRateSchedule
from shardwright_train.options import RunOptions
from shardwright_train.parallel.world import World


@pytest.fixture
def run(tmp_path: Path, one_rank: World) -> Path:
    return saved_steps(tmp_path / "run")


STRANGERS = ("step-mynotes1", "step-backup01", "step-000000040", "step-00000002.old", "step-0000000a", "step-notes.txt")


def test_what_a_user_keeps_beside_the_checkpoints_stays(run: Path, one_rank: World) -> None:
    """Notes, copies of checkpoints under other names, and notes inside what a save or a removal might have left."""
    for name in STRANGERS:
        shutil.copytree(run / "step-00000004", run / name)
    for name in ("step-mynotes1", "step-00000008.unfinished", "step-00000001.removed", "step-00000004"):
        (run / name).mkdir(exist_ok=True)
        (run / name / "notes.txt").write_text("work of years")
    (run / "step-00000002").rename(run / "moved")
    (run / "step-00000002").symlink_to(run / "moved")
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.record.progress.step == 6
    for step in (8, 10):
        saver_of(run, keep_last=1).save(tensors_of(step), progress_of(step))  # type: ignore[arg-type]
    assert [path.name for path in complete_checkpoints(run)] == ["step-00000010", "step-00000004", "step-00000002"]
    assert sorted(file.parent.name for file in run.rglob("notes.txt")) == [
        *("step-00000001.damaged", "step-00000004", "step-00000008.damaged", "step-mynotes1"),
    ]
    assert all((run / name / RECORD).is_file() for name in (*STRANGERS, "moved"))
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.record.progress.step == 10


def test_a_folder_of_a_later_step_does_not_push_out_what_was_just_saved(run: Path) -> None:
    shutil.copytree(run / "step-00000004", run / "step-99999999")
    saver_of(run, keep_last=1).save(tensors_of(8), progress_of(8))  # type: ignore[arg-type]
    assert (run / "step-00000008" / RECORD).is_file()


def test_a_save_is_refused_where_the_lock_was_removed_or_replaced(run: Path) -> None:
    lock = run / "LOCK"
    with only_run(lock, Nodes()) as held:
        saver = saver_of(run, locks=held)
        saver.save(tensors_of(8), progress_of(8))  # type: ignore[arg-type]
        lock.unlink()
        for _ in range(2):
            with pytest.raises(BadInput, match="LOCK: was removed or replaced while this run held it"):
                saver.save(tensors_of(10), progress_of(10))  # type: ignore[arg-type]
            lock.write_text("")
    assert next(path.name for path in named_checkpoints(run)) == "step-00000008"


@pytest.mark.parametrize("error", [
    BadInput(b"caf\xe9".decode(errors="surrogateescape"), "is no file", "name one"),
    OutOfMemory("lacks memory", subject="plan", asked_bytes=7, rank=3, where="in step 2"),
    RunFailed("nan"),
    Stopped("stopped"),
    PermissionError(13, "Permission denied", "file"),
])  # fmt: skip
def test_what_one_rank_finds_wrong_is_the_same_on_all(one_rank: World, error: Exception) -> None:
    def find() -> None:
        raise error

    expected = system_fault(error) if isinstance(error, OSError) else error
    for ask in (lambda: one_rank.first_does(find), lambda: one_rank.together(find)):
        with pytest.raises(ShardwrightError) as caught:
            ask()
        raised = caught.value
        assert (type(raised), str(raised), vars(raised)) == (type(expected), str(expected), vars(expected))


class _Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.marker,))


def test_a_foreign_pickle_in_a_checkpoint_is_not_executed(run: Path, one_rank: World, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for name in (".metadata", "__0_0.distcp", "model.pt"):
        (run / "step-00000006" / name).write_bytes(pickle.dumps(_Malice(marker)))
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.folder.name == "step-00000006"
    found = {name: torch.zeros_like(x) for name, x in tensors_of(6).items()}
    read_tensors(resumed.folder, found)
    assert torch.equal(found["weight"], tensors_of(6)["weight"]) and not marker.exists()


def test_saves_and_removals_that_were_cut_off_leave_no_half_checkpoint(run: Path, one_rank: World) -> None:
    half_saved = run / "step-00000008.unfinished"
    shutil.copytree(run / "step-00000006", half_saved)
    (run / "step-00000002").rename(run / "step-00000002.removed")
    (run / "step-00000002.removed" / RECORD).unlink()
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.record.progress.step == 6
    assert sorted(path.name for path in run.iterdir()) == ["step-00000004", "step-00000006"]


def test_the_latest_stay_and_those_of_every_so_many_steps(run: Path) -> None:
    prune(run, keep_last=1, keep_every=4)
    assert [path.name for path in complete_checkpoints(run)] == ["step-00000006", "step-00000004"]
    prune(run, keep_last=1, keep_every=0)
    assert [path.name for path in complete_checkpoints(run)] == ["step-00000006"]


def test_what_is_saved_beside_the_steps_is_what_it_was_when_it_was_saved(tmp_path: Path, one_rank: World) -> None:
    tensors = tensors_of(1)
    saver = saver_of(tmp_path, asynchronous=True)
    saver.save(tensors, progress_of(1))  # type: ignore[arg-type]
    for x in tensors.values():
        x.fill_(-1.0)
    saver.finish()
    saver.close()
    found = {name: torch.zeros_like(x) for name, x in tensors.items()}
    read_tensors(complete_checkpoints(tmp_path)[0], found)
    assert all(torch.equal(found[name], x) for name, x in tensors_of(1).items())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_one_line_and_loses_nothing(small_disk: Path, one_rank: World, asynchronous: bool) -> None:
    """The check of its room says so before anything is written; without it, what was half written is no checkpoint."""
    run = small_disk / "run"
    run.mkdir()
    with pytest.raises(BadInput, match=r"another --checkpoints folder$"):
        saving.check_room(run, 2**40)
    saver_of(run).save(tensors_of(2), progress_of(2))  # type: ignore[arg-type]
    large = {"weight": torch.zeros(2**19)}
    with pytest.raises(BadInput, match=r"\d [KM]iB are free, .* MiB.*earlier checkpoints are intact"):
        saver_of(run, bytes_in_all=2**21).save(large, progress_of(4))  # type: ignore[arg-type]
    saver = saver_of(run, asynchronous=asynchronous)
    with pytest.raises(BadInput, match="make room"):
        saver.save(large, progress_of(4))  # type: ignore[arg-type]
        saver.finish()
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.record.progress.step == 2
    assert [path.name for path in run.iterdir()] == ["step-00000002"]


def test_a_run_goes_on_with_its_own_settings_alone_and_a_branch_with_any(run: Path, one_rank: World) -> None:
    resumed = read_whole(run / "step-00000006", one_rank)
    check_same_run(resumed, IDENTITY)
    faster = msgspec.structs.replace(IDENTITY.settings, learning_rate=1e-2)
    with pytest.raises(BadInput, match=r"was saved with learning_rate 0\.001, now 0\.01 is requested.*--resume-from"):
        check_same_run(resumed, msgspec.structs.replace(IDENTITY, settings=faster))
    other = msgspec.structs.replace(IDENTITY, settings=faster, plan_sha256="4" * 64)
    check_branch(resumed, other, batch_may_change=False)
    larger = msgspec.structs.replace(other, global_batch_size=16)
    with pytest.raises(BadInput, match=r"another global batch size.*--allow-batch-change"):
        check_branch(resumed, larger, batch_may_change=False)
    check_branch(resumed, larger, batch_may_change=True)
    for name, value in (("model_sha256", "5" * 64), ("data_sha256", "5" * 64), ("seed", 8)):
        with pytest.raises(BadInput, match="was saved under"):
            check_branch(resumed, msgspec.structs.replace(IDENTITY, **{name: value}), batch_may_change=True)


def test_a_branch_goes_on_with_longer_samples_behind_as_many_tokens(run: Path, one_rank: World) -> None:
    """48 samples of 16 tokens are 19 1/5 of 40, so that the 21st is the next one that nothing was trained on."""
    resumed = read_whole(run / "step-00000006", one_rank)
    length = IDENTITY.sequence_length
    assert length == 16 and resumed.progress(length) == resumed.record.progress
    assert [resumed.progress(longer).samples for longer in (32, 40)] == [24, 20]
    assert resumed.beginning(False, 40) == Beginning(step=6, samples=20)
    longer = tiny("llama", rope_theta=5e5, max_position_embeddings=128)
    asked = msgspec.structs.replace(PLAN, model=msgspec.structs.replace(longer, sequence_length=32))
    other = msgspec.structs.replace(IDENTITY, model_sha256=identity_of(asked.model), sequence_length=32)
    other = msgspec.structs.replace(other, tensors_sha256=identity_of_tensors(asked.model))
    check_branch(resumed, other, batch_may_change=False, length_may_change=True)
    with pytest.raises(BadInput, match=r"another model.*--allow-length-change"):
        check_branch(resumed, other, batch_may_change=False)
    for change in ({"rms_norm_eps": 1e-3}, {"vocab_size": 62}, {"num_hidden_layers": 5}):
        strange = msgspec.structs.replace(other, tensors_sha256=identity_of_tensors(tiny("llama", **change)))
        with pytest.raises(BadInput, match="a model of other parameters or settings"):
            check_branch(resumed, strange, batch_may_change=False, length_may_change=True)


def test_a_branch_has_a_folder_of_its_own(run: Path) -> None:
    trunk = folder_of_run(run, PLAN)
    branches = {folder_of_run(run, PLAN, run / f"step-0000000{step}") for step in (2, 4)}
    assert len({trunk, *branches}) == 3 and all(path.name.startswith(trunk.name) for path in branches)


def test_a_run_goes_on_in_the_folder_that_an_earlier_version_named(tmp_path: Path, one_rank: World) -> None:
    """Also after the price changed; it was named for the whole plan, and its records hold that name, too."""
    named = msgspec.structs.replace(IDENTITY, plan_sha256=PLAN.sha256)
    saved_steps(tmp_path / PLAN.sha256[:16], identity=named)
    adopt_older(tmp_path, PLAN)
    cluster = msgspec.structs.replace(PLAN.cluster, name="dearer")
    for plan in (PLAN, msgspec.structs.replace(PLAN, cluster=cluster)):
        adopt_older(tmp_path, plan)
        resumed = newest_whole(folder_of_run(tmp_path, plan), one_rank)
        assert resumed is not None and resumed.record.progress.step == 6
        check_same_run(resumed, IDENTITY)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == [PLAN.executed_sha256[:16]]


def test_a_link_to_a_removed_folder_of_an_earlier_version_is_one_line(tmp_path: Path, one_rank: World) -> None:
    """Not a traceback of a folder that can neither be made nor read."""
    older = tmp_path / PLAN.sha256[:16]
    older.mkdir()
    adopt_older(tmp_path, PLAN)
    older.rmdir()
    with pytest.raises(BadInput, match=f"is a link to {older.name}, which does not exist: .*remove the link"):
        adopt_older(tmp_path, PLAN)
    folder_of_run(tmp_path, PLAN).unlink()
    adopt_older(tmp_path, PLAN)
    assert newest_whole(folder_of_run(tmp_path, PLAN), one_rank) is None


def test_a_checkpoint_that_was_copied_from_another_plan_is_refused(run: Path, one_rank: World) -> None:
    with pytest.raises(BadInput, match="was saved under another plan"):
        check_same_run(
            read_whole(run / "step-00000006", one_rank), msgspec.structs.replace(IDENTITY, plan_sha256="4" * 64)
        )


def test_a_folder_that_ranks_do_not_share_is_refused(
    tmp_path: Path, one_rank: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_shared(tmp_path, one_rank)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shardwright_train.checkpoints.choice._appears", lambda _file: False)
    with pytest.raises(BadInput, match="does not see what rank 0 writes there"):
        check_shared(tmp_path, one_rank)


def test_room_is_that_of_the_file_system(tmp_path: Path) -> None:
    saving.check_room(tmp_path, 1)
    with pytest.raises(BadInput, match="are free, a checkpoint takes"):
        saving.check_room(tmp_path, 2**60)


def test_no_clock_says_which_checkpoint_is_the_newest(run: Path, one_rank: World) -> None:
    for age, checkpoint in enumerate(complete_checkpoints(run)):
        os.utime(checkpoint, (age * 1e6, age * 1e6))
        os.utime(checkpoint / RECORD, (age * 1e6, age * 1e6))
    resumed = newest_whole(run, one_rank)
    assert resumed is not None and resumed.record.progress.step == 6


@pytest.mark.parametrize("package", ["core/src/shardwright/launch", "stages/train/src"])
def test_no_time_is_taken_by_a_clock_that_may_be_set_back(package: str) -> None:
    """`time.time` measures nothing; dates are written down, or held to be equal, alone."""
    written_or_equal = ("training/loggers.py", "data/corpora.py")
    every = (Path(__file__).parents[2] / package).rglob("*.py")
    files = [file for file in every if not str(file).endswith(written_or_equal)]
    assert len(files) > 5
    for file in files:
        found = set(
            re.findall(
                r"\btime\.time\(|datetime\.now\(UTC\)(?!\.(?:iso|date\(\)\.iso))|st_mtime|getmtime", file.read_text()
            )
        )
        assert not found, (file, found)


def _asked(steps: int, schedule: LearningRateSchedule | None = None) -> tuple[RunOptions, Identity]:
    job = msgspec.structs.replace(JOB, steps=steps, learning_rate_schedule=schedule, learning_rate=1e-3)
    return job, msgspec.structs.replace(Identity.of_run(job, PLAN, "3" * 64), global_batch_size=8, seed=7)


@pytest.mark.parametrize("steps_before", [6, 9])
def test_a_schedule_over_other_steps_is_refused_unless_it_is_named_anew(
    steps_before: int, tmp_path: Path, one_rank: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is finished would jump up, one that is not would leave its line."""
    run = saved_steps(tmp_path / "run", identity=_asked(steps_before)[1])
    job, asked = _asked(12)
    with pytest.raises(
        BadInput, match=r"step 7 is 0\.00\d+ with cosine over 12 steps; it would have been .* with cosine over"
    ):
        checkpoint_to_resume(job, asked, run, one_rank)
    assert checkpoint_to_resume(*_asked(steps_before), run, one_rank) is not None
    assert capsys.readouterr().err == ""
    named = checkpoint_to_resume(*_asked(12, LearningRateSchedule.COSINE), run, one_rank)
    assert named is not None and named.record.progress.step == 6
    assert "the learning rate of step 7 is" in capsys.readouterr().err


def test_more_steps_of_a_rate_that_stays_and_of_an_earlier_version_are_taken(tmp_path: Path, one_rank: World) -> None:
    constant = saved_steps(tmp_path / "constant", identity=_asked(6, LearningRateSchedule.CONSTANT)[1])
    assert checkpoint_to_resume(*_asked(12, LearningRateSchedule.CONSTANT), constant, one_rank) is not None
    older = msgspec.structs.replace(_asked(6)[1], schedule_steps=None)
    assert checkpoint_to_resume(*_asked(12), saved_steps(tmp_path / "older", identity=older), one_rank) is not None


def test_a_branch_says_how_its_learning_rate_changes(
    tmp_path: Path, one_rank: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved_steps(tmp_path / "run", identity=_asked(6)[1])
    job, asked = _asked(12)
    branch = msgspec.structs.replace(job, resume_from=run / "step-00000006")
    assert checkpoint_to_resume(branch, asked, tmp_path / "branch", one_rank) is not None
    assert "with cosine over 12 steps; it would have been 0.0001 with cosine over 6 steps" in capsys.readouterr().err
