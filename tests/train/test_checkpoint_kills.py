"""A save that is killed at any point at which it touches the file system loses no complete checkpoint."""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from saved_steps import progress_of, saver_of, tensors_of

from shardwright_train.checkpoints.choice import newest_whole
from shardwright_train.checkpoints.folders import RECORD, complete_checkpoints, remove_leftovers
from shardwright_train.parallel.world import World

_TOUCHES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
_MOST = 500
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def _save(folder: Path, step: int, asynchronous: bool) -> None:
    saver = saver_of(folder, keep_last=1, asynchronous=asynchronous)
    saver.save(tensors_of(step), progress_of(step))  # type: ignore[arg-type]
    saver.finish()
    saver.close()


def _writes(folder: Path, path: object, _mode: object, flags: object) -> bool:
    return str(path).startswith(str(folder)) and isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _killed(folder: Path, number: int, asynchronous: bool) -> bool:
    """Save in a child that is killed as it touches the file system for the so many-th time; whether it was."""

    def save() -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        _save(folder, 4, asynchronous)

    return _killed_as_it_touches(folder, number, save)


def _killed_as_it_touches(folder: Path, number: int, do: Callable[[], None]) -> bool:
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            touches = event in _TOUCHES or (event == "open" and _writes(folder, *arguments))
            left -= touches
            if touches and left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            do()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status == -signal.SIGKILL


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_killed_at_each_of_its_writes_leaves_a_whole_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    """In each state the next start finds the one before or the new one, whole; what was half done is gone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (tmp_path / "first").mkdir()
    _save(tmp_path / "first", 2, asynchronous=False)
    dist.destroy_process_group()
    found = []
    for number in range(1, _MOST):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        if not _killed(folder, number, asynchronous):
            break
        found.append(_newest(folder))
        assert all(path.name in ("step-00000002", "step-00000004") for path in folder.iterdir())
    assert found == sorted(found) and set(found) == {2, 4} and len(found) >= 8, found


def _newest(folder: Path) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = World(0, 1, None, "gloo", heartbeat=None)  # type: ignore[arg-type]
    resumed = newest_whole(folder, world)
    dist.destroy_process_group()
    assert resumed is not None
    return resumed.record.progress.step


def test_a_start_killed_in_its_clean_up_loses_nothing(tmp_path: Path) -> None:
    """At each removal of what cut-off saves and removals have left; the next start ends it."""
    whole, unfinished, removed = "step-00000002", "step-00000004.unfinished", "step-00000001.removed"
    for number in range(1, _MOST):
        run = tmp_path / str(number)
        for name in (whole, unfinished, removed):
            (run / name).mkdir(parents=True)
            (run / name / SHARD).write_bytes(b"x")
        (run / whole / RECORD).write_text("{}")
        killed = _killed_as_it_touches(run, number, lambda run=run: remove_leftovers(run))  # type: ignore[misc]
        assert [path.name for path in complete_checkpoints(run)] == [whole]
        remove_leftovers(run)
        assert [path.name for path in run.iterdir()] == [whole]
        assert (run / whole / SHARD).read_bytes() == b"x"
        if not killed:
            break
    assert number > 4
