"""A plan for two node types trains on one machine that stands for both, and slowed ranks take the time they are to."""

import json
import time
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from forked_command import forked_command
from random_plans import on_devices, random_plan
from tiny_models import batch_of, engine_of, tiny

from shardwright.io import read_document, write_document
from shardwright.types import Measurement, Plan
from shardwright_train.engine import engine as engines
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import Step

MICROBATCH = (0, 0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two pipeline stages of one rank each."""
    return random_plan(tiny("llama"), 3, 2, "float32", 2)


def _train(folder: Path, plan: Plan, *more: str) -> list[float]:
    folder.mkdir()
    write_document(folder / "plan.json", plan)
    command = ["run", folder / "plan.json", "--data", "random", "--steps", "3", *more]
    done = forked_command([*command, "--checkpoints", folder / "kept", "--out", folder / "out"])
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    return [json.loads(line)["loss"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_a_plan_for_two_node_types_trains_as_it_does_on_one(plan: Plan, tmp_path: Path) -> None:
    mixed = _train(tmp_path / "mixed", on_devices(plan, "cpu", "cpu/3"), "--all-nodes-here")
    assert mixed == _train(tmp_path / "one", plan)
    assert len(mixed) == 3


@pytest.mark.parametrize("number", [1, 11])
def test_stages_that_span_node_types_train_as_on_one(number: int, tmp_path: Path) -> None:
    """Tensor- and data-parallel groups over ranks of two types; the stages' ranks are neighbours, or enclose others."""
    plan = random_plan(tiny("llama"), number, 4, "float32", 2)
    spanning = on_devices(plan, "cpu", "cpu/3", "cpu/2", "cpu")
    types = spanning.cluster.node_type_of_rank
    # n0 and n3 are nodes of a cpu each: two node types with one device.
    assert all(len({types[rank] for rank in stage.ranks}) == 2 for stage in spanning.stages)
    mixed = _train(tmp_path / "mixed", spanning, "--all-nodes-here")
    assert mixed == _train(tmp_path / "one", plan)
    assert len(mixed) == 3


def test_a_measurement_on_a_slowed_node_type_is_of_that_type(plan: Plan, tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", on_devices(plan, "cpu/3", "cpu/3"))
    command = ["measure", tmp_path / "plan.json", "--all-nodes-here", "--steps", "1", "--warmup-steps", "1"]
    done = forked_command([*command, "--out", tmp_path / "measured.json"])
    _, err = done.communicate(timeout=300)
    assert done.returncode == 0, err
    assert read_document(tmp_path / "measured.json", Measurement).device == "cpu/3"


def test_without_the_option_the_line_of_each_node_is_printed(plan: Plan, tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", on_devices(plan, "cpu", "cpu/3"))
    done = forked_command(["measure", tmp_path / "plan.json", "--out", tmp_path / "measured.json"])
    out, err = done.communicate(timeout=300)
    assert done.returncode == 2 and "is for 2 nodes, --nnodes is 1" in err
    assert out.count("--node-rank") == 2


class _Clocks:
    """Time that passes only where it is told to: of this thread's work, and asleep."""

    def __init__(self) -> None:
        self.worked_s = self.slept_s = 0.0

    def thread_time(self) -> float:
        return self.worked_s

    def sleep(self, time_s: float) -> None:
        self.slept_s += time_s


def test_a_slowed_rank_sleeps_for_what_it_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, seen = _Clocks(), list[tuple[str, float]]()
    monkeypatch.setattr(engines, "time", clocks)

    def hook(name: str, at: tuple[int, int] | None = None) -> None:
        assert at == MICROBATCH
        seen.append((name, clocks.slept_s))
        clocks.worked_s += 100.0  # what the hook itself does is no part of the step

    slowed = engines.slowed(hook, 3)
    for name, worked_s in (
        ("forward.begin", 0.0),
        ("forward.wait", 0.0),
        ("layers.forward", 2.0),
        ("forward.end", 1.0),
    ):
        clocks.worked_s += worked_s
        slowed(name, MICROBATCH)
    assert seen == [("forward.begin", 0.0), ("forward.wait", 0.0), ("layers.forward", 4.0), ("forward.end", 6.0)]
    assert engines.slowed(hook, 1) is hook


@pytest.mark.parametrize(("device", "slept"), [("cpu", False), ("cpu/3", True)])
def test_the_steps_of_a_slowed_rank_are_slowed(
    one_rank: World, monkeypatch: pytest.MonkeyPatch, device: str, slept: bool
) -> None:
    clocks = _Clocks()
    monkeypatch.setattr(engines, "time", clocks)
    alone = on_devices(random_plan(tiny("llama"), 0, 1, "float32"), device)
    engine = engine_of(alone, one_rank, Groups("cpu"))

    monkeypatch.setattr(clocks, "thread_time", partial(next, count()))
    batch = batch_of(alone.model, alone.global_batch_size, 0)
    engine.train_step(Step.of_batch(batch, engine.stage.context.share))
    assert (clocks.slept_s > 0) is slept


def test_computing_takes_so_many_times_as_long() -> None:
    """In real time: a machine that is busy with other work makes it longer, never shorter."""
    slowed = engines.slowed(lambda _name, _at=None: None, 4)
    factors = np.random.default_rng(0).random((200, 200))
    slowed("start")
    began_s, worked_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - worked_s < 0.05:
        factors @ factors
    slowed("optimizer")
    assert time.perf_counter() - began_s >= 0.19
