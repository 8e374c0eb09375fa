"""Every schedule has the values that its formula gives by hand."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from shardwright_train.engine.learning_rate import Hyperparameters, LearningRateSchedule

STEPS, WARMUP_STEPS, PEAK = 20, 4, 2.0


def rate(step: int, schedule: str, **changes: Any) -> float:
    settings: dict[str, Any] = {
        "learning_rate": PEAK,
        "learning_rate_schedule": LearningRateSchedule(schedule),
        "steps": STEPS,
        "warmup_steps": WARMUP_STEPS,
        "final_fraction": 0.2,
        "decay_fraction": 0.25,
    }
    return Hyperparameters(weight_decay=0, clip_norm=0, **(settings | changes)).learning_rate_at(step)


@pytest.mark.parametrize("schedule", LearningRateSchedule)
def test_every_schedule_warms_up_in_a_line_to_the_peak(schedule: LearningRateSchedule) -> None:
    assert [rate(step, schedule) for step in range(1, 5)] == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {5: 2.0, 12: 2.0, 20: 2.0}),
        ("linear", {8: 1.6, 12: 1.2, 16: 0.8, 20: 0.4}),
        # The quarter points of half a cosine are (2 ± sqrt 2) / 4 of the way.
        ("cosine", {8: 0.4 + 1.6 * 0.8535533906, 12: 1.2, 16: 0.4 + 1.6 * 0.1464466094, 20: 0.4}),
        ("inverse_sqrt", {9: 2.0 * 2 / 3, 16: 1.0}),
        ("wsd", {5: 2.0, 15: 2.0, 16: 1.68, 18: 1.04, 20: 0.4}),
    ],
)
def test_the_rate_after_the_warm_up_is_that_of_the_formula(schedule: str, expected: dict[int, float]) -> None:
    assert {step: rate(step, schedule) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "first"), [("constant", 2.0), ("linear", 1.92), ("inverse_sqrt", 2.0), ("wsd", 2.0)]
)
def test_without_warm_up_the_first_step_is_already_on_the_way(schedule: str, first: float) -> None:
    assert rate(1, schedule, warmup_steps=0) == pytest.approx(first)


@pytest.mark.parametrize("schedule", LearningRateSchedule)
def test_after_the_warm_up_no_rate_rises(schedule: LearningRateSchedule) -> None:
    rates = [rate(step, schedule) for step in range(WARMUP_STEPS, STEPS + 1)]
    assert rates == sorted(rates, reverse=True)
    falling = [first > second for first, second in pairwise(rates[1:])]
    assert all(falling) or schedule in (LearningRateSchedule.CONSTANT, LearningRateSchedule.WSD)


@pytest.mark.parametrize("schedule", LearningRateSchedule)
def test_past_the_last_step_the_rate_stays(schedule: LearningRateSchedule) -> None:
    assert rate(STEPS + 1, schedule) == rate(10 * STEPS, schedule) == rate(STEPS, schedule) > 0


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize("final_fraction", [0.0, 0.2, 1.0])
def test_a_decay_ends_at_its_final_fraction(schedule: str, final_fraction: float) -> None:
    assert rate(STEPS, schedule, final_fraction=final_fraction) == pytest.approx(final_fraction * PEAK)


@pytest.mark.parametrize("schedule", LearningRateSchedule)
def test_a_run_that_is_all_warm_up_ends_at_the_peak(schedule: LearningRateSchedule) -> None:
    assert rate(STEPS, schedule, warmup_steps=STEPS) == PEAK
    assert rate(STEPS, schedule, warmup_steps=2 * STEPS) == PEAK / 2


def test_wsd_decays_over_its_share_and_no_longer_than_the_warm_up_leaves() -> None:
    assert [rate(step, "wsd", decay_fraction=0.0) for step in (5, 19, 20)] == [PEAK] * 3
    assert rate(19, "wsd", decay_fraction=0.01) == PEAK
    assert rate(20, "wsd", decay_fraction=0.01) == pytest.approx(0.4)
    assert [rate(step, "wsd", decay_fraction=1.0) for step in (4, 12, 20)] == pytest.approx([2.0, 1.2, 0.4])


def test_the_hyperparameters_of_a_run_carry_their_schedule() -> None:
    cosine = Hyperparameters(learning_rate=1.0, warmup_steps=4, steps=12, weight_decay=0, clip_norm=0)
    assert [cosine.learning_rate_at(step) for step in (2, 8, 12)] == pytest.approx([0.5, 0.55, 0.1])
    wsd = Hyperparameters(
        learning_rate=1.0,
        warmup_steps=4,
        steps=12,
        weight_decay=0,
        clip_norm=0,
        learning_rate_schedule=LearningRateSchedule.WSD,
        final_fraction=0.5,
        decay_fraction=0.25,
    )
    assert [wsd.learning_rate_at(step) for step in (2, 9, 12)] == pytest.approx([0.5, 1.0, 0.5])


@pytest.mark.parametrize(
    ("schedule", "stock", "more"),
    [
        ("constant", "constant_with_warmup", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.2}),
        ("inverse_sqrt", "inverse_sqrt", {}),
    ],
)
def test_where_transformers_has_the_form_the_rates_are_its_own(schedule: str, stock: str, more: dict[str, Any]) -> None:
    """Its steps count from 0; linear has no floor there, and wsd no decay of less than a step."""
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(stock, adamw, WARMUP_STEPS, STEPS, scheduler_specific_kwargs=more)
    for step in range(1, STEPS + 1):
        adamw.step()
        scheduler.step()
        assert rate(step, schedule) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
