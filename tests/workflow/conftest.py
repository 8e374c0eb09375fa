import fcntl
import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import snakemake.cli
import yaml

from configuration import load_workflow
from configuration_normal import folder_of_data, folder_of_run
from configuration_types import Configuration

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
        targets = re.compile("all|plans|profiles|runs|train")
        return {rule: int(count) for rule, count in rows if not targets.fullmatch(rule)}


@cache
def _imported() -> None:
    """Import what Snakemake imports as it starts, so that each child has it."""
    importlib.import_module("smart_open")
    snakemake.cli.get_argument_parser()


def _forked(command: list[str], folder: Path, environment: dict[str, str]) -> Called:
    """Run snakemake in a child that has it imported already, which saves most of the time of a dry run."""
    _imported()
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

    def run(self, name: str) -> str:
        """The folder of a run in the folders of runs and checkpoints, as it is configured."""
        return folder_of_run(self._settings(), name)

    def data(self, name: str) -> str:
        """The folder of data in the folder of all data, as they are configured."""
        return folder_of_data(self._settings(), name)

    def _settings(self) -> Configuration:
        config = yaml.safe_load((self.folder / "config.yaml").read_text())
        return load_workflow(config, "config.yaml").settings

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
    """A configured workspace in which a stub stands for the program."""
    (folder / "bin").mkdir()
    program = folder / "bin/shardwright"
    program.write_text(f"#!{sys.executable}\n" + (HERE / "stage_stub.py").read_text())
    program.chmod(0o755)
    workspace = Workspace(folder)
    workspace.configure()
    return workspace


@pytest.fixture(scope="session")
def _finished_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the default configuration has run to the end: made by one process of a session for all."""
    begun = tmp_path_factory.mktemp("begun") / "workspace"
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with (shared / "finished.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "finished").exists():
            begun.mkdir()
            done = stubbed(begun).snakemake("all", "grid")
            assert done.status == 0, done.output
            begun.rename(shared / "finished")
    return shared / "finished"


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
    """A workspace in which nothing was made yet, and a stub stands for the program."""
    return stubbed(tmp_path)


@pytest.fixture
def bare(tmp_path: Path) -> Workspace:
    """A workspace in which nothing was made yet, without the stub: for what runs no job."""
    return Workspace(tmp_path)
