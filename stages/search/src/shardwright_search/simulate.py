"""Event-driven simulation of one step: the very action lists that the runtime executes."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright_formats.plan import Schedule
from shardwright_formats.schedule import Action, Pass, actions

__all__ = ["Event", "Simulation", "StageTimes", "lower_bound_ps", "simulate"]


class StageTimes(NamedTuple):
    """What one pipeline stage does, in picoseconds."""

    forward_ps: int
    """Of one microbatch; so is backward."""
    backward_ps: int
    send_ps: int
    """Of one microbatch between this stage and the next, one way; 0 for the last."""
    gradient_sync_ps: int
    optimizer_ps: int


class Event(NamedTuple):
    """Something a pipeline stage does for a while."""

    stage: int
    kind: str
    microbatch: int | None
    start_ps: int
    end_ps: int


class Simulation(NamedTuple):
    """The events of a step, in order of their start, and when the last ends."""

    events: tuple[Event, ...]
    step_ps: int


def simulate(stages: Sequence[StageTimes], schedule: Schedule, num_microbatches: int) -> Simulation:
    """Play the schedule: an action starts when its stage is free and its message has come.

    Sends are asynchronous: they delay the receiver, not the sender. After its last backward pass a stage reduces its
    gradients; the optimizer waits for all stages, for clipping needs the norm of all gradients.
    """
    events = _passes(stages, schedule, num_microbatches)
    reduced = []
    for index, stage in enumerate(stages):
        free = max(event.end_ps for event in events if event.stage == index)
        reduced.append(free + stage.gradient_sync_ps)
        events.append(Event(index, "gradient_sync", None, free, reduced[-1]))
    start = max(reduced)
    events += [Event(i, "optimizer", None, start, start + stage.optimizer_ps) for i, stage in enumerate(stages)]
    lasting = sorted((event for event in events if event.end_ps > event.start_ps), key=lambda e: (e.start_ps, e.stage))
    return Simulation(tuple(lasting), max(event.end_ps for event in events))


def lower_bound_ps(stages: Sequence[StageTimes], num_microbatches: int) -> int:
    """A time no order of the passes can beat.

    Stage j starts when the first microbatch has come through the stages before it, does all forward and backward
    passes, and the last microbatch's gradient must still go back to each stage k <= j and be reduced there.
    """
    bounds = []
    fill = 0
    for j, stage in enumerate(stages):
        drains, back = [stage.gradient_sync_ps], 0
        for earlier in reversed(stages[:j]):
            back += earlier.send_ps + earlier.backward_ps
            drains.append(back + earlier.gradient_sync_ps)
        bounds.append(fill + num_microbatches * (stage.forward_ps + stage.backward_ps) + max(drains))
        fill += stage.forward_ps + stage.send_ps
    return max(bounds) + max(stage.optimizer_ps for stage in stages)


def _passes(stages: Sequence[StageTimes], schedule: Schedule, num_microbatches: int) -> list[Event]:
    """All forward and backward passes; stages take turns, each going on until it must wait."""
    waiting = [list(reversed(actions(schedule, len(stages), num_microbatches, i))) for i in range(len(stages))]
    ended: dict[tuple[int, Action], int] = {}
    events: list[Event] = []
    free = [0] * len(stages)
    while any(waiting):
        for index, stage in enumerate(stages):
            while waiting[index] and (come := _arrival(stages, ended, index, waiting[index][-1])) is not None:
                action = waiting[index].pop()
                start = max(free[index], come)
                lasts = stage.forward_ps if action.kind is Pass.FORWARD else stage.backward_ps
                free[index] = ended[index, action] = start + lasts
                events.append(Event(index, action.kind, action.microbatch, start, free[index]))
    return events


def _arrival(
    stages: Sequence[StageTimes], ended: dict[tuple[int, Action], int], index: int, action: Action
) -> int | None:
    """When the message that an action needs has come; None when it has not been sent yet."""
    source = index - 1 if action.kind is Pass.FORWARD else index + 1
    if not 0 <= source < len(stages):
        return 0
    sent = ended.get((source, action))
    return None if sent is None else sent + stages[min(source, index)].send_ps
