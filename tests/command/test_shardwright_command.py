"""The one command: whose commands it has, what it imports for them, and what it says of a stage that is missing."""

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints, entry_points, version
from pathlib import Path

import pytest
from command_calls import call

from shardwright import cli
from shardwright.command import Command, CommandLine, Options
from shardwright.command.options import options_of
from shardwright.io import BadInput
from shardwright.schema.field_docs import field_docs
from shardwright_profile.cli import APP as PROFILE
from shardwright_search.cli import APP as SEARCH
from shardwright_train.cli import APP as TRAIN

STAGES = {"profile": PROFILE, "train": TRAIN}


@pytest.mark.parametrize("name", SEARCH.commands)
def test_a_command_of_the_planner_needs_no_name_before_it(name):
    ours, theirs = call(cli.APP, *name.split(), "--help"), call(SEARCH, *name.split(), "--help")
    assert ours.exit_code == 0 and ours.stdout == theirs.stdout


@pytest.mark.parametrize("stage", STAGES)
def test_every_command_of_a_stage_comes_after_its_name(stage):
    overview = call(cli.APP, stage, "--help")
    assert overview.exit_code == 0
    for name in STAGES[stage].commands:
        assert f"  {name} " in overview.stdout
        ours, theirs = call(cli.APP, stage, *name.split(), "--help"), call(STAGES[stage], *name.split(), "--help")
        assert ours.stdout == theirs.stdout and ours.exit_code == 0
    told = f"error: shardwright {stage}: there is no command 'fly': see shardwright {stage} --help\n"
    assert call(cli.APP, stage, "fly").stderr == told


def test_each_option_that_says_that_it_is_written_is_known_to_be():
    """Else its file might be another option's, which it would replace."""
    told = re.compile(r"\bto write\b|\binto this file\b")
    for app in (PROFILE, SEARCH, TRAIN):
        for name, command in app.commands.items():
            meanings = field_docs(command.options)
            for option in options_of(command.options):
                if option.type is Path and told.search(meanings.get(option.field, "")):
                    assert option.is_written, (name, option.name)


def test_a_picture_does_not_replace_the_plan_that_it_is_of(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("mine")
    told = f"error: --svg: {plan} is PLAN, too: choose another file\n"
    given = ("--hardware", "h", "--profile", "p", "--svg", plan)
    assert call(SEARCH, "simulate", plan, *given) == (2, "", told) and plan.read_text() == "mine"


def test_the_overview_has_the_commands_of_all_stages():
    overview = call(cli.APP, "--help")
    assert overview.exit_code == 0
    for name in (*SEARCH.commands, *(f"{stage} {name}" for stage in STAGES for name in STAGES[stage].commands)):
        assert f"  {name} " in overview.stdout


def test_version_is_that_of_the_distribution():
    assert call(cli.APP, "--version").stdout == f"shardwright {version('shardwright')}\n"


def test_a_batch_of_a_stage_has_its_commands(tmp_path):
    (tmp_path / "batch").write_text("devices\n")
    assert call(cli.APP, "profile", "batch", tmp_path / "batch").stdout == call(PROFILE, "devices").stdout
    (tmp_path / "batch").write_text("advise llama-3-8b --gpus 0x8:H100\n")
    assert call(cli.APP, "batch", tmp_path / "batch").exit_code == 2


def test_what_a_command_prints_and_how_it_ends_is_its_own():
    assert call(cli.APP, "profile", "devices").stdout == call(PROFILE, "devices").stdout
    missing = call(cli.APP, "profile", "show", "nowhere.h5")
    assert (missing.exit_code, missing.stderr) == (2, call(PROFILE, "show", "nowhere.h5").stderr)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_not_installed_is_one_line(monkeypatch, stage):
    others = EntryPoints(entry for entry in entry_points(group=cli._GROUP) if entry.name != stage)
    monkeypatch.setattr(cli, "entry_points", lambda group: others)
    asked = call(cli.APP, stage, "run", "plan.json")
    expected = f"error: shardwright {stage}: is not installed: pip install shardwright-{stage}\n"
    assert (asked.exit_code, asked.output) == (2, expected)
    overview = call(cli.APP, "--help")
    assert overview.exit_code == 0 and f"  {stage} " not in overview.stdout and "  advise " in overview.stdout


def test_the_core_without_any_stage_has_no_command_and_no_traceback(monkeypatch):
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints())
    assert call(cli.APP, "advise").stderr.startswith("error: shardwright: there is no command 'advise'")
    assert call(cli.APP, "--help").exit_code == 0


def test_a_library_that_is_not_installed_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "needs_much.py").write_text("import torch_of_mars\n")
    monkeypatch.syspath_prepend(tmp_path)
    app = CommandLine("x", "A command.", {"go": Command(Options, "needs_much:go")})
    with pytest.raises(BadInput) as refused:
        app.call(["go"])
    assert str(refused.value) == "torch_of_mars: is not installed: pip install 'shardwright[train]'"


def test_stages_register_by_their_names():
    registered = {entry.name: entry for entry in entry_points(group=cli._GROUP)}
    assert {name: entry.load() for name, entry in registered.items()} == {"search": SEARCH, **STAGES}
    assert isinstance(registered["search"], EntryPoint)


def test_advice_imports_neither_another_stage_nor_torch():
    code = """
import sys
from shardwright.cli import APP
APP.call(["advise", "llama-3-8b", "--gpus", "8:H100", "--time-limit", "60"])
others = "shardwright_train", "shardwright_profile", "shardwright.launch"
odd = {"torch", "transformers", "pandas", "snakemake", *others} & sys.modules.keys()
raise SystemExit(", ".join(odd) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=300)
    assert done.returncode == 0 and " s a step, " in done.stdout, done.stderr
    assert "batch: 512 samples, about 4 Mi tokens a step as published runs took (--batch)" in done.stdout
    assert "H100: taken for H100-SXM (--gpus)" in done.stdout


@pytest.mark.parametrize("module", ["shardwright", "shardwright_profile", "shardwright_search", "shardwright_train"])
def test_help_imports_no_large_library(module):
    """So that it comes at once."""
    code = f"import sys\nfrom {module}.cli import APP\nAPP.call(['--help'])\nprint(*sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "h5py", "torch"} & set(finished.stdout.splitlines()[-1].split())
