"""The one command: whose commands it has, what it imports for them, and what it says of a stage that is missing."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from command_calls import call

from shardwright import cli
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH
from shardwright_train.cli import APP as TRAIN

STAGES = {"profile": PROFILE, "train": TRAIN}


@pytest.mark.parametrize("name", ["advise", "plan", "rent", "explain", "export"])
def test_a_command_of_the_planner_is_that_of_its_program(name):
    ours, theirs = call(cli.APP, name, "--help"), call(SEARCH, name, "--help")
    assert (
        ours.exit_code == 0
        and ours.stdout.split() == theirs.stdout.replace("shardwright-search", "shardwright").split()
    )


@pytest.mark.parametrize("stage", STAGES)
def test_every_command_of_a_stage_stands_behind_its_name(stage):
    overview = call(cli.APP, stage, "--help")
    assert overview.exit_code == 0
    for name in STAGES[stage].commands:
        assert f"  {stage} {name} " in overview.stdout
        ours, theirs = call(cli.APP, stage, *name.split(), "--help"), call(STAGES[stage], *name.split(), "--help")
        assert ours.stdout.split()[4:] == theirs.stdout.split()[3:] and ours.exit_code == 0
    assert call(cli.APP, stage, "fly").stderr.startswith(f"error: shardwright: there is no command '{stage} fly'")


def test_what_a_command_prints_and_how_it_ends_is_its_own():
    assert call(cli.APP, "profile", "devices").stdout == call(PROFILE, "devices").stdout
    missing = call(cli.APP, "profile", "show", "nowhere.h5")
    assert (missing.exit_code, missing.stderr) == (2, call(PROFILE, "show", "nowhere.h5").stderr)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_not_installed_is_one_line(monkeypatch, stage):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == f"shardwright_{stage}" else find_spec(name))
    asked = call(cli.APP, stage, "run", "plan.json")
    expected = f"there is no package shardwright-{stage}: pip install 'shardwright[train]'"
    assert (asked.exit_code, asked.output) == (2, f"error: shardwright {stage}: {expected}\n")
    overview = call(cli.APP, "--help")
    assert overview.exit_code == 0 and f"  {stage} " not in overview.stdout and "  advise " in overview.stdout


def test_advice_imports_neither_another_stage_nor_torch():
    code = """
import sys
from shardwright.cli import APP
APP.call(["advise", "llama-3-8b", "--gpus", "8:H100", "--time-limit", "60"])
odd = {"torch", "transformers", "shardwright_train", "shardwright_profile", "shardwright_launch"} & sys.modules.keys()
raise SystemExit(", ".join(odd) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and "best plan: " in done.stdout, done.stderr
    assert "batch: 512 samples, about 4 Mi tokens a step as published runs took (--batch)" in done.stdout
    assert "H100: taken for H100-SXM (--gpus)" in done.stdout
