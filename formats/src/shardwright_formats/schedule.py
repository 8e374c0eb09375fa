"""The order in which each pipeline stage works: one list of actions, run by the runtime and played by the simulator."""

from enum import StrEnum
from typing import NamedTuple

from shardwright_formats.plan import Schedule

__all__ = ["Action", "Pass", "actions", "in_flight"]


class Pass(StrEnum):
    """One way through the layers of a pipeline stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Action(NamedTuple):
    """One pass of one microbatch through a pipeline stage."""

    kind: Pass
    microbatch: int


def actions(schedule: Schedule, num_stages: int, num_microbatches: int, stage: int) -> tuple[Action, ...]:
    """What pipeline stage `stage` does in one step, in order.

    GPipe (Huang et al. 2019): all forward passes, then all backward passes. 1F1B (Narayanan et al. 2019): as many
    forward passes as there are later stages, then one of each in turn; fewer microbatches than stages are allowed.

    Raises ValueError for the interleaved schedule, which has no action list yet.
    """
    forward = [Action(Pass.FORWARD, i) for i in range(num_microbatches)]
    backward = [Action(Pass.BACKWARD, i) for i in range(num_microbatches)]
    if schedule is Schedule.GPIPE:
        return (*forward, *backward)
    if schedule is not Schedule.ONE_F_ONE_B:
        raise ValueError(f"no action list for the schedule {schedule} yet")
    ahead = min(num_microbatches, num_stages - 1 - stage)
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[num_microbatches - ahead :])


def in_flight(schedule: Schedule, num_stages: int, num_microbatches: int, stage: int) -> int:
    """The most microbatches whose activations a pipeline stage holds at once."""
    held = most = 0
    for action in actions(schedule, num_stages, num_microbatches, stage):
        held += 1 if action.kind is Pass.FORWARD else -1
        most = max(most, held)
    return most
