import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import snakemake.cli
import yaml

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


class Called(NamedTuple):
    status: int
    output: str

    @property
    def jobs(self) -> dict[str, int]:
        """Number of jobs by rule, as the table `Job stats` gives them; targets are left out."""
        _, found, table = self.output.rpartition("Job stats:\n")
        table = table.partition("total")[0] if found else ""
        rows = [line.split() for line in table.splitlines()[2:] if line.strip()]
        return {rule: int(count) for rule, count in rows if rule not in ("all", "plans", "profiles", "runs")}


def _forked(command: list[str], folder: Path, environment: dict[str, str]) -> Called:
    """Run snakemake in a child that has it imported already, which saves most of the time of a dry run."""
    output = folder / "output.txt"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with output.open("w", encoding="utf-8") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            os.chdir(folder)
            os.environ.update(environment | {"SNAKEMAKE_PID": str(os.getpid())})
            sys.argv = command
            snakemake.cli.main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return Called(os.waitstatus_to_exitcode(status), output.read_text(encoding="utf-8"))


class Workspace:
    """A folder in which the workflow runs over the stub of the stages, with a configuration of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls.jsonl"

    def configure(self, change: Callable[[dict[str, Any]], None] | None = None, file: str = "config.yaml") -> None:
        config = yaml.safe_load((ROOT / "config" / file).read_text())
        if change is not None:
            change(config)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    def environment(self, fails: str = "", stops: str = "", kills: str = "") -> dict[str, str]:
        return os.environ | {
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(HERE),
            "STUB_CALLS": str(self.calls_file),
            "STUB_FAILS": fails,
            "STUB_STOPS": stops,
            "STUB_KILLS": kills,
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    def snakemake(
        self,
        *arguments: str,
        fails: str = "",
        stops: str = "",
        kills: str = "",
        cores: tuple[str, ...] = ("--cores", "2"),
        root: Path = ROOT,
        configfile: str | None = "config.yaml",
    ) -> Called:
        configured = [] if configfile is None else ["--configfile", configfile]
        command = [
            "snakemake", *arguments, "--snakefile", str(root / "Snakefile"), *configured,
            *cores, "--quiet", "host",
        ]  # fmt: skip
        return _forked(command, self.folder, self.environment(fails, stops, kills))

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]


def stubbed(folder: Path) -> Workspace:
    """A configured workspace in which stubs stand for the stages' programs."""
    (folder / "bin").mkdir()
    for stage in ("train", "profile", "search"):
        program = folder / "bin" / f"shardwright-{stage}"
        program.write_text(f"#!{sys.executable}\n" + (HERE / "stage_stub.py").read_text())
        program.chmod(0o755)
    workspace = Workspace(folder)
    workspace.configure()
    return workspace


@pytest.fixture(scope="session")
def _finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    workspace = stubbed(folder)
    done = workspace.snakemake("all", "grid")
    assert done.status == 0, done.output
    return folder


@pytest.fixture
def finished(_finished_folder: Path, tmp_path: Path) -> Workspace:
    """A workspace in which the default configuration has run to the end: a copy for each test."""
    folder = tmp_path / "workspace"
    shutil.copytree(_finished_folder, folder, symlinks=True)
    return Workspace(folder)


@pytest.fixture(scope="session")
def workspace_in() -> type[Workspace]:
    """What makes a workspace in a folder, for fixtures that serve a file."""
    return Workspace


@pytest.fixture
def stubs(tmp_path: Path) -> Workspace:
    """A workspace in which nothing was made yet, and stubs stand for the stages' programs."""
    return stubbed(tmp_path)


@pytest.fixture
def bare(tmp_path: Path) -> Workspace:
    """A workspace in which nothing was made yet, without the stub: for what runs no job."""
    return Workspace(tmp_path)
