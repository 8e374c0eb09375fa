"""The wheels of `make dist` in an environment that holds nothing else."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = (ROOT / "VERSION").read_text().strip()
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NODE = {"device": "cpu", "devices_per_node": 1, "memory_bytes": 2**31}
CLUSTER = {
    "format": "shardwright.cluster",
    "version": 1,
    "name": "one",
    "nodes": [{"node_type": "cpu", "count": 1}],
    "node_types": {"cpu": NODE},
}


def _done(*command, cwd=ROOT):
    done = subprocess.run([*map(str, command)], cwd=cwd, text=True, capture_output=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    _done("make", "dist", f"DIST={folder}")
    return folder


def _installed(package, wheels, folder):
    """Programs of a new environment with a package from wheels, and the pinned libraries from pip's index."""
    _done(sys.executable, "-m", "venv", folder)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _done(*pip, "--constraint", "constraints.txt", "--find-links", wheels, package)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    return _installed("shardwright", wheels, tmp_path_factory.mktemp("empty") / "venv")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_there_is_a_wheel_of_every_package_at_the_one_version(wheels):
    parts = ("_core", "_profile", "_search", "_train", "")
    expected = {f"shardwright{part}-{VERSION}-py3-none-any.whl" for part in parts}
    assert {path.name for path in wheels.iterdir()} == expected


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_planner_alone_is_installed_without_torch_and_advises(installed, tmp_path):
    listed = _done(installed / "pip", "--disable-pip-version-check", "list", "--format", "freeze")
    names = set(re.findall(r"^([\w-]+)==", listed, re.M))
    assert {name for name in names if name.startswith("shardwright")} == {"shardwright"}
    assert not {"torch", "transformers", "snakemake"} & names
    said = _done(installed / "shardwright", "advise", "llama-3.1-8b", "--gpus", "8x8:H100", cwd=tmp_path)
    assert (
        any(f"{kind}: " in said for kind in ("best plan", "simplest plan within 2% of the bound"))
        and "H100: taken for H100-SXM (--gpus)" in said
    )
    assert "batch: 512 samples, about 4 Mi tokens a step as published runs took (--batch)" in said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_only_training_needs_is_asked_for_in_one_line(installed, tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    measuring = ["profile", "hardware", "--cluster", "cluster.json", "--time-budget", "1", "--out", "hardware.h5"]
    for words, told in (
        (measuring, "hardware: torch is not installed here: pip install 'shardwright[profile]'"),
        (["train", "check", "plan.json"], "torch: is not installed: pip install 'shardwright[train]'"),
    ):
        done = subprocess.run([installed / "shardwright", *words], cwd=tmp_path, text=True, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {told}\n")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_stage_is_installed_with_the_core_and_nothing_else(wheels, tmp_path):
    programs = _installed("shardwright-search", wheels, tmp_path / "venv")
    listed = _done(programs / "pip", "--disable-pip-version-check", "list", "--format", "freeze")
    names = set(re.findall(r"^(shardwright[\w-]*)==", listed, re.M))
    assert names == {"shardwright-core", "shardwright-search"}
    said = _done(programs / "shardwright", "advise", "llama-3-8b", "--gpus", "8:H100", cwd=tmp_path)
    assert any(f"{kind}: " in said for kind in ("best plan", "simplest plan within 2% of the bound"))
    done = subprocess.run([programs / "shardwright", "train", "run"], cwd=tmp_path, text=True, capture_output=True)
    told = "error: shardwright train: is not installed: pip install shardwright-train\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_trains_is_installed_and_trains(wheels, tmp_path):
    programs = _installed("shardwright[train]", wheels, tmp_path / "venv")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(TINY))
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    kept = ["--sequence-length", "64", "--out", "model.json"]
    _done(programs / "shardwright", "train", "describe", "tiny", "--name", "tiny", *kept, cwd=tmp_path)
    files = ["--cluster", "cluster.json", "--model", "model.json", "--out", "plan.json"]
    numbers = [word for kind in ("parameters", "compute", "reduce") for word in (f"--precision-{kind}", "float32")]
    sizes = ["--global-batch-size", "4", "--num-microbatches", "2"]
    _done(programs / "shardwright", "uniform", *files, *sizes, *numbers, cwd=tmp_path)
    run = ["plan.json", "--data", "random", "--steps", "2", "--out", "run", "--checkpoints", "checkpoints"]
    _done(programs / "shardwright", "train", "run", *run, cwd=tmp_path)
    assert json.loads((tmp_path / "run/DONE.json").read_text())["steps"] == 2
