"""A newcomer's first plans by the commands, of the configuration that docs/analytic.md names."""

from pathlib import Path

import pytest
import yaml
from command_calls import call

from shardwright.cli import APP

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config" / "first-plan.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def first_plan(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import first_plan

    def run(program, *arguments):
        assert program == "shardwright"
        called = call(APP, *arguments)
        assert called.exit_code == 0, called.stderr

    monkeypatch.setattr(first_plan, "run", run)
    return first_plan


@pytest.mark.parametrize("name", ["llama3-8b", "llama2-70b", "gpt2-xl"])
def test_a_published_model_is_planned_with_default_keys_and_no_slower_than_by_hand(first_plan, tmp_path, name):
    assert set(CONFIG["searches"][name]) == {"model", "cluster", "global_batch_size"}
    files = first_plan.run_commands(name, CONFIG, tmp_path)
    planned, *by_hand = first_plan.rows(files, first_plan.question_for(name, CONFIG, files.plan.parent))
    limit = CONFIG["node_types"][planned.plan.cluster.nodes[0].node_type]["memory_gib"] * 2**30
    assert planned.estimate.memory_bytes <= limit and len(by_hand) == 5
    fitting = [row for row in by_hand if row.estimate.memory_bytes <= limit]
    assert len(fitting) >= 3
    for row in fitting:
        assert row.estimate.simulated_step_time_s >= planned.estimate.simulated_step_time_s, row.what
    heads = {"gpt2-xl": 25}.get(name, 32)
    assert all(heads % layer.tp_size == 0 for layer in planned.plan.layers)
