"""`make gpu` on a machine without a GPU: what it says there, what it keeps, and its parts at a tiny size."""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwright_formats.io import RunFailed
from shardwright_formats.types import Schedule, SequenceParallel
from shardwright_train.parallel.world import World

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu():
    """`benchmarks/gpu.py`, whose parts lie beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu")


@pytest.fixture
def setting(gpu, tmp_path):
    return gpu.setting_of_rehearsal(tmp_path)


@pytest.fixture
def world(one_rank):
    return World(0, 1, torch.device("cpu"), "gloo", SimpleNamespace(begin=lambda where: None))


def _call(gpu, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, arguments)])
    try:
        gpu.main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(gpu, monkeypatch, tmp_path, capsys):
    assert _call(gpu, monkeypatch, "--out", tmp_path / "out", "--work", tmp_path / "work") == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: this machine: no NVIDIA GPU ") and said.err.count("\n") == 1
    assert said.out == "" and list(tmp_path.iterdir()) == []


def test_an_unknown_part_is_named(gpu, monkeypatch, tmp_path, capsys):
    assert _call(gpu, monkeypatch, "speed", "--rehearse", tmp_path) == 2
    assert "no 'speed'" in capsys.readouterr().err


def test_a_second_start_goes_on_where_the_first_was_cut(gpu, monkeypatch, tmp_path, capsys):
    done = []

    def run_part(part, setting):
        done.append(part.name)
        if len(done) == 2:
            raise RunFailed("cut")
        return {"rows": {}} if part.name == "parity" else {"rows": [], "waits": [], "constant": True}

    monkeypatch.setattr(gpu, "run_part", run_part)
    command = ("parity", "synchronisations", "--rehearse", tmp_path)
    assert _call(gpu, monkeypatch, *command) == 4
    assert done == ["parity", "synchronisations"]
    assert _call(gpu, monkeypatch, *command) == 0
    assert done == ["parity", "synchronisations", "synchronisations"]
    (page,) = tmp_path.glob("gpu-rehearsal-on-cpu-*.md")
    text = page.read_text()
    assert text.startswith("# Rehearsal on cpu: no result")
    assert all("(rehearsal on cpu)" in line for line in text.splitlines() if line.startswith("## "))
    whole = json.loads(page.with_suffix(".json").read_bytes())
    assert (whole["what"], list(whole["parts"])) == ("rehearsal on cpu", ["parity", "synchronisations"])


def test_what_was_found_with_other_sources_or_versions_is_found_again(gpu, setting, monkeypatch):
    record, settings = importlib.import_module("gpu_parts.record"), importlib.import_module("gpu_parts.setting")
    record.keep(setting, "parity", {"rows": {}}, 1.0)
    assert record.kept(setting, "parity")["result"] == {"rows": {}}
    monkeypatch.setattr(settings, "_sources_sha256", lambda: "others")
    assert record.kept(setting, "parity") is None


def test_every_part_has_a_module_that_runs_it_and_tells_of_it(gpu):
    for part in gpu.PARTS.values():
        module = importlib.import_module(f"gpu_parts.{part.module}")
        assert callable(module.lines)
        assert callable(module.of_commands if part.ranks is None else module.of_rank)
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= 45 * 60


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_tried_over_nccl_is_one_step_in_many_ways(gpu, setting, ranks):
    smoke, parity = (importlib.import_module(f"gpu_parts.{name}") for name in ("smoke", "parity"))
    bench = importlib.import_module("gpu_parts.workbench")
    model = bench.described(parity.configuration("llama", 32, 4, 61, 16), "smoke", 16)
    plans = smoke.plans_of(setting, model, ranks)
    assert {(plan.world_size, plan.global_batch_size) for plan in plans.values()} == {(ranks, 15 * ranks)}
    assert {plan.schedule for plan in plans.values()} == set(Schedule)
    assert {plan.layers[0].sequence_parallel for plan in plans.values()} == set(SequenceParallel)


def test_five_families_agree_with_stock_transformers(gpu, setting, world):
    result = importlib.import_module("gpu_parts.parity").of_rank(setting, world)
    assert len(result["rows"]) == 10
    assert [name for name, row in result["rows"].items() if not row["agrees"]] == []


def test_a_gradient_off_by_a_thousandth_is_seen(gpu, setting, world, monkeypatch):
    parity = importlib.import_module("gpu_parts.parity")
    monkeypatch.setattr(parity, "FAMILIES", ("llama",))
    right = parity._gradients_of
    monkeypatch.setattr(parity, "_gradients_of", lambda engine: {n: g * 1.001 for n, g in right(engine).items()})
    rows = parity.of_rank(setting, world)["rows"]
    assert not rows["llama float32"]["agrees"]


def test_synchronisations_are_counted(gpu, setting, world, monkeypatch):
    part = importlib.import_module("gpu_parts.synchronisations")
    found = part.of_rank(setting, world)
    assert found["constant"]
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 0 * float(x.detach().flatten()[0]))
    assert not part.of_rank(setting, world)["constant"]


def test_the_plain_loop_does_the_same_work(gpu, setting, world, monkeypatch):
    part = importlib.import_module("gpu_parts.throughput")
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # which takes a minute
    rows = part.of_rank(setting, world)["rows"]
    losses = [row["loss"] for row in rows]
    assert len(losses) == 4
    assert max(losses) - min(losses) < 0.01 and math.isclose(losses[0], math.log(61), rel_tol=0.05)
