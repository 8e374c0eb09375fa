"""The wheels of `make dist` in an environment that holds nothing else."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()


def _done(*command, cwd=ROOT):
    done = subprocess.run([*map(str, command)], cwd=cwd, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    _done("make", "dist", f"DIST={folder}")
    return folder


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """Programs of an environment with the planner from wheels, and the pinned libraries from pip's index."""
    folder = tmp_path_factory.mktemp("empty") / "venv"
    _done(sys.executable, "-m", "venv", folder)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _done(*pip, "--constraint", "constraints.txt", "--find-links", wheels, "shardwright")
    return folder / "bin"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_there_is_a_wheel_of_every_package_at_the_one_version(wheels):
    named = {path.parent.name for path in ROOT.glob("stages/*/pyproject.toml")} | {
        "formats",
        "models",
        "launch",
        "estimate",
    }
    expected = {f"shardwright_{name}-{VERSION}-py3-none-any.whl" for name in named}
    assert {path.name for path in wheels.iterdir()} == expected | {f"shardwright-{VERSION}-py3-none-any.whl"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_planner_alone_is_installed_without_torch_and_advises_in_five_seconds(installed, tmp_path):
    listed = _done(installed / "pip", "--disable-pip-version-check", "list", "--format", "freeze")
    names = set(re.findall(r"^([\w-]+)==", listed, re.M))
    planner = {f"shardwright-{name}" for name in ("formats", "models", "estimate", "search")}
    assert {name for name in names if name.startswith("shardwright")} == planner | {"shardwright"}
    assert not {"torch", "transformers", "snakemake"} & names
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = _done(installed / "shardwright", "advise", "llama-3.1-8b", "--gpus", "8x8:H100", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor: the machine may be shared.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5
    assert "best plan: " in said and "H100: taken for H100-SXM (--gpus)" in said
    assert "batch: 512 samples, about 4 Mi tokens a step as published runs took (--batch)" in said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_only_training_needs_is_asked_for_in_one_line(installed, tmp_path):
    for stage in ("profile", "train"):
        done = subprocess.run([installed / "shardwright", stage, "run"], cwd=tmp_path, text=True, capture_output=True)
        told = f"there is no package shardwright-{stage}: pip install 'shardwright[train]'"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: shardwright {stage}: {told}\n")
