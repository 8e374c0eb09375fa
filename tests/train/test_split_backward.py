"""Split backward passes give what joint ones give, to the bit; what cannot be split is refused."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from forked_ranks import run_worker
from random_plans import random_plan
from rest_long import rest_long
from split_plans import split, split_plans
from split_times_worker import TIMED
from tiny_models import tiny

from shardwright.io import BadInput, write_document
from shardwright.types import (
    RECOMPUTE_WHOLE,
    GradientReduction,
    LayerStrategy,
    PipelineStage,
    Plans,
    Schedule,
    Strategy,
)
from shardwright_train.models.support import check_supported
from shardwright_train.parallel.checkpointing import KeptResults

pytestmark = pytest.mark.timeout(900)
TRIES = 3
PARTS = 8
"""Launches into which the plans of one number of ranks are divided."""


@pytest.mark.parametrize(("world_size", "part"), rest_long(1, [(n, part) for n in (2, 4) for part in range(PARTS)]))
def test_gradients_and_two_steps_are_those_of_joint_backward_passes_to_the_bit(
    tmp_path: Path, world_size: int, part: int
) -> None:
    plans = split_plans(world_size)[part::PARTS]
    write_document(tmp_path / "plans.json", Plans(plans=tuple(plans)))
    run_worker("split_worker", [str(tmp_path / "plans.json")], world_size)


@pytest.mark.parametrize("stages", rest_long(0, (2, 4)))
def test_a_pipeline_of_slowed_stages_takes_as_long_as_simulated_and_less_than_1f1b(tmp_path: Path, stages: int) -> None:
    """Within 5 %, of passes that took what they took; each once in three times, as others use the cores, too.

    Each schedule of split passes, those of two chunks a stage too: their passes are as long here, so there are twice as
    many of them.
    """
    layers, one = 8 // stages, {"tp_size": 1, "dp_size": 1}
    plan = msgspec.structs.replace(
        random_plan(tiny("llama", num_hidden_layers=8), 0, stages, "float32", stages=stages),
        num_microbatches=8,
        gradient_reduction=GradientReduction.DEFERRED,
        stages=tuple(PipelineStage(ranks=(i,), layers=((i * layers, (i + 1) * layers),)) for i in range(stages)),
        embedding=Strategy(**one),
        head=Strategy(**one),
        layers=(LayerStrategy(type="block", **one),) * 8,
    )
    write_document(tmp_path / "plans.json", Plans(plans=(plan,)))
    near: dict[str, float] = {}
    for _ in range(TRIES):
        files, left = [str(tmp_path / name) for name in ("plans.json", "times.json")], sorted({*TIMED} - {*near})
        run_worker("split_times_worker", [*files, " ".join(left)], stages)
        times = json.loads((tmp_path / "times.json").read_text())
        print(times)
        near |= {name: took_s for name, (took_s, simulated_s) in times.items() if abs(took_s / simulated_s - 1) < 0.05}
        if near.keys() == {*TIMED}:
            assert near["zero_bubble"] < near["1f1b"]
            return
    pytest.fail(f"not within 5 % in {TRIES} tries: {sorted({*TIMED} - {*near})}")


@pytest.mark.parametrize(("splits", "replayed"), [(False, 0), (True, 1)])
def test_only_a_split_pass_replays_a_product_whose_result_is_not_kept_and_only_the_last(
    splits: bool, replayed: int
) -> None:
    kept, x, w = KeptResults(keeps_last=False, splits=splits), torch.ones(2, 3), torch.ones(3, 5)
    with kept.forward():
        first = x @ w
        _ = x @ (2 * w)
    with kept:
        assert torch.equal(x @ w, first)
        for _ in range(replayed):
            assert (x @ w).shape == (2, 5)
        with pytest.raises(RuntimeError, match="a replay has more products than the pass that it repeats"):
            _ = x @ w


def test_the_plans_split_every_family_and_every_strategy() -> None:
    plans = [plan for world_size in (2, 4) for plan in split_plans(world_size)]
    layers = [layer for plan in plans for layer in plan.layers]
    assert {layer.recompute for layer in layers} >= set(RECOMPUTE_WHOLE)
    assert len({(layer.data_parallel, layer.sequence_parallel) for layer in layers}) == 9
    assert any(layer.cp_size > 1 for layer in layers) and any(layer.experts for layer in layers)
    assert len({plan.model.family for plan in plans}) >= 28


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"compile": True}, "compile: the schedule zero_bubble splits backward passes, compiled ones are joint"),
        (
            {"gradient_reduction": GradientReduction.EVERY_MICROBATCH},
            "gradient_reduction every_microbatch: the schedule zero_bubble sums gradients over a step",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(changes: dict[str, object], problem: str) -> None:
    plan = split(random_plan(tiny("llama"), 0, 2, stages=2))
    assert plan.schedule is Schedule.ZERO_BUBBLE
    check_supported(plan, "plan.json")
    with pytest.raises(BadInput, match=problem):
        check_supported(msgspec.structs.replace(plan, **changes), "plan.json")
