"""Memory of plans whose ranks shard experts: what is predicted, against steps at even load on fake tensors."""

from pathlib import Path

import pytest
from estimated_memory import FLOAT32, MIXED, estimated_profiles, held_bytes
from priced_experts import MODEL, plan_of
from rest_long import rest_long

from shardwright.types import DataParallel, ExpertLoad, LayerLoad, Precision, Recompute, SequenceParallel
from shardwright_search.cost_model.expert_load import LoadFile
from shardwright_search.cost_model.profiles import Profiles
from shardwright_train.dry_run import simulate_step
from shardwright_train.models.base import family_named
from shardwright_train.parallel import experts

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
    return {precision: estimated_profiles(precision, (8, 16), MODEL) for precision in (MIXED, FLOAT32)}


@pytest.mark.parametrize("number", rest_long(4, (2, 3, 6, 7, 0, 1, 4, 5)))
def test_memory_at_even_load_is_predicted_within_three_percent(number, profiles) -> None:
    plan = plan_of(*PLANS[number])
    step = simulate_step(plan, 0, family_named("mixtral", "test"), "sdpa")
    assert held_bytes(plan, profiles[plan.precision]) == pytest.approx(step.peak_bytes, rel=0.03)


SHARES = (0.25, 0.25, *(1 / 12,) * 6)
"""Shares of experts of which the first of four ranks gets twice the mean."""


@pytest.mark.parametrize("given", [PLANS[1], PLANS[5]])
def test_memory_of_the_fullest_rank_is_predicted_within_three_percent(given, profiles, monkeypatch) -> None:
    """Half of all rows go to the first rank's two experts of eight."""
    sent = lambda rows: [rows // 2, *(rows // 6 + (i < rows // 2 % 3) for i in range(3))]  # noqa: E731
    monkeypatch.setattr(
        experts, "_rows_of_ranks", lambda *given: (sent(given[2]), [given[2] // 2] * 4, [2 * given[2]], [])
    )
    plan, path = plan_of(*given), Path("load.json")
    step = simulate_step(plan, 0, family_named("mixtral", "test"), "sdpa")
    layers = tuple(LayerLoad(layer=number, shares=SHARES) for number in range(3))
    load = LoadFile(path, ExpertLoad(model="m", first_step=1, last_step=1, layers=layers))
    even = profiles[plan.precision]
    assert held_bytes(plan, even._replace(load=load)) == pytest.approx(step.peak_bytes, rel=0.03)
    assert held_bytes(plan, even) < 0.9 * step.peak_bytes
