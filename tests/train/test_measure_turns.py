"""Probes that are stepped in turns: a slow moment of the machine meets all of them, and what is uncertain is known."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from shardwright.plan.differences import MAX_RELATIVE_ERROR
from shardwright_train.measurement.timing import MAX_AGAIN, Limits, StepTiming, largest_error, measure_in_turns

FORWARD_S = 0.04
"""Of a layer; its backward pass takes twice as long, embedding and head 0.1 s."""
LIMITS = Limits(steps=4, min_time_s=2.0, of_all_ranks=lambda value: value)


@dataclass
class Machine:
    """A clock that goes on with every step, and how many times as long a step takes that begins at a time."""

    slowdown: Callable[[float], float]
    now_s: float = 0.0

    def step(self, layers: int) -> Callable[[], StepTiming]:
        """A step of a model of so many layers, measured by that clock."""

        def timed() -> StepTiming:
            by = self.slowdown(self.now_s)
            forward_s = by * layers * FORWARD_S
            step_s = 0.1 * by + 3 * forward_s
            self.now_s += step_s
            return StepTiming(
                reference_s=0.015,
                step_s=step_s,
                forward_s={"layers": forward_s},
                backward_s={"layers": 2 * forward_s},
                gradient_reduction_s=None,
                optimizer_s=0.0,
                passes=(),
            )

        return timed


def slow_at_first(now_s: float) -> float:
    return 1.6 if now_s < 2.0 else 1.0


def layer_s(few: list[StepTiming], many: list[StepTiming]) -> float:
    """What two more layers take forward, by the medians, as a share of what they do take."""
    less, more = (statistics.median(step.forward_s["layers"] for step in steps) for steps in (few, many))
    return (more - less) / 2 / FORWARD_S


def test_a_slow_moment_spoils_the_difference_of_plans_one_after_another_and_none_of_plans_in_turns() -> None:
    machine = Machine(slow_at_first)
    (few,), (many,) = (measure_in_turns([machine.step(layers)], LIMITS).steps for layers in (1, 3))
    assert layer_s(few, many) == pytest.approx(0.7), "a layer is too short by the slow moment of the shorter probe"
    machine = Machine(slow_at_first)
    in_turns = measure_in_turns([machine.step(1), machine.step(3)], LIMITS)
    assert in_turns.again <= 1
    assert layer_s(*in_turns.steps) == pytest.approx(1.0)
    assert machine.now_s >= 2 * LIMITS.min_time_s, "both together are measured for as long as one after the other"


def test_what_scatters_is_measured_again_and_no_more_than_so_often() -> None:
    rng = random.Random(1)
    machine = Machine(lambda now_s: rng.choice([1.0, 1.0, 4.0]))
    found = measure_in_turns([machine.step(1), machine.step(3), machine.step(2)], LIMITS)
    assert found.again == MAX_AGAIN and largest_error(found.steps) > MAX_RELATIVE_ERROR
    rounds = {len(own) for own in found.steps}
    assert rounds == {(1 + MAX_AGAIN) * (min(rounds) // (1 + MAX_AGAIN))}, "whole batches, as many of each plan"


def test_what_is_quiet_after_a_disturbed_start_is_measured_again_until_it_is_known() -> None:
    """Only every other step is slow at first, so that paired differences scatter; the second batch settles it."""
    count = 0

    def slowdown(now_s: float) -> float:
        nonlocal count
        count += 1
        return 3.0 if count < 12 and count % 3 == 0 else 1.0

    machine = Machine(slowdown)
    found = measure_in_turns([machine.step(1), machine.step(3)], LIMITS)
    assert 0 < found.again <= MAX_AGAIN and largest_error(found.steps) <= MAX_RELATIVE_ERROR
    assert layer_s(*found.steps) == pytest.approx(1.0)


def test_ranks_measure_as_often_as_the_most_uncertain_one() -> None:
    machine = Machine(lambda now_s: 1.0)
    alone = measure_in_turns([machine.step(1), machine.step(3)], LIMITS._replace(min_time_s=0.0))
    assert (len(alone.steps[0]), alone.again) == (4, 0)
    with_another = LIMITS._replace(min_time_s=0.0, of_all_ranks=lambda value: max(value, 0.5))
    found = measure_in_turns([machine.step(1), machine.step(3)], with_another)
    assert (len(found.steps[0]), found.again) == (4 * (1 + MAX_AGAIN), MAX_AGAIN)
