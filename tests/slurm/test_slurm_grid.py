"""A grid of many searches on a real Slurm, as one array of jobs."""

import re
import shutil
import time
from collections import Counter

import pandas as pd
import pytest
import yaml
from loopback import ROOT, Workspace, slurm

from grids import CELLS_OF_A_PART

SPACES = ["dp", "zero", "tp", "pp", "dp+tp", "dp+pp", "3d", "full"]
LIMIT_MIN = 60
"""What this Slurm gives a job at most."""


def _jobs():
    """Number, state and comment of each task that this Slurm has had."""
    return slurm("squeue", "--noheader", "--array", "--states=all", "--format=%i %T %k").splitlines()


@pytest.mark.parametrize("budgets, batches", [(3, 6), pytest.param(15, 9, marks=pytest.mark.long)])
def test_the_searches_of_a_grid_are_one_array_of_jobs(idle, tmp_path, budgets, batches):
    """Nothing is measured: the hardware and the model are analytic."""
    workspace = Workspace(tmp_path)
    shutil.copy(ROOT / "config" / "first-plan.yaml", tmp_path / "config.yaml")
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    (tmp_path / "grids").mkdir()
    grid = {
        "profiles": "own",
        "memory_gib": [8 + number for number in range(budgets)],
        "global_batch_size": [32 * number for number in range(1, batches + 1)],
        "spaces": SPACES,
        "models": {"gpt2-xl": {"clusters": ["v100x8"]}},
    }
    (tmp_path / "grids" / "many.yaml").write_text(yaml.safe_dump(grid))
    assert workspace.call("results/plans/gpt2-xl.json") == 0, workspace.said()  # the profiles, which are other jobs
    earlier = _jobs()
    began = time.monotonic()
    options = ("--shardwright-array-jobs", "grid_part", "--set-resources", f"grid_searches:runtime={LIMIT_MIN}")
    assert workspace.call("results/grids/many.md", *options, at_most_s=900) == 0, workspace.said()
    took_s = time.monotonic() - began

    cells = budgets * batches * len(SPACES)
    parts = -(-cells // CELLS_OF_A_PART)
    shown = _jobs()
    found = [line for line in shown if "grid_part" in line and line not in earlier]
    print(f"{cells} searches in {parts} tasks of an array: {took_s:.0f} s")
    # What is ready first may be submitted by itself.
    arrays = Counter(re.match(r"\d+", line)[0] for line in found)
    assert len(found) == parts and max(arrays.values()) >= parts - 1, shown
    assert all(line.split()[1] == "COMPLETED" for line in found)
    table = pd.read_csv(workspace.results / "grids" / "many.csv")
    assert len(table) == cells
