"""How many steps of some plans are measured: in rounds of one step of each, so that a slow moment meets them all."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright_formats.semantics.differences import MAX_RELATIVE_ERROR, Duration, paired_difference
from shardwright_train.measurement.timing import StepTiming

_SCATTER = 0.1
_MAX_SCATTERED = 3
"""A plan alone is measured for so many times the steps that were asked for at most, where they scatter."""
MAX_AGAIN = 2
"""So many times more are plans in turns measured for as many rounds as at first."""
_LAYERS = "layers"

Taken = tuple[list[StepTiming], ...]
"""Of each plan its steps so far; those of one number are of one round."""


class Measured(NamedTuple):
    """The steps of some plans."""

    steps: Taken
    again: int
    """How many times as many rounds followed the first ones."""


class Limits(NamedTuple):
    """How long plans are measured."""

    steps: int
    min_time_s: float
    """Of each plan, in the mean of those in turns."""
    of_all_ranks: Callable[[float], float]
    """The largest of a number over all ranks; collective."""


def measure_in_turns(step: Sequence[Callable[[], StepTiming]], limits: Limits) -> Measured:
    """One step of each plan in turn, so many times that all are measured for long enough.

    A plan alone is measured for longer where its steps scatter. Of several the first is what the others are compared
    with: where the time that another one's layers take more has too large an error, all are measured again.
    """
    taken: Taken = tuple([] for _ in step)
    while len(taken[0]) < limits.steps or limits.of_all_ranks(_spent_s(taken)) < limits.min_time_s * len(taken):
        _round(step, taken)
    if len(taken) == 1:
        while len(taken[0]) < _MAX_SCATTERED * limits.steps and limits.of_all_ranks(_scatter(taken[0])) > _SCATTER:
            _round(step, taken)
        return Measured(taken, 0)
    again, rounds = 0, len(taken[0])
    while again < MAX_AGAIN and limits.of_all_ranks(largest_error(taken)) > MAX_RELATIVE_ERROR:
        for _ in range(rounds):
            _round(step, taken)
        again += 1
    return Measured(taken, again)


def largest_error(taken: Taken) -> float:
    """Of what the layers of each plan take more than those of the first, either way: the largest relative error."""
    first, *others = taken
    return max(difference.relative_error for other in others for difference in _differences(first, other))


def _differences(few: Sequence[StepTiming], many: Sequence[StepTiming]) -> tuple[Duration, Duration]:
    """Of the forward and of the backward pass."""
    forward = paired_difference([step.forward_s[_LAYERS] for step in few], [step.forward_s[_LAYERS] for step in many])
    back = paired_difference([step.backward_s[_LAYERS] for step in few], [step.backward_s[_LAYERS] for step in many])
    return forward, back


def _round(step: Sequence[Callable[[], StepTiming]], taken: Taken) -> None:
    for one, own in zip(step, taken, strict=True):
        own.append(one())


def _spent_s(taken: Taken) -> float:
    return sum(step.step_s for own in taken for step in own)


def _scatter(steps: Sequence[StepTiming]) -> float:
    """The share of the median that the middle half of the step times spans."""
    times = sorted(step.step_s for step in steps)
    return (times[(3 * len(times)) // 4] - times[len(times) // 4]) / statistics.median(times)
