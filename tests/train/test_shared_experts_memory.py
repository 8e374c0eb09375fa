"""Memory of plans whose ranks share experts out: what is predicted, against steps at even load on fake tensors."""

import pytest
from priced_experts import FLOAT32, MIXED, held_bytes, plan_of, profiles_of

from shardwright_formats.types import DataParallel, Precision, Recompute, SequenceParallel
from shardwright_search.cost_model.profiles import Profiles
from shardwright_train.dry_run.simulated_step import simulate_step
from shardwright_train.models.registry import family_named

DDP, ZERO2, ZERO3 = DataParallel
NONE, FULL, SELECTIVE = Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE
MEGATRON = SequenceParallel.MEGATRON
PLANS = (
    (None, (DDP, DDP), MIXED, NONE),
    ((4, 1), (DDP, DDP), MIXED, NONE),
    ((2, 1), (ZERO2, ZERO3), MIXED, NONE),
    ((2, 2), (DDP, DDP), MIXED, NONE),
    ((1, 1), (ZERO3, ZERO3), MIXED, FULL),
    ((4, 1), (ZERO3, DDP), FLOAT32, FULL),
    ((2, 1), (ZERO2, ZERO2), FLOAT32, SELECTIVE),
    ((4, 1), (DDP, DDP), FLOAT32, NONE, 2, MEGATRON),
)


@pytest.fixture(scope="module")
def profiles() -> dict[Precision, Profiles]:
    return {precision: profiles_of(precision) for precision in (MIXED, FLOAT32)}


@pytest.mark.parametrize("given", PLANS)
def test_memory_at_even_load_is_predicted_within_three_percent(given, profiles) -> None:
    plan = plan_of(*given)
    step = simulate_step(plan, 0, family_named("mixtral", "test"), "sdpa")
    assert held_bytes(plan, profiles[plan.precision]) == pytest.approx(step.peak_bytes, rel=0.03)
