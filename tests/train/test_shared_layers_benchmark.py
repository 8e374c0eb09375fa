"""The benchmark of plans that share positions or experts out: its plans, and the figures of its table by hand."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from shardwright.estimate.settings import ProfileSettings
from shardwright.models.context import plan_obstacle
from shardwright.models.description import model_of_config
from shardwright.types import Cluster

ROOT = Path(__file__).resolve().parents[2]
CLOCK = ROOT / "benchmarks" / "shared_parts" / "cpu_clock"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("shared_layers")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["context", "experts"])
def test_its_plans_run_and_its_profile_has_what_prices_them(benchmark: ModuleType, name: str, ranks: int) -> None:
    """The first shares neither positions nor experts out, and its size was profiled; shares of positions were, too."""
    case = benchmark.cases(ranks)[name]
    model = model_of_config(case.config_of(64), name, case.length, "config.json")
    plans = case.plans(model, msgspec.convert(benchmark.cluster_of(ranks), Cluster))
    assert len({plan.name for plan in plans}) == len(plans) > 2
    for plan in plans:
        (layer,) = set(plan.layers)
        assert plan_obstacle(plan) is None
        assert case.length // layer.cp_size in case.lengths
        assert min(case.sizes) <= plan.microbatch_samples // layer.dp_size <= max(case.sizes)
    assert plans[0].layers[0].cp_size == 1 and not plans[0].layers[0].experts
    msgspec.convert(case.settings, ProfileSettings)


def test_a_plan_is_held_against_the_first_turn_by_turn(benchmark: ModuleType) -> None:
    def row(plan: str, predicted_s: float, *rounds: list[float]) -> dict[str, Any]:
        figures = {"predicted_s": predicted_s, "measured_s": [*rounds]}
        return {"plan": plan, **figures, "predicted_bytes": 2**20, "measured_bytes": 2**21}

    rows = [row("dp2", 0.1, [0.1, 0.2], [0.4]), row("cp2", 0.3, [0.2, 0.4], [0.8])]
    first, second = benchmark.table("context", rows).splitlines()[2:]
    assert first == "| dp2 | 100 | 200 | 0.50 | 1.00 | 1.00 | 1.00 | 1.0 | 2.0 | 0.50 |"
    assert second == "| cp2 | 300 | 400 | 0.75 | 3.00 | 2.00 | 1.50 | 1.0 | 2.0 | 0.50 |"


def test_the_clock_of_a_busy_machine_is_that_of_the_process() -> None:
    command = [sys.executable, "-c", "import time; assert time.perf_counter is time.process_time"]
    subprocess.run(command, check=True, timeout=60, env={"PYTHONPATH": str(CLOCK)})
