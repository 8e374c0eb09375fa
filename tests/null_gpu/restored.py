"""Commands on a null device: a run that saves its state, and goes on from it."""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from drawn import PRECISIONS, on_null_device
from random_plans import random_plan
from tiny_models import tiny

from shardwright.io import read_document, write_document
from shardwright.types import Plan
from shardwright_train.checkpoints.folders import RECORD, Checkpoint, complete_checkpoints, folder_of_run
from shardwright_train.data.prepare import prepare

STEPS = 6
SAVED = {2, 4, 6}
_RUN = "import sys; from shardwright_train.cli import main; sys.exit(main())"


def restored() -> str:
    """Train and save while the steps go on, then once more from a checkpoint before the last; return what was done."""
    plan = on_null_device(random_plan(tiny("llama", vocab_size=260), 0, 1), PRECISIONS[0])
    with TemporaryDirectory() as kept:
        work = Path(kept)
        write_document(work / "plan.json", plan)
        (work / "text").mkdir()
        (work / "text" / "a.txt").write_text("Nothing is computed here.\n" * 2000)
        prepare(str(work / "text"), "*.txt", 260, 1.0, work / "data")
        _train(work)
        checkpoints = _checkpoints(work, plan)
        if {*checkpoints} != SAVED:
            raise RuntimeError(f"there are checkpoints of steps {sorted(checkpoints)}, not {sorted(SAVED)}")
        shutil.rmtree(checkpoints[STEPS])
        (work / "out" / "DONE.json").unlink()
        _train(work)
        if {*_checkpoints(work, plan)} != SAVED:
            raise RuntimeError("it did not go on to the last step")
    return f"{STEPS} steps with saves, the last {STEPS - sorted(SAVED)[-2]} once more from a checkpoint"


def _train(work: Path) -> None:
    options = ["--data", "data", "--out", "out", "--checkpoints", "kept", "--checkpoint-every", "2"]
    arguments = [sys.executable, "-c", _RUN, "run", "plan.json", *options, "--steps", STEPS, "--keep-checkpoints", "9"]
    done = subprocess.run(list(map(str, arguments)), cwd=work, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-600:])


def _checkpoints(work: Path, plan: Plan) -> dict[int, Path]:
    """Return the complete checkpoints of the run, by their steps."""
    found = complete_checkpoints(folder_of_run(work / "kept", plan))
    return {read_document(folder / RECORD, Checkpoint).progress.step: folder for folder in found}
