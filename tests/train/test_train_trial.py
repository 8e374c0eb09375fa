"""Each pipeline stage is tried alone before the first step: with all the memory it will take, and without a trace."""

import json
from itertools import product
from typing import Any

import msgspec
import pytest
from forked_ranks import run_worker
from random_plans import random_plan, uneven_plan
from tiny_models import tiny

from shardwright.io import write_document
from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import Plan, Plans, Schedule
from shardwright_train.pipeline.p2p import until_fullest

DROPS = tiny("gpt2", embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)


def plans() -> list[Plan]:
    """Of several stages: dropout, tied embeddings, all kinds of sharding, interleaved, of unequal width."""
    drawn = [random_plan(model, number, 4, "float32") for model in (DROPS, tiny("llama")) for number in range(20)]
    fitting = [plan for plan in drawn if len(plan.stages) > 1 and plan.num_microbatches > 1]
    interleaved = [plan for plan in fitting if plan.schedule is Schedule.INTERLEAVED_1F1B]
    some = [*fitting[:4], *fitting[-2:], interleaved[0], uneven_plan(DROPS, 1, 4)]
    return [msgspec.structs.replace(plan, name=f"{number}") for number, plan in enumerate(some)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trial")
    write_document(folder / "plans.json", Plans(plans=tuple(plans())))
    run_worker("trial_worker", [str(folder / "plans.json"), str(folder / "found.json")], 4)
    read: dict[str, Any] = json.loads((folder / "found.json").read_bytes())
    return read


@pytest.mark.long
def test_losses_gradients_weights_moments_and_random_state_are_the_same_bits(found: dict[str, Any]) -> None:
    assert {name: one["equal"] for name, one in found.items()} == dict.fromkeys(found, True) != {}


@pytest.mark.long
def test_a_stage_alone_takes_the_memory_of_the_first_step(found: dict[str, Any]) -> None:
    """But for what messages on their way take, and those of tied parameters."""
    ratios = [tried / peak for one in found.values() for tried, peak in one["memory"]]
    assert min(ratios) > 0.9 and max(ratios) < 1.1, ratios


def _most(todo: tuple[Action, ...]) -> list[int]:
    """Passes in flight at most, by the number of chunks that have gradients already."""
    in_flight, chunks = 0, {action.chunk for action in todo}
    most, have = [0] * (len(chunks) + 1), set[int]()
    for kind, _, chunk in todo:
        in_flight += kind is Pass.FORWARD
        most[len(have)] = max(most[len(have)], in_flight)
        if kind is Pass.BACKWARD:
            in_flight -= 1
            have.add(chunk)
    return most


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_microbatches_that_are_tried_hold_as_much_as_all(schedule: Schedule) -> None:
    chunks = (2,) if schedule.turns else (2, 3) if schedule.interleaves else (1,)
    for stages, microbatches, each in product((2, 3, 4), (1, 2, 5, 16), chunks):
        for stage in range(stages):
            full = schedule_of(schedule).actions(stages, microbatches, stage, each)
            tried = until_fullest(full)
            assert _most(tried) == _most(full), (stages, microbatches, stage)
            begun = {action.microbatch for action in tried}
            assert begun == set(range(len(begun))) and len(tried) == len({action.kind for action in full}) * each * len(
                begun
            )
            if schedule is Schedule.ONE_F_ONE_B:
                assert len(begun) == min(microbatches, max(3, stages - stage + 1))
