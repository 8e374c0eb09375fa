"""The GPU kit on a machine without a GPU: what it says there, what it keeps, and rows of it at a tiny size."""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from shardwright.io import write_document
from shardwright.types import Schedule, SequenceParallel
from shardwright_train.dry_run import check_roles
from shardwright_train.models.base import family_named
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setting(gpu_kit, tmp_path):
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "predictions.json").write_text(json.dumps({"device": "cpu", "plans": {}}))
    return gpu_kit("setting").setting_of_rehearsal(tmp_path / "work", carried)


@pytest.fixture
def world(one_rank):
    return World(0, 1, torch.device("cpu"), "gloo", SimpleNamespace(begin=lambda where: None))


@pytest.fixture
def kit(gpu_kit, setting, monkeypatch, tmp_path):
    """The kit's command, in a rehearsal of steps of a made-up module; `of.rows` are its rows."""
    of = SimpleNamespace(rows=[], lines=lambda rows: [f"{len(rows)} rows"])
    monkeypatch.setitem(sys.modules, "gpu_kit.made_up", SimpleNamespace(rows=lambda *_: of.rows, lines=of.lines))
    main = gpu_kit("kit")
    steps = {name: gpu_kit("steps").Step(name, f"Step {name}", "made_up", 0.5, 0.1) for name in ("A", "B")}
    monkeypatch.setattr(main, "STEPS", steps)
    (tmp_path / "carried" / "rehearsal").symlink_to(setting.carried)

    def run(*arguments):
        given = ["--out", tmp_path / "out", "--work", tmp_path / "work", "--carried", tmp_path / "carried"]
        monkeypatch.setattr(sys, "argv", ["kit", *map(str, (*given, *arguments))])
        try:
            main.main()
        except SystemExit as ended:
            return ended.code
        return 0

    run.row = lambda name, do: of.rows.append(gpu_kit("rows").Row(name, do))
    run.report = lambda: (tmp_path / "out" / "report.md").read_text()
    run.results = lambda: json.loads((tmp_path / "out" / "results.json").read_bytes())
    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(kit, tmp_path, capsys):
    assert kit() == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: this machine: no NVIDIA GPU ") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_was_not_prepared_or_for_another_device_is_one_line(kit, setting, capsys):
    (setting.carried / "predictions.json").write_text(json.dumps({"device": "NVIDIA H200", "plans": {}}))
    assert kit("--rehearse") == 2
    assert "is for NVIDIA H200, this is cpu: run make gpu" in capsys.readouterr().err
    (setting.carried / "predictions.json").unlink()
    assert kit("--rehearse") == 2
    assert "predictions.json: is not there: run make gpu-kit first" in capsys.readouterr().err


def test_a_row_that_fails_loses_no_other_and_is_tried_again(kit):
    tries = []

    def fails_once():
        tries.append(1)
        if len(tries) <= 2:  # in both steps
            raise ValueError("no such operator")
        return {"value": 2}

    kit.row("first", lambda: {"value": 1})
    kit.row("odd", fails_once)
    kit.row("ends", lambda: sys.exit("a command ended with 4") if len(tries) <= 2 else {"value": math.inf})
    assert kit("--rehearse") == 4
    failed = kit.report().partition("FAILED ROWS:\n")[2]
    assert failed.startswith(
        "- A: odd: ValueError: no such operator\n- A: ends: it ended with a command ended with 4\n"
    )
    assert kit.results()["steps"]["A"]["rows"]["first"]["value"] == 1
    assert kit("--rehearse") == 0
    assert len(tries) == 4
    assert kit.report().endswith("FAILED ROWS:\n- none\n\nNOT REACHED:\n- none\n")
    assert kit.report().startswith("# Rehearsal on cpu: no result\n")
    assert kit.results()["steps"]["B"]["rows"]["ends"]["value"] == "inf"


def test_rows_that_there_was_no_time_for_are_named_and_one_that_takes_too_long_is_ended(kit):
    def forever():
        signal.pause()

    kit.row("forever", forever)
    kit.row("late", lambda: {})
    assert kit("--rehearse", "--limit", "30", "--only", "A") == 4
    row = kit.results()["steps"]["A"]["rows"]["forever"]
    assert row["error"].startswith("RowTimedOut: it took longer than ")
    assert kit.report().endswith("NOT REACHED:\n- A: late\n")


