import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

# The scripts of the workflow and the samples of these tests are imported by their bare names.
sys.path[:0] = [str(HERE), str(ROOT / "workflow" / "scripts")]


class Called(NamedTuple):
    status: int
    output: str

    @property
    def jobs(self) -> dict[str, int]:
        """Number of jobs by rule, as the table `Job stats` gives them; targets are left out."""
        table = self.output.rpartition("Job stats:\n")[2].partition("total")[0]
        rows = [line.split() for line in table.splitlines()[2:] if line.strip()]
        return {rule: int(count) for rule, count in rows if rule not in ("all", "plans", "profiles", "runs")}


class Workspace:
    """A folder in which the workflow runs over the stub of the stages, with a configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls.jsonl"

    def configure(self, change: Callable[[dict[str, Any]], None] | None = None) -> None:
        config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
        if change is not None:
            change(config)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def snakemake(self, *arguments: str, fails: str = "") -> Called:
        environment = os.environ | {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE),
            "STUB_CALLS": str(self.calls_file),
            "STUB_FAILS": fails,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }
        done = subprocess.run(
            [
                sys.executable, "-m", "snakemake", *arguments, "--snakefile", str(ROOT / "Snakefile"),
                "--configfile", "config.yaml", "--cores", "2", "--quiet", "host",
            ],
            cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=150,
        )  # fmt: skip
        return Called(done.returncode, done.stdout)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


@pytest.fixture(scope="session")
def _finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "bin").mkdir()
    for stage in ("train", "profile", "search"):
        program = folder / "bin" / f"shardwright-{stage}"
        program.write_text(f"#!{sys.executable}\n" + (HERE / "stage_stub.py").read_text())
        program.chmod(0o755)
    workspace = Workspace(folder)
    workspace.configure()
    done = workspace.snakemake("all", "grid")
    assert done.status == 0, done.output
    return folder


@pytest.fixture
def finished(_finished_folder: Path, tmp_path: Path) -> Workspace:
    """A workspace in which the default configuration has run to the end: a copy for each test."""
    folder = tmp_path / "workspace"
    shutil.copytree(_finished_folder, folder, symlinks=True)
    return Workspace(folder)
