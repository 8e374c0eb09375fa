"""When ZeRO-3 gathers: what a pass begins with is there, or on its way, before the pass before it has ended."""

from typing import Any

import msgspec
import pytest
from random_plans import random_plan
from tiny_models import tiny

from shardwright.types import DataParallel, LayerStrategy, Plan, Schedule, Strategy
from shardwright_train import dry_run
from shardwright_train.engine.engine import Engine
from shardwright_train.models.base import family_named
from shardwright_train.pipeline.runner import MicrobatchChunk, Step, StepHook

LAYERS = 6
"""With the embedding and the head."""


def plan_of(schedule: Schedule, head: DataParallel = DataParallel.ZERO3) -> Plan:
    """Two microbatches in one pipeline stage of two ranks."""
    plan = random_plan(tiny("llama"), 0, 2, "float32", stages=1)
    sharding = {"tp_size": 1, "dp_size": 2}
    outer = Strategy(**sharding, data_parallel=DataParallel.ZERO3)
    layer = LayerStrategy(type="block", **sharding, data_parallel=DataParallel.ZERO3)
    return msgspec.structs.replace(
        plan,
        schedule=schedule,
        num_microbatches=2,
        embedding=outer,
        head=msgspec.structs.replace(outer, data_parallel=head),
        layers=(layer,) * (LAYERS - 2),
    )


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events of a simulated step, with the gathers among them, in the order in which a rank comes to them."""
    found: list[str] = []
    dispatch, run = dry_run._SentBytes.__torch_dispatch__, Engine.forward_backward

    def gathering(self: Any, func: Any, *arguments: Any) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            found.append("gather")
        return dispatch(self, func, *arguments)

    def logged(self: Engine, step: Step, hook: StepHook) -> Any:
        def both(name: str, at: MicrobatchChunk | None = None) -> None:
            found.append(name)
            hook(name, at)

        return run(self, step, both)

    monkeypatch.setattr(dry_run._SentBytes, "__torch_dispatch__", gathering)
    monkeypatch.setattr(Engine, "forward_backward", logged)
    return found


def gathers_of_passes(plan: Plan, log: list[str]) -> list[tuple[str, int, int]]:
    """Of each pass its kind, the gathers that start while it waits for its input, and those that start in it."""
    dry_run.simulate_step(plan, 0, family_named("llama", "test"), "sdpa")
    found = []
    for number, name in enumerate(log):
        kind, _, event = name.partition(".")
        if event == "begin":
            waited, ended = (log.index(f"{kind}.{event}", number) for event in ("wait", "end"))
            found.append((kind, log[number:waited].count("gather"), log[waited:ended].count("gather")))
    return found


def test_the_first_gather_of_a_pass_goes_on_beside_the_pass_before(log: list[str]) -> None:
    """The first microbatch's last layer gathers the embedding, its last backward pass the head."""
    assert gathers_of_passes(plan_of(Schedule.GPIPE), log) == [
        ("forward", 1, LAYERS),
        ("forward", 0, LAYERS - 1),
        ("backward", 0, LAYERS),
        ("backward", 0, LAYERS - 1),
    ]


def test_a_layer_that_the_next_pass_begins_with_stays(log: list[str]) -> None:
    assert gathers_of_passes(plan_of(Schedule.ONE_F_ONE_B), log) == [
        ("forward", 1, LAYERS - 1),
        ("backward", 0, LAYERS - 1),
        ("forward", 0, LAYERS - 1),
        ("backward", 0, LAYERS - 1),
    ]


def test_behind_a_layer_of_another_kind_the_first_gather_goes_on_beside_the_wait(log: list[str]) -> None:
    found = gathers_of_passes(plan_of(Schedule.GPIPE, DataParallel.ZERO2), log)
    assert found[:2] == [("forward", 1, LAYERS - 1), ("forward", 1, LAYERS - 2)], "the head's own once a step"
    assert found[2:] == [("backward", 0, LAYERS - 1), ("backward", 0, LAYERS - 1)]


def test_every_layer_is_gathered_before_the_one_in_front_of_it_is_done(log: list[str]) -> None:
    """The embedding's part of a pass ends when the layer behind it is on its way already."""
    gathers_of_passes(plan_of(Schedule.ONE_F_ONE_B), log)
    assert log[: log.index("embedding.forward")].count("gather") == 2
    backward = log[log.index("backward.wait") :]
    assert backward[: backward.index("head.backward")].count("gather") == 1
