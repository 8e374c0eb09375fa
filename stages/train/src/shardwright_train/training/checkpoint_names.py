"""Where checkpoints lie."""

from pathlib import Path

PROGRESS = "progress.json"


def folder_of_plan(checkpoints: Path, plan_sha256: str) -> Path:
    """Where the checkpoints of a plan lie: a changed plan starts a folder of its own."""
    return checkpoints / plan_sha256[:16]


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    complete = sorted(path for path in folder.glob("step-????????") if (path / PROGRESS).is_file())
    return complete[-1] if complete else None
