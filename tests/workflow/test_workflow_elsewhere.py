"""The workflow with plugins that `make setup` does not install, as docs/containers.md says: executors and storage."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documented import told

ROOT = Path(__file__).parents[2]
PLUGINS = (
    "snakemake-executor-plugin-kubernetes", "snakemake-executor-plugin-kueue", "snakemake-storage-plugin-fs",
)  # fmt: skip
NOWHERE = """apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: none, user: {}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
"""
"""A Kubernetes that is not there: the plugin of kueue reads it when it is imported."""
CALLS = [
    call for call in told("snakemake") if "--executor" in call.words and "--default-storage-provider" in call.words
]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables with an environment that has the plugins beside what is installed here."""
    folder = tmp_path_factory.mktemp("plugins")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "here.pth").write_text(
        "\n".join(path for path in sys.path if "site-packages" in path or "/src" in path)
    )
    pip = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PLUGINS]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("no package index")
    (folder / "kubeconfig").write_text(NOWHERE)
    return {"venv": f"{folder / 'venv/bin'}", "KUBECONFIG": str(folder / "kubeconfig")}


def _snakemake(workspace, environment, *words):
    variables = workspace.environment()
    variables |= environment | {"PATH": f"{workspace.folder / 'bin'}:{environment['venv']}:{os.environ['PATH']}"}
    command = ["python", "-m", "snakemake", *words, "--snakefile", str(ROOT / "Snakefile")]
    return subprocess.run(
        command, cwd=workspace.folder, env=variables, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.skipif(shutil.which("rsync") is None, reason="the plugin fs calls rsync")
def test_all_results_lie_on_storage_but_checkpoints(stubs, environment):
    store = stubs.folder / "store"
    storage = (
        "--default-storage-provider",
        "fs",
        "--default-storage-prefix",
        str(store),
        "--configfile",
        "config.yaml",
    )
    done = _snakemake(stubs, environment, "all", "grid", "--cores", "2", *storage)
    assert done.returncode == 0, done.stderr
    kept = {path.name for path in (store / "results").iterdir()}
    assert {"plans", "profiles", "runs", "data", "report.html", "grid.csv"} <= kept and "checkpoints" not in kept
    assert [path.name for path in (stubs.folder / "results").iterdir()] == ["checkpoints"]
    data = {words[words.index("--data") + 1] for words in stubs.calls() if "--data" in words}
    assert len(data) == 1 and f"{store}/results/data/" in data.pop()
    again = _snakemake(stubs, environment, "all", "grid", "-n", "--cores", "2", *storage)
    assert "Nothing to be done" in again.stdout + again.stderr


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.words[call.words.index("--executor") + 1])
def test_what_the_page_tells_to_type_would_run(bare, environment, call):
    shutil.copytree(ROOT / "config", bare.folder / "config")
    done = _snakemake(bare, environment, "-n", *call.words[1:])
    assert done.returncode == 0, done.stderr
    assert re.search(r"^search +\d+$", done.stdout + done.stderr, re.M)


def test_both_executors_are_told_of():
    assert {call.words[call.words.index("--executor") + 1] for call in CALLS} == {"kubernetes", "kueue"}