def test_a_table_that_cannot_be_made_loses_no_row(kit, monkeypatch):
    kit.row("one", lambda: {"value": 1})
    monkeypatch.setattr(sys.modules["gpu_kit.made_up"], "lines", lambda rows: rows["two"])
    assert kit("--rehearse", "--only", "A") == 0
    assert "These rows cannot be told: KeyError: 'two'" in kit.report()
    assert kit.results()["steps"]["A"]["rows"]["one"]["value"] == 1


def test_a_kit_that_is_told_to_end_ends_and_keeps_what_was_found(kit):
    kit.row("one", lambda: {"value": 1})
    kit.row("two", lambda: sys.exit(143))
    assert kit("--rehearse") == 143
    assert list(kit.results()["steps"]["A"]["rows"]) == ["one"]


def test_what_was_found_with_other_sources_is_found_again(kit, gpu_kit, monkeypatch):
    done = []
    kit.row("one", lambda: done.append(1) or {})
    assert kit("--rehearse", "--only", "A") == kit("--rehearse", "--only", "A") == 0
    assert len(done) == 1
    monkeypatch.setattr(gpu_kit("setting"), "_sources_sha256", lambda: "others")
    assert kit("--rehearse", "--only", "A") == 0
    assert len(done) == 2


def test_every_step_lists_its_rows_and_reports_on_any_of_them(gpu_kit, setting):
    steps = gpu_kit("steps").STEPS.values()
    # What is worth most is reached whatever the rest takes.
    assert sum(step.at_most_s for step in list(steps)[:4]) < gpu_kit("kit")._LIMIT_S
    names = []
    for step in steps:
        with ExitStack() as stack:
            rows = gpu_kit(step.module).rows(setting, stack)
        assert len({row.name for row in rows}) == len(rows)
        names += [row.name for row in rows]
        assert all(isinstance(line, str) for line in gpu_kit(step.module).lines({}))
    families = {name.split(" ")[0] for name in names if name.endswith(" selective")}
    assert families == set(gpu_kit("configurations").FAMILIES) and len(families) == 13


def test_a_cut_leaves_what_was_found_packed(tmp_path):
    """`run.sh` without what was prepared still ends in the code of the kit, and packs its work."""
    environment = os.environ | {"OUT": str(tmp_path / "out"), "KIT_WORK": str(tmp_path / "work")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = ["bash", ROOT / "benchmarks" / "gpu_kit" / "run.sh", "--rehearse", "--carried", tmp_path / "none"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "predictions.json: is not there" in (tmp_path / "out" / "log.txt").read_text()
    assert (tmp_path / "out" / "everything.tgz").is_file()


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_tried_over_nccl_is_one_step_in_many_ways(gpu_kit, setting, ranks):
    model = gpu_kit("workbench").described(gpu_kit("configurations").configuration("llama", 32, 4, 61, 16), "test", 16)
    plans = gpu_kit("several").plans_of(setting, model, ranks)
    assert {(plan.world_size, plan.global_batch_size) for plan in plans.values()} == {(ranks, 15 * ranks)}
    assert {plan.schedule for plan in plans.values()} == set(Schedule)
    assert {plan.layers[0].sequence_parallel for plan in plans.values()} == set(SequenceParallel)


def _compared(gpu_kit, setting, world, family, dtype):
    right, groups = gpu_kit("right"), Groups("cpu")
    stock = right._stock(setting, lambda: world, lambda: groups, family, dtype)
    kinds = right.RECOMPUTED if dtype == "bfloat16" else right.RECOMPUTED[:1]
    return [
        right._compared(setting, lambda: world, lambda: groups, family, dtype, kind, lambda: stock) for kind in kinds
    ]


@pytest.mark.parametrize("family", ["llama", "bert", "t5", "deepseek_v3"])
def test_families_agree_with_stock_transformers(gpu_kit, setting, world, family):
    rows = [row for dtype in ("bfloat16", "float32") for row in _compared(gpu_kit, setting, world, family, dtype)]
    assert len(rows) == 4 and all(row["agrees"] for row in rows)


def test_a_gradient_off_by_a_thousandth_is_seen(gpu_kit, setting, world, monkeypatch):
    right = gpu_kit("right")
    exact = right.gradients_of
    monkeypatch.setattr(right, "gradients_of", lambda engine: {n: g * 1.001 for n, g in exact(engine).items()})
    assert not any(row["agrees"] for row in _compared(gpu_kit, setting, world, "llama", "float32"))


def test_experts_and_rings_are_held_to_float64(gpu_kit, setting, monkeypatch):
    rows = [*gpu_kit("right_experts").rows(setting), *gpu_kit("right_rings").rows(setting)]
    assert all(row.do()["well"] for row in rows)
    experts = gpu_kit("right_experts")
    right = experts.expert_products
    monkeypatch.setattr(experts, "expert_products", lambda x, w, counts: right(x, w, counts) * 1.05)
    assert not any(row.do()["well"] for row in experts.rows(setting))


def test_waits_of_the_host_are_counted(gpu_kit, setting, world, monkeypatch):
    counted, groups = gpu_kit("fast").counted, Groups("cpu")
    plan = gpu_kit("fast").dense_plan(setting)
    plans = [replace(plan, num_microbatches=n, global_batch_size=4) for n in (1, 4)]

    def waits():
        return [counted(plan, world, groups)["waits"] for plan in plans]

    assert len(set(waits())) == 1
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) + 0 * float(x.detach().flatten()[0]))
    assert len(set(waits())) == 2


