"""Where checkpoints lie: a folder for each run, in it a folder for each step, complete once it has its record."""

import os
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

RECORD = "checkpoint.json"
LOCK = "LOCK"
_COMPLETE = "step-????????"


def folder_of_run(checkpoints: Path, plan_sha256: str, parent: Path | None = None) -> Path:
    """Where the checkpoints of a plan lie, or of its branch from a checkpoint: another plan has a folder of its own."""
    name = plan_sha256[:16]
    if parent is not None:
        name += f"-from-{sha256(os.fsencode(parent.resolve())).hexdigest()[:12]}"
    return checkpoints / name


def folder_of_step(run: Path, step: int) -> Path:
    """Where a run's checkpoint of a step lies."""
    return run / f"step-{step:08d}"


def complete_checkpoints(run: Path) -> tuple[Path, ...]:
    """The complete checkpoints of a run, the newest first; whether they are whole is not looked at."""
    found = (path for path in run.glob(_COMPLETE) if (path / RECORD).is_file())
    return tuple(sorted(found, reverse=True))


def latest_checkpoint(run: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next(iter(complete_checkpoints(run)), None)


def remove_unfinished(run: Path) -> None:
    """Remove what saves and removals that were cut off have left behind."""
    for path in _unfinished(run):
        shutil.rmtree(path)


def prune(run: Path, keep_last: int, keep_every: int, best: int | None = None) -> None:
    """Remove complete checkpoints but the latest, those of every `keep_every`-th step (0: no others) and the best one.

    A checkpoint's record goes first, so that no half of one is ever taken for a whole one.
    """
    for path in complete_checkpoints(run)[keep_last:]:
        step = int(path.name.removeprefix("step-"))
        if step != best and (not keep_every or step % keep_every):
            (path / RECORD).unlink()
            shutil.rmtree(path)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither taken again nor in the way of the next one of its step."""
    aside = next(name for name in _names_aside(checkpoint) if not name.exists())
    checkpoint.rename(aside)
    return aside


def _names_aside(checkpoint: Path) -> Iterator[Path]:
    yield checkpoint.with_suffix(".damaged")
    for number in range(2, 1 << 20):
        yield checkpoint.with_suffix(f".damaged{number}")


def _unfinished(run: Path) -> Iterator[Path]:
    yield from run.glob(f"{_COMPLETE}.unfinished")
    yield from (path for path in run.glob(_COMPLETE) if path.is_dir() and not (path / RECORD).exists())
