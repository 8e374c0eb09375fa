"""Event-driven simulation of one step: the very action lists that the runtime executes."""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright_formats.plan import Schedule
from shardwright_formats.schedule import Action, Pass, actions

__all__ = ["Event", "Simulation", "StageTimes", "lower_bound_ps", "simulate"]


class StageTimes(NamedTuple):
    """What one layer range of a pipeline stage does, in picoseconds: the whole stage unless it is interleaved."""

    forward_ps: int
    """Of one microbatch; so is backward."""
    backward_ps: int
    send_ps: int
    """Of one microbatch between this range and the next, one way; 0 for the last."""
    gradient_sync_ps: int
    optimizer_ps: int


class Event(NamedTuple):
    """Something a pipeline stage does for a while; None where it is not for one microbatch or one chunk."""

    stage: int
    kind: str
    microbatch: int | None
    chunk: int | None
    start_ps: int
    end_ps: int


class Simulation(NamedTuple):
    """The events of a step, in order of their start, and when the last ends."""

    events: tuple[Event, ...]
    step_ps: int


def simulate(
    ranges: Sequence[StageTimes], schedule: Schedule, num_microbatches: int, num_chunks: int = 1
) -> Simulation:
    """Play the schedule: an action starts when its stage is free and its message has come.

    `ranges` are in the order a microbatch goes through them: chunk 0 of every stage, then chunk 1 of every stage.
    Sends are asynchronous: they delay the receiver, not the sender. After a chunk's last backward pass its stage
    reduces the chunk's gradients; the optimizer waits for all stages, for clipping needs the norm of all gradients.
    """
    events = _passes(ranges, schedule, num_microbatches, num_chunks)
    start = max(event.end_ps for event in events)
    events += [Event(i, "optimizer", None, None, start, start + last) for i, last in _optimizers(ranges, num_chunks)]
    lasting = sorted((event for event in events if event.end_ps > event.start_ps), key=lambda e: (e.start_ps, e.stage))
    return Simulation(tuple(lasting), max(event.end_ps for event in events))


def lower_bound_ps(ranges: Sequence[StageTimes], num_microbatches: int, num_chunks: int = 1) -> int:
    """A time no order of the passes can beat.

    Range j starts when the first microbatch has come through the ranges before it. Then its stage does all forward
    and backward passes of it and of the later ranges that the stage holds, and the last of these gradients must still
    go back to each range k <= j and be reduced there.
    """
    bounds = []
    fill = 0
    num_stages = len(ranges) // num_chunks
    for j, first in enumerate(ranges):
        own = ranges[j::num_stages]
        drains, back = [sum(here.gradient_sync_ps for here in own)], 0
        for earlier in reversed(ranges[:j]):
            back += earlier.send_ps + earlier.backward_ps
            drains.append(back + earlier.gradient_sync_ps)
        work = num_microbatches * sum(here.forward_ps + here.backward_ps for here in own)
        bounds.append(fill + work + max(drains))
        fill += first.forward_ps + first.send_ps
    return max(bounds) + max(last for _, last in _optimizers(ranges, num_chunks))


def _optimizers(ranges: Sequence[StageTimes], num_chunks: int) -> list[tuple[int, int]]:
    """Every stage with the time of its optimizer."""
    num_stages = len(ranges) // num_chunks
    return [(stage, sum(own.optimizer_ps for own in ranges[stage::num_stages])) for stage in range(num_stages)]


def _passes(ranges: Sequence[StageTimes], schedule: Schedule, num_microbatches: int, num_chunks: int) -> list[Event]:
    """All forward and backward passes and gradient reductions; stages take turns, each until it must wait."""
    num_stages = len(ranges) // num_chunks
    lists = [actions(schedule, num_stages, num_microbatches, i, num_chunks) for i in range(num_stages)]
    waiting = [[(a.chunk * num_stages + stage, a) for a in reversed(own)] for stage, own in enumerate(lists)]
    ended: dict[tuple[int, Pass, int], int] = {}
    events: list[Event] = []
    free = [0] * num_stages
    while any(waiting):
        for stage, own in enumerate(waiting):
            while own and (come := _arrival(ranges, ended, *own[-1])) is not None:
                index, (kind, microbatch, chunk) = own.pop()
                times = ranges[index]
                start = max(free[stage], come)
                free[stage] = start + (times.forward_ps if kind is Pass.FORWARD else times.backward_ps)
                ended[index, kind, microbatch] = free[stage]
                events.append(Event(stage, kind, microbatch, chunk, start, free[stage]))
                if kind is Pass.BACKWARD and microbatch == num_microbatches - 1:
                    start = free[stage]
                    free[stage] += times.gradient_sync_ps
                    events.append(Event(stage, "gradient_sync", None, chunk, start, free[stage]))
    return events


def _arrival(
    ranges: Sequence[StageTimes], ended: dict[tuple[int, Pass, int], int], index: int, action: Action
) -> int | None:
    """When the message that an action on range `index` needs has come; None when it has not been sent yet."""
    source = index - 1 if action.kind is Pass.FORWARD else index + 1
    if not 0 <= source < len(ranges):
        return 0
    sent = ended.get((source, action.kind, action.microbatch))
    return None if sent is None else sent + ranges[min(source, index)].send_ps
