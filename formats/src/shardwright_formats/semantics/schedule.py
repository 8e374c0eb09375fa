"""The order in which each pipeline stage works: one list of actions, run by the runtime and simulated."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from shardwright_formats.types.plan import Schedule


class Pass(StrEnum):
    """One way through some layers of a pipeline stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Action(NamedTuple):
    """One pass of one microbatch through one layer range of a pipeline stage."""

    kind: Pass
    microbatch: int
    chunk: int = 0
    """Number of the layer range in the stage's `layers`; a microbatch goes through chunk 0 of every stage first."""


def actions(
    schedule: Schedule, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1
) -> tuple[Action, ...]:
    """What pipeline stage `stage` does in one step, in order.

    GPipe (Huang et al. 2019): all forward passes, then all backward passes. 1F1B (Narayanan et al. 2019): as many
    forward passes as there are later stages, then one of each in turn; fewer microbatches than stages are allowed.

    Interleaved 1F1B (Narayanan et al. 2021): the microbatches of a group go through chunk 0, then through chunk 1 and
    so on, and backward from the last chunk to the first, before the next group follows. Two forward passes for each
    later stage and a group for each chunk but the last run ahead, then one of each in turn: one pass for each later
    stage would do without sends, two hide them. With one chunk it is 1F1B.

    On every edge between two stages, the one from the last to the first that joins chunks included, messages are sent
    in the order they are received in, and a chunk's last backward pass is that of the last microbatch.

    Raises ValueError for several chunks under another schedule.
    """
    interleaved = schedule is Schedule.INTERLEAVED_1F1B
    if num_chunks > 1 and not interleaved:
        raise ValueError(f"{num_chunks} chunks need the schedule {Schedule.INTERLEAVED_1F1B}, not {schedule}")
    groups = _groups(num_stages, num_microbatches) if interleaved else [range(num_microbatches)]
    chunks = range(num_chunks)
    forward = [Action(Pass.FORWARD, i, chunk) for group in groups for chunk in chunks for i in group]
    backward = [Action(Pass.BACKWARD, i, chunk) for group in groups for chunk in reversed(chunks) for i in group]
    later = num_stages - 1 - stage
    if schedule is Schedule.GPIPE:
        ahead = len(forward)
    elif num_chunks == 1:
        ahead = min(len(forward), later)
    else:
        ahead = min(len(forward), 2 * later + (num_chunks - 1) * len(groups[0]))
    steady = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


def in_flight(schedule: Schedule, num_stages: int, num_microbatches: int, stage: int, num_chunks: int = 1) -> int:
    """The most activations that are resident at once on a pipeline stage, each of one microbatch in one chunk.

    With one chunk that is the number of microbatches; with several the unit is what one chunk, not the whole stage,
    keeps of a microbatch.
    """
    if num_chunks == 1:
        return num_microbatches if schedule is Schedule.GPIPE else min(num_microbatches, num_stages - stage)
    resident = largest = 0
    for action in actions(schedule, num_stages, num_microbatches, stage, num_chunks):
        resident += 1 if action.kind is Pass.FORWARD else -1
        largest = max(largest, resident)
    return largest


def _groups(num_stages: int, num_microbatches: int) -> list[range]:
    """The microbatches that go through a chunk together: `num_stages` of them, or more where that leaves a rest.

    With a group of fewer, stages idle while its first microbatch is on its way to the next chunk, which can take
    longer than plain 1F1B, and with the warm-up of `actions` they can wait for one another for ever: the first stage
    is up to 2 (num_stages - 1) forward passes ahead of the last, and only two groups that go round, forward and
    backward, make up for these. Fewer microbatches than stages are a single group, which never waits for another one.
    The larger groups come first, for the warm-up counts one of them for each chunk.
    """
    count = max(1, num_microbatches // num_stages)
    size, rest = divmod(num_microbatches, count)
    starts = [i * size + min(i, rest) for i in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def middle(times: Sequence[float], during: Pass) -> Sequence[float]:
    """Of one pass of each microbatch of a step those that only compute and add to gradients, if there are any.

    The first forward pass gathers, the first backward pass adds to nothing, the last one reduces.
    """
    return times[1:-1] or (times[1:] if during is Pass.FORWARD else times[:-1]) or times