def test_all_loops_do_the_same_work(gpu_kit, setting, world, monkeypatch):
    fast, groups = gpu_kit("fast"), Groups("cpu")
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # which takes a minute
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    ways = [make for model, make in fast._WAYS.values() if model == "dense"] + list(fast._COMPILED.values())[1:]
    plan = fast.dense_plan(setting)
    losses = [fast._measured(setting, plan, world, groups, make)["losses"] for make in ways]
    assert len(losses) == 4 and all(len(each) == 3 for each in losses)
    for step in zip(*losses, strict=True):
        assert max(step) - min(step) < 0.01 and math.isclose(step[0], math.log(61), rel_tol=0.1)


def test_memory_of_a_rank_of_eight_is_what_the_check_says(gpu_kit, setting):
    plan = gpu_kit("plans").of_eight_devices(setting)["experts on 4"].plan
    (setting.carried / "plans").mkdir()
    write_document(setting.carried / "plans" / "one.json", plan)
    checks = check_roles(plan, family_named("qwen3_moe", "test"), "sdpa", lambda done, of: None)
    sizes = {str(rank): check.peak_bytes for check in checks for rank in check.role.ranks}
    predicted = {"file": "one.json", "check_bytes": sizes, "analytic_bytes": [1]}
    row = gpu_kit("memory")._taken(setting, predicted, 7)
    assert math.isclose(row["peak_bytes"], row["check_bytes"], rel_tol=0.1)


def test_what_was_resident_at_the_peak_is_told_by_its_place(gpu_kit):
    def event(action, address, size, line):
        frames = [{"filename": "torch/x.py", "line": 1, "name": "add"}]
        frames += [{"filename": "shardwright_train/engine/stage.py", "line": line, "name": "run"}] if line else []
        return {"action": action, "addr": address, "size": size, "frames": frames}

    events = [event("alloc", 1, 5, 7), event("alloc", 2, 10, 8), event("free_completed", 1, 5, 7)]
    events += [event("alloc", 3, 3, 0), event("free_completed", 2, 10, 8), event("free_completed", 9, 1, 1)]
    events += [event("alloc", 1, 4, 7), event("alloc", 4, 6, 9)]
    assert gpu_kit("checkpoint").at_the_peak(events[:-1]) == {"stage.py:8 run": 10, "stage.py:7 run": 5}
    assert gpu_kit("checkpoint").at_the_peak([*events, event("alloc", 5, 9, 9)]) == {
        "stage.py:9 run": 15,
        "stage.py:7 run": 4,
        "elsewhere": 3,
    }
