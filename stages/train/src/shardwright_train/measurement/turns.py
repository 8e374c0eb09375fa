"""Measurement of plans in turns: rounds of one step of each, so that a slow moment affects all."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwright_formats.semantics.differences import MAX_RELATIVE_ERROR, Duration, paired_difference
from shardwright_train.measurement.timing import StepTiming

_SCATTER = 0.1
_MAX_SCATTERED = 3
"""Limit of the steps of a plan measured alone, as a multiple of the requested ones, where they scatter."""
MAX_AGAIN = 2
"""Limit of the repetitions of the first rounds for plans measured in turns."""
_LAYERS = "layers"

Taken = tuple[list[StepTiming], ...]
"""Timed steps of each plan; those of equal index belong to one round."""


class Measured(NamedTuple):
    """The timed steps of some plans."""

    steps: Taken
    again: int
    """Number of times that the first rounds were repeated."""


class Limits(NamedTuple):
    """The limits of the duration of a measurement."""

    steps: int
    min_time_s: float
    """Seconds of each plan at least; of those in turns, in the mean."""
    of_all_ranks: Callable[[float], float]
    """Function that returns the largest value over all ranks; collective."""


def measure_in_turns(step: Sequence[Callable[[], StepTiming]], limits: Limits) -> Measured:
    """Measure one step of each plan in turn, until all are measured for long enough.

    A plan alone is measured for longer where its steps scatter. Several plans are compared with the first:
    where the difference in layer time has too large an error, all are measured again.
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
    """Return the largest relative error, in either pass, of a plan's difference in layer time from the first plan."""
    first, *others = taken
    return max(difference.relative_error for other in others for difference in _differences(first, other))


def _differences(few: Sequence[StepTiming], many: Sequence[StepTiming]) -> tuple[Duration, Duration]:
    """Return the differences of the forward and of the backward pass."""
    forward = paired_difference([step.forward_s[_LAYERS] for step in few], [step.forward_s[_LAYERS] for step in many])
    back = paired_difference([step.backward_s[_LAYERS] for step in few], [step.backward_s[_LAYERS] for step in many])
    return forward, back


def _round(step: Sequence[Callable[[], StepTiming]], taken: Taken) -> None:
    for one, own in zip(step, taken, strict=True):
        own.append(one())


def _spent_s(taken: Taken) -> float:
    return sum(step.step_s for own in taken for step in own)


def _scatter(steps: Sequence[StepTiming]) -> float:
    """Return the spread of the middle half of the step times, as a fraction of the median."""
    times = sorted(step.step_s for step in steps)
    return (times[(3 * len(times)) // 4] - times[len(times) // 4]) / statistics.median(times)
