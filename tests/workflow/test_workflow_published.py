"""What others ask of the workflow: `snakemake --lint`, the Snakemake Workflow Catalog, an image."""

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from configuration import load_workflow
from configuration_defaults import DEFAULTS, generated
from configuration_types import Configuration
from environments import generated as environments

ROOT = Path(__file__).parents[2]

BARE = """
import sys
sys.modules.update(dict.fromkeys(["msgspec", "h5py", "shardwright", "torch"]))
from snakemake.cli import main
main(sys.argv[1:])
"""
"""Snakemake where nothing of the product and of what it needs can be imported."""


def _bare_snakemake(folder, *arguments):
    command = [sys.executable, "-c", BARE, *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_snakemake_alone_lints_the_rules_and_says_what_jobs_need(tmp_path):
    linted = _bare_snakemake(tmp_path, "--lint")
    assert linted.returncode == 0, linted.stderr
    assert "your workflow is in a good condition" in linted.stderr
    asked = _bare_snakemake(tmp_path, "-n", "--directory", str(tmp_path), "--configfile", "config/config.yaml")
    assert asked.returncode == 2, asked.stderr
    error = asked.stderr.splitlines()[-1]
    assert error == "error: msgspec: is not installed where Snakemake is: make setup, and call .venv/bin/snakemake"


@pytest.mark.long
def test_the_catalogs_lint_and_format_pass_in_an_environment_of_their_own(tmp_path):
    done = subprocess.run([ROOT / ".ci/catalog", tmp_path / "venv"], capture_output=True, text=True, check=False)
    if done.returncode == 69:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "your workflow is in a good condition" in done.stderr


def test_environments_are_what_the_constraints_pin():
    for path, text in environments(ROOT).items():
        assert (ROOT / path).read_text() == text, "run python workflow/environments.py"
        named = yaml.safe_load(text)["dependencies"][-1]["pip"]
        constraints = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
        assert len(named) >= 5 and set(named) <= set(constraints)
        assert (ROOT / path).with_suffix(".post-deploy.sh").is_file()


def test_each_rule_names_an_environment_that_is_there():
    """Of rules with a command; the global one is that of the process in which jobs are planned."""
    text = "".join(path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk")))
    commands = re.findall(r"^    (?:shell|script):", text, re.M)
    named = re.findall(r'^    conda:\n +"../(envs/\w+.yaml)"', text, re.M)
    assert len(named) == len(commands) > 20
    assert {ROOT / "workflow" / name for name in named} == set((ROOT / "workflow/envs").glob("*.yaml"))


def test_the_workflow_catalog_finds_what_it_asks_for():
    """https://snakemake.github.io/snakemake-workflow-catalog, "adding workflows", standardized usage."""
    assert "default_target: True" in (ROOT / "workflow" / "Snakefile").read_text()
    assert list((ROOT / "workflow" / "rules").glob("*.smk"))
    assert all((ROOT / name).stat().st_size > 0 for name in ("LICENSE", "config/README.md"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    assert "snakemake" in readme and "workflow" in readme
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))["usage"]
    assert set(usage["mandatory-flags"]) == {"desc", "flags"}
    assert usage["report"] is True
    assert set(usage["software-stack-deployment"]) == {"conda", "apptainer", "apptainer+conda", "report"}
    assert (ROOT / ".test/config/config.yaml").is_file()


@pytest.mark.long
def test_the_test_that_the_catalog_runs_makes_all_and_a_report():
    """`.test` is a folder to run in: published models on clusters that are estimated. Its report opens offline."""
    with TemporaryDirectory(dir=ROOT) as folder:
        shutil.copytree(ROOT / ".test/config", Path(folder) / "config")
        command = ["snakemake", "--cores", "2", "--directory", folder, "--snakefile", "workflow/Snakefile"]
        for further in ([], ["--report", "report.html"]):
            done = subprocess.run([*command, *further], cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        page = (Path(folder) / "report.html").read_text()
        for caption in ("What was planned, predicted and measured", "Time and memory of the layers of gpt2-xl"):
            assert caption in page


def test_the_image_takes_what_the_clone_has():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [source for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for source in line.split()]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert 'RUN .ci/venv .venv "$TORCH_INDEX"\n' in text
    assert {"pyproject.toml", "README.md", "VERSION", "core", "stages"} <= set(copied), (
        "what the distribution is made of"
    )


def test_a_release_is_of_the_version_that_all_files_name(tmp_path):
    """`.ci/release` in a copy, with the changelog of a release and without."""
    version = (ROOT / "VERSION").read_text().strip()
    for name in (".ci/release", "VERSION", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        f"# Changelog\n\n## [1.0]\nfirst\n\n## [{version}] - 2026-12-01\n### Said\n- this\n\n## [0.0.1]\nlast\n"
    )

    def notes(tag):
        return subprocess.run([tmp_path / ".ci/release", "notes", tag], capture_output=True, text=True, check=False)

    assert (notes(f"v{version}").returncode, notes(f"v{version}").stdout.strip()) == (0, "### Said\n- this")
    assert "VERSION" in notes("v9").stderr
    changelog.write_text("# Changelog\n\n## [Unreleased]\n- this\n")
    assert "CHANGELOG.md: has no part" in notes(f"v{version}").stderr
    (tmp_path / "CITATION.cff").write_text("version: 9\n")
    assert "CITATION.cff" in notes(f"v{version}").stderr


def test_what_github_runs_is_there():
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert set(workflows["ci"]["jobs"]) == {"format", "lint", "test", "long"}
    parts = set(re.findall(r"^        (\w+)\)", (ROOT / ".ci/run").read_text(), re.M))
    jobs = [job for flow in workflows.values() for job in flow["jobs"].values()]
    steps = " ".join(step.get("run", "") + "\n" for job in jobs for step in job["steps"])
    called = {part for words in re.findall(r"\.ci/run ([\w ]+)", steps) for part in words.split()}
    assert called == parts == {"format", "lint", "test", "report", "long"}
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["authors"] == [{"name": "Shardwright"}] and cited["version"] == (ROOT / "VERSION").read_text().strip()


def test_every_key_and_its_default_are_those_of_the_types():
    """A configuration in which all of them are written out means what the one does that leaves them out."""
    assert (ROOT / DEFAULTS).read_text(encoding="utf-8") == generated(), "run python workflow/configuration_defaults.py"
    defaults = yaml.safe_load(generated())
    config = yaml.safe_load((ROOT / "config/config.yaml").read_text(encoding="utf-8"))
    written = copy.deepcopy(config)
    for section in ("node_types", "models", "searches", "runs"):
        for entry in written[section].values():
            stated = {key: value for key, value in defaults[section]["NAME"].items() if value != "required"}
            entry |= {key: value for key, value in stated.items() if key not in entry}
    assert load_workflow(written, "config.yaml").sections == load_workflow(config, "config.yaml").sections
    assert set(defaults) == set(Configuration.__struct_fields__)
