"""What others ask of the workflow: `snakemake --lint`, the Snakemake Workflow Catalog, an image."""

import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

ROOT = Path(__file__).parents[2]

_ACCEPTED = "Specify a conda environment or container for each rule."
"""Where the configuration names no image: rules run in the environment that Snakemake itself runs in."""


@pytest.mark.parametrize("file", ["config.yaml", "first-plan.yaml"])
def test_without_an_image_lint_says_that_of_every_rule_and_nothing_else(bare, file):
    bare.configure(file=file)
    said = bare.snakemake("--lint").output
    messages = re.findall(r"^    \* (.+?):?$", said, re.MULTILINE)
    assert set(messages) == {_ACCEPTED}, said
    rules = set(re.findall(r"^Lints for (.*) \(line", said, re.MULTILINE))
    assert len(messages) == len(rules) and {"rule search", "rule write_cluster", "rule grid_table"} <= rules


@pytest.mark.parametrize("file", ["config.yaml", "first-plan.yaml"])
def test_with_an_image_lint_has_nothing_to_say(bare, file):
    bare.configure(lambda config: config.update(container="shardwright.sif"), file)
    linted = bare.snakemake("--lint")
    assert linted.status == 0
    assert "your workflow is in a good condition" in linted.output, linted.output


def test_the_workflow_catalog_finds_what_it_asks_for():
    """https://snakemake.github.io/snakemake-workflow-catalog, "adding workflows", standardized usage."""
    assert "default_target: True" in (ROOT / "workflow" / "Snakefile").read_text()
    assert list((ROOT / "workflow" / "rules").glob("*.smk"))
    assert all((ROOT / name).stat().st_size > 0 for name in ("LICENSE", "config/README.md"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8").lower()
    assert "snakemake" in readme and "workflow" in readme
    usage = yaml.safe_load((ROOT / ".snakemake-workflow-catalog.yml").read_text(encoding="utf-8"))["usage"]
    assert set(usage["mandatory-flags"]) == {"desc", "flags"}
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
