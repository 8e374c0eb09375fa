"""A Slurm on loopback for the session, and folders in which the workflow runs on it."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import HERE, NODES, ROOT, Workspace, slurm, until


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The Slurm that all tests share."""
    folder = tmp_path_factory.mktemp("slurm")
    subprocess.run([HERE / "loopback.sh", "up", str(folder), str(NODES)], check=True, timeout=600)
    yield
    subprocess.run([HERE / "loopback.sh", "down", str(folder)], check=True, timeout=300)


@pytest.fixture
def idle(cluster: None) -> None:
    """All nodes are up and no job is there: one that a failed test has left is cancelled."""
    for node in range(1, NODES + 1):
        subprocess.run(["scontrol", "update", f"nodename=n{node}", "state=resume"], capture_output=True, check=False)
    slurm("scancel", "--user=root")
    until(lambda: not slurm("squeue", "--noheader"), "no job is left of the test before")


@pytest.fixture(scope="session")
def chain(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A folder in which the chain has run from the hardware profile to the trained model."""
    workspace = Workspace(tmp_path_factory.mktemp("chain"))
    (workspace.folder / "slurm").symlink_to(ROOT / "slurm")
    workspace.configure()
    assert workspace.call("runs", at_most_s=900) == 0, workspace.said()
    return workspace


@pytest.fixture
def planned(chain: Workspace, idle: None, tmp_path: Path) -> Workspace:
    """A copy of it whose run is yet to begin."""
    folder = tmp_path / "workspace"
    shutil.copytree(chain.folder, folder, symlinks=True)
    for part in ("runs", "checkpoints"):
        shutil.rmtree(folder / "results" / part, ignore_errors=True)
    return Workspace(folder)
