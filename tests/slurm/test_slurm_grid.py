"""A grid of many searches on a real Slurm, as one array of jobs."""

import re
import shutil
import time

import pandas as pd
import pytest
import yaml
from loopback import ROOT, Workspace, slurm

SPACES = ["dp", "zero", "tp", "pp", "dp+tp", "dp+pp", "3d", "full"]
CELLS_OF_A_PART = 64


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
    began = time.monotonic()
    assert workspace.call("results/grids/many.md", "--shardwright-array-jobs", "grid_part") == 0, workspace.said()
    took_s = time.monotonic() - began

    cells = budgets * batches * len(SPACES)
    parts = -(-cells // CELLS_OF_A_PART)
    shown = slurm("squeue", "--noheader", "--array", "--states=all", "--format=%i %T %k").splitlines()
    found = [line for line in shown if "grid_part" in line]
    print(f"{cells} searches in {parts} tasks of an array: {took_s:.0f} s")
    assert len(found) == parts and len({re.match(r"\d+", line)[0] for line in found}) == 1, shown
    assert all(line.split()[1] == "COMPLETED" for line in found)
    table = pd.read_csv(workspace.results / "grids" / "many.csv")
    assert len(table) == cells
