"""What a grid of 1,000 searches costs beside the searches: until the first begins, and a cell.

    python benchmarks/grid_overhead.py [--work DIR] [--budgets 10] [--cores 1] [--out FILE.json]

A grid of its own, in a copy of the workflow: a small Llama on two clusters of 8 GPUs, `--budgets` memory budgets, 10
batch sizes, 5 search spaces, so that 10 budgets are 1,000 cells. Its profiles are estimated, nothing is downloaded or
measured, and all that comes before the searches is part of the start. Snakemake runs it to its table, on one core, so
that all that it does adds up; then once more, when every answer is known. The searches' own time is what the commands
say of each cell; reading, writing and the table are overhead.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from shardwright_formats.io.versions import versions_text

ROOT = Path(__file__).resolve().parents[1]
SPACES = ("dp", "zero", "tp", "dp+pp", "full")
BATCHES = tuple(range(16, 176, 16))
_CELL = re.compile(r"^\d+ of \d+ \S+ in ([\d.]+) s, at most \d+ s left$", re.M)
_POLL_S = 0.05


class Ran(NamedTuple):
    """A call of Snakemake."""

    wall_s: float
    cpu_s: float
    """Of Snakemake and all its jobs."""
    first_s: float | None
    """Until the first search began."""
    searches_s: float
    num_searches: int
    shows_progress: bool


def main() -> None:
    """Run, print, keep."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--work", type=Path, help="new folder to run in; a temporary one if left out")
    options.add_argument("--budgets", type=int, default=10, help="memory budgets; 100 cells each")
    options.add_argument("--cores", type=int, default=1)
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/grid-overhead.json")
    given = options.parse_args()
    with TemporaryDirectory() as scratch:
        found = measured(given.work or Path(scratch) / "grid", given.budgets, given.cores)
    print(json.dumps(found, indent=1))
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measured(work: Path, budgets: int, cores: int) -> dict[str, Any]:
    """Times in s: of the first call, and of one whose answers are all known."""
    cells = _prepared(work, budgets)
    first = _ran(work, cores)
    shutil.rmtree(work / "results/grids/many")
    (work / "results/grids/many.md").unlink()
    known = _ran(work, cores)
    if first.num_searches != cells or known.num_searches:
        sys.exit(f"{first.num_searches} of {cells} cells were searched, {known.num_searches} of the known ones again")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions_text(("snakemake",), on_gpu=False),
        "cores": cores,
        "cells": cells,
        "until_the_first_search_s": first.first_s,
        "whole_s": first.wall_s,
        "whole_cpu_s": first.cpu_s,
        "searches_s": first.searches_s,
        "overhead_of_a_cell_s": (first.wall_s - first.searches_s) / cells,
        "shows_progress_and_time_left": first.shows_progress,
        "whole_with_known_answers_s": known.wall_s,
        "whole_with_known_answers_cpu_s": known.cpu_s,
        "known_cell_s": known.wall_s / cells,
    }


def _prepared(work: Path, budgets: int) -> int:
    """Write the workflow's copy, its configuration and the grid; returns the number of cells."""
    for name in ("workflow", "profiles", "config/models", "config/reference"):
        shutil.copytree(ROOT / name, work / name)
    shutil.copy(ROOT / "Snakefile", work / "Snakefile")
    node = {"devices_per_node": 8, "memory_gib": 79.1}
    clusters = {"h100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB"}
    estimated = {
        "source": "analytic", "tp_sizes": [1, 2, 4, 8], "sequence_parallel": ["none"], "recompute": ["none", "full"],
        "micro_batch_sizes": [1, 2, 4, 8, 16, 32],
        "precision": {"parameters": "float32", "compute": "bfloat16", "reduce": "float32"},
    }  # fmt: skip
    config = {
        "node_types": {name: node | {"device": device} for name, device in clusters.items()},
        "clusters": {name: {"nodes": [{"node_type": name, "count": 1}], "hardware": "analytic"} for name in clusters},
        "models": {"small": {"preset": "llama-7b", "profile": "estimated", "num_hidden_layers": 4}},
        "profiles": {"estimated": estimated},
        "data": {}, "searches": {}, "runs": {}, "validate": {"searches": [], "steps": 1, "warmup_steps": 1},
    }  # fmt: skip
    grid = {
        "profiles": "own", "models": {"small": {"clusters": list(clusters)}},
        "memory_gib": [16 + 4 * number for number in range(budgets)], "global_batch_size": list(BATCHES),
        "spaces": list(SPACES), "search": {"num_microbatches": [1, 2, 4]},
    }  # fmt: skip
    for path, content in (("config/config.yaml", config), ("config/grids/many.yaml", grid)):
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return len(clusters) * budgets * len(BATCHES) * len(SPACES)


def _ran(work: Path, cores: int) -> Ran:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    logs = work / "results/logs/grids/many"
    shutil.rmtree(logs, ignore_errors=True)
    command = ["snakemake", "results/grids/many.md", "--cores", str(cores)]
    begun, cpu_s, seen = time.monotonic(), _cpu_of_children_s(), None
    with (work / "snakemake.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=log)
        while process.poll() is None:
            if seen is None and (took := _took(logs)):
                seen = time.monotonic() - begun - took[0]
            time.sleep(_POLL_S)
    wall_s = time.monotonic() - begun
    if process.returncode:
        sys.exit(f"snakemake ended with {process.returncode}:\n{(work / 'snakemake.log').read_text()[-4000:]}")
    took = _took(logs)
    return Ran(wall_s, _cpu_of_children_s() - cpu_s, seen, sum(took), len(took), bool(took))


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _took(logs: Path) -> list[float]:
    """Seconds of every search, as the commands have said so far."""
    said = (path.read_text(encoding="utf-8") for path in sorted(logs.glob("*@*.log")))
    return [float(found) for text in said for found in _CELL.findall(text)]


if __name__ == "__main__":
    main()
