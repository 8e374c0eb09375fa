"""`snakemake reference`: what is imported of published profiles, and in how few processes."""

import shlex
from pathlib import Path

import yaml

from reference import Reference, outputs
from shardwright_profile.cli import APP as PROFILE
from shardwright_train.cli import APP as TRAIN

ROOT = Path(__file__).parents[2]
REFERENCE = Reference(ROOT)
ASKED = yaml.safe_load((ROOT / "config" / "reference" / "reference.yaml").read_text())


def _parsed(app, line):
    """A line's command and the options that it spells."""
    words = shlex.split(line)
    name = next(name for name in app.commands if words[: len(name.split())] == name.split())
    return name, app.commands[name].parse(name, words[len(name.split()) :])


def test_every_line_is_a_command_that_can_be_run():
    assert {_parsed(TRAIN, line)[0] for line in REFERENCE.describe_lines()} == {"describe"}
    imports = [_parsed(PROFILE, line)[0] for line in REFERENCE.import_lines()]
    assert set(imports) == {
        "import galvatron", "import galvatron-hardware", "import fasop", "import fasop-hardware",
    }  # fmt: skip
    fasop = len(ASKED["fasop"]["models"]) * len(ASKED["fasop"]["gpus"])
    assert (imports.count("import galvatron"), imports.count("import fasop")) == (
        len(ASKED["galvatron"]["profiles"]), fasop,
    )  # fmt: skip


def test_what_a_line_reads_was_written_before_it():
    lines = [*REFERENCE.describe_lines(), *REFERENCE.import_lines()]
    written = [*outputs(lines)]
    assert len(written) == len(set(written))
    there = {*REFERENCE.configs()}
    for line in lines:
        for word in shlex.split(line):
            if word.startswith("results/reference/models/") or word.startswith("results/reference/hardware/"):
                assert word in there or f"{word}/config.json" in there or word in outputs([line]), word
        there |= {*outputs([line])}


def test_all_are_made_in_three_jobs_beside_the_small_files(finished):
    asked = finished.snakemake("reference", "-n")
    assert asked.status == 0, asked.output
    assert asked.jobs == {
        "write_reference_config": len(REFERENCE.configs()), "write_reference_commands": 2,
        "reference_sdist": 1, "reference_models": 1, "reference_imports": 1, "reference": 1,
    }  # fmt: skip
