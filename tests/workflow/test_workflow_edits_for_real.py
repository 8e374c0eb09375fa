"""After an edit of a configuration the real commands run that docs/rebuilding.md says, on the demo made small."""

import shutil

import pytest
import yaml
from documented import rebuilding_rows

ROWS = rebuilding_rows()
LIMIT_S = 2400

pytestmark = [pytest.mark.long, pytest.mark.timeout(LIMIT_S)]


def _small(config):
    """The default configuration with as few and as short measurements and runs as there can be."""
    config["clusters"]["laptop"]["hardware_time_budget_s"] = 3
    config["profiles"]["cpu"] |= {"steps": 3, "warmup_steps": 1, "min_time_s": 0.3, "micro_batch_sizes": [2, 16]}
    config["data"]["stdlib"]["max_mib"] = 1
    for run in config["runs"].values():
        run |= {"steps": 3, "warmup_steps": 1, "checkpoint_every": 3}
    config["validate"] |= {"steps": 1, "warmup_steps": 1}


def _make(workspace):
    return workspace.snakemake("all", cores=("--cores", "all"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, workspace_in):
    """A folder in which the small demo was made."""
    workspace = workspace_in(tmp_path_factory.mktemp("made"))
    workspace.configure(_small)
    done = _make(workspace)
    assert done.status == 0, done.output
    return workspace.folder


@pytest.mark.parametrize(("path", "value", "runs"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_an_edit_runs_what_the_page_says_and_then_nothing(made, workspace_in, tmp_path, path, value, runs):
    shutil.copytree(made, tmp_path / "workspace", symlinks=True)
    workspace = workspace_in(tmp_path / "workspace")

    def change(config):
        _small(config)
        *sections, key = path.split(".")
        for name in sections:
            config = config[name]
        assert config.get(key) != yaml.safe_load(value)
        config[key] = yaml.safe_load(value)

    workspace.configure(change)
    done = _make(workspace)
    assert done.status == 0, done.output
    told = (f"{rule} {count}" if count > 1 else rule for rule, count in done.jobs.items())
    assert (", ".join(told) or "nothing") == runs
    assert "Nothing to be done" in _make(workspace).output
