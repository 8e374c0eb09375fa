"""How many jobs of Slurm a configuration becomes: searches and steps of seconds share jobs."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from slurm_jobs import is_array
from snakemake_executor_plugin_shardwright import ExecutorSettings

ROOT = Path(__file__).parents[2]
GROUP = re.compile(r"\bGroup job (\w+) \(", re.IGNORECASE)


def _groups(workspace, *options):
    """The jobs that would be submitted for groups, by group."""
    if not (workspace.folder / "slurm").exists():
        (workspace.folder / "slurm").symlink_to(ROOT / "slurm")
    done = workspace.snakemake("plans", "-n", "--profile", "slurm", *options, cores=())
    assert done.status == 0, done.output
    return Counter(GROUP.findall(done.output))


@pytest.fixture
def many(bare):
    """A configuration of 40 searches."""

    def change(config):
        search = config["searches"]["roomy"]
        config["searches"] = {f"search-{i}": search | {"global_batch_size": 16 * (1 + i)} for i in range(40)}
        config["runs"], config["validate"]["searches"] = {}, []

    bare.configure(change)
    return bare


def test_many_searches_are_few_jobs_of_slurm(many):
    asked = "--group-components", "search=16", "fit=16"
    assert _groups(many, *asked) == {"describe": 1, "probes": 1, "fit": 1, "search": 3}


def test_a_search_that_fits_nowhere_takes_no_other_with_it_unless_that_is_asked_for(many):
    assert _groups(many) == {"describe": 1, "probes": 1, "fit": 1, "search": 40}


def test_a_corrected_search_is_in_no_job_with_the_one_that_it_learns_from(many):
    config = yaml.safe_load((many.folder / "config.yaml").read_text())
    for name in ("search-1", "search-2"):
        config["searches"][name]["correction"] = "search-0"
    (many.folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert _groups(many, "--group-components", "search=16")["search"] == 3


def test_the_small_files_are_written_where_snakemake_is_called():
    """Each rule says so itself: one that is made of another by `use rule` does not take it over."""
    rules = re.split(r"^(?=(?:use )?rule )", (ROOT / "workflow/rules/documents.smk").read_text(), flags=re.M)[1:]
    assert len(rules) > 10 and all("    localrule: True\n" in rule for rule in rules)


def test_searches_are_an_array_where_slurm_is_asked_for_one():
    """Then they are in no group: Snakemake's plugin submits a group as a job of its own. Dry runs have no settings."""
    settings = ExecutorSettings(status_command="squeue")
    assert not is_array("search", None) and not is_array("search", settings)
    for asked, found in (("search", True), ("run; search", True), ("all", True), ("research,run", False)):
        assert is_array("search", replace(settings, array_jobs=asked)) is found
