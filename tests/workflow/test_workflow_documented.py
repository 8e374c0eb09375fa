"""Every call of snakemake that the documentation tells to type would run, in a copy of what a clone has."""

import re
import shutil
from pathlib import Path

import pytest
from documented import told
from snakemake.cli import get_argument_parser

ROOT = Path(__file__).parents[2]
CALLS = told("snakemake")
PLUGINS = {"--executor"}
"""What says that a plugin is needed which is not installed here, so that not even its options are known."""
NOT_DRY = PLUGINS | {"--report", "--unlock", "--lint", "--software-deployment-method"}


def _marked(call):
    """The calls with configuration files of their own are tried always, the others where there is time."""
    return pytest.param(call, id=str(call), marks=() if "--configfile" in call.words else pytest.mark.long)


@pytest.mark.parametrize("call", [call for call in CALLS if not PLUGINS & {*call.words}], ids=str)
def test_no_target_is_taken_for_a_configuration(call):
    parsed = get_argument_parser().parse_args(call.words[1:])
    assert {path.suffix for path in parsed.configfile} <= {".yaml"}
    assert all((ROOT / profile / "config.yaml").is_file() for profile in parsed.profile or ())


@pytest.mark.parametrize("call", [_marked(call) for call in CALLS if not NOT_DRY & {*call.words}])
def test_a_call_of_a_page_would_run(bare, call):
    for folder in ("config", "slurm"):
        shutil.copytree(ROOT / folder, bare.folder / folder)
    shutil.copy(ROOT / "config" / "first-plan.yaml", bare.folder / "my.yaml")
    page = (ROOT / "docs" / "training.md").read_text()
    (bare.folder / "fine-tune.yaml").write_text(re.findall(r"As `fine-tune.yaml`:\n\n```yaml\n(.*?)```", page, re.S)[0])
    called = bare.snakemake("-n", *call.words[1:], cores=(), configfile=None)
    assert called.status == 0, called.output
    assert called.jobs


def test_pages_tell_of_calls_with_and_without_a_configuration():
    assert len(CALLS) > 10 and len([call for call in CALLS if "--configfile" in call.words]) >= 3
