"""Split backward passes in several chunks a stage, in rising order or as a V, train what one process trains."""

from collections.abc import Callable
from pathlib import Path

import pytest
from forked_ranks import run_worker
from rest_long import rest_long
from run_parity import TOLERANCE
from several_chunks import SCHEDULES, several_chunks

from shardwright.io import write_document
from shardwright.types import HEAD, Plan, Plans, Recompute

pytestmark = pytest.mark.timeout(900)
FEW = 4
"""Plans in the default suite: one of each schedule, as they take turns."""


def _plans(world_size: int, part: str) -> list[Plan]:
    plans = several_chunks(world_size)
    return plans[:FEW] if part == "few" else plans[FEW:]


CASES = [(2, "few"), (2, "rest"), (4, "few"), (4, "rest")]


@pytest.mark.parametrize(("world_size", "part"), rest_long(1, CASES))
def test_they_train_what_one_process_trains(world_size: int, part: str, compare: Callable[..., dict]) -> None:
    errors = compare(_plans(world_size, part))
    assert {name: found for name, found in errors.items() if not max(found.values()) <= TOLERANCE} == {}


@pytest.mark.parametrize(("world_size", "part"), rest_long(1, CASES))
def test_gradients_are_those_of_joint_backward_passes_to_the_bit(tmp_path: Path, world_size: int, part: str) -> None:
    """Those of a V are compared with the same layers on other ranks."""
    write_document(tmp_path / "plans.json", Plans(plans=tuple(_plans(world_size, part))))
    run_worker("split_worker", [str(tmp_path / "plans.json")], world_size)


def test_the_plans_have_every_schedule_both_ends_on_a_rank_and_every_kind_of_strategy() -> None:
    plans = [plan for world_size in (2, 4) for plan in several_chunks(world_size)]
    assert {plan.schedule for plan in plans} == set(SCHEDULES)
    assert all((plan.stage_of(HEAD) == 0) is plan.schedule.turns for plan in plans)
    assert {plan.schedule for plan in plans if plan.model.tied} == set(SCHEDULES)
    assert any(len(plan.stages) == 4 for plan in plans) and any(layer.experts for p in plans for layer in p.layers)
    assert any(layer.recompute is Recompute.FULL for plan in plans for layer in plan.layers)
