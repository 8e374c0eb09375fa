"""The event simulation against timelines drawn by hand: what each lane does, from when to when."""

from collections import defaultdict
from typing import NamedTuple

import pytest

from shardwright.types import Schedule
from shardwright_search.simulation.simulator import (
    Event,
    Overlap,
    Reduction,
    Simulation,
    StageTimes,
    simulate,
    step_time_ps,
)

F1B, GPIPE, INTERLEAVED = Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED_1F1B


class Drawing(NamedTuple):
    """A pipeline, and its timeline: `F0 0-2` is microbatch 0's forward pass from 0 to 2, `B0b` backward in chunk 1.

    S is a message, G a reduction of gradients (without a number where it is of all microbatches), O the optimizer.
    """

    schedule: Schedule
    num_microbatches: int
    num_chunks: int
    ranges: list[StageTimes]
    lanes: dict[str, str]
    step: int


GPIPE_2X2 = Drawing(
    GPIPE, 2, 1,
    [StageTimes(2, 4, 0, 2, 1), StageTimes(3, 5, 0, 1, 3)],
    {
        "stage 0": "F0 0-2 F1 2-4 B0 13-17 B1 18-22 O 24-25",
        "gradients 0": "G 22-24",
        "stage 1": "F0 2-5 F1 5-8 B0 8-13 B1 13-18 O 24-27",
        "gradients 1": "G 18-19",
    },
    27,
)  # fmt: skip

ONE_FORWARD_ONE_BACKWARD_2X3 = Drawing(
    F1B, 3, 1,
    [StageTimes(2, 4, 0, 2, 1), StageTimes(3, 5, 0, 1, 3)],
    {
        "stage 0": "F0 0-2 F1 2-4 B0 10-14 F2 14-16 B1 18-22 B2 26-30 O 32-33",
        "gradients 0": "G 30-32",
        "stage 1": "F0 2-5 B0 5-10 F1 10-13 B1 13-18 F2 18-21 B2 21-26 O 32-35",
        "gradients 1": "G 26-27",
    },
    35,
)  # fmt: skip

UNEQUAL_STAGES = Drawing(
    F1B, 3, 1,
    [StageTimes(1, 2, 0, 0, 0), StageTimes(3, 4, 0, 0, 0), StageTimes(2, 2, 0, 0, 0)],
    {
        "stage 0": "F0 0-1 F1 1-2 F2 2-3 B0 12-14 B1 19-21 B2 23-25",
        "stage 1": "F0 1-4 F1 4-7 B0 8-12 F2 12-15 B1 15-19 B2 19-23",
        "stage 2": "F0 4-6 B0 6-8 F1 8-10 B1 10-12 F2 15-17 B2 17-19",
    },
    25,
)  # fmt: skip

# Ranges 0 and 2 are on stage 0, ranges 1 and 3 on stage 1. Stage 0 runs four forward passes ahead, stage 1 two.
INTERLEAVED_2X2X2 = Drawing(
    INTERLEAVED, 2, 2,
    [StageTimes(2, 4, 0, 5, 1), StageTimes(3, 5, 0, 2, 3), StageTimes(1, 2, 0, 7, 1), StageTimes(2, 3, 0, 4, 2)],
    {
        "stage 0": "F0 0-2 F1 2-4 F0b 5-6 F1b 8-9 B0b 13-15 B1b 18-20 B0 27-31 B1 32-36 O 41-43",
        "gradients 0": "Gb 20-27 G 36-41",
        "stage 1": "F0 2-5 F1 5-8 F0b 8-10 B0b 10-13 F1b 13-15 B1b 15-18 B0 22-27 B1 27-32 O 41-46",
        "gradients 1": "Gb 18-22 G 32-34",
    },
    46,
)  # fmt: skip

# A message takes longer than a pass of stage 0: the next one waits for the link, not stage 0 for the message.
SENDS = Drawing(
    GPIPE, 3, 1,
    [StageTimes(1, 2, 3, 0, 0), StageTimes(2, 1, 0, 0, 0)],
    {
        "stage 0": "F0 0-1 F1 1-2 F2 2-3 B0 16-18 B1 19-21 B2 22-24",
        "0 to 1": "S0 1-4 S1 4-7 S2 7-10",
        "stage 1": "F0 4-6 F1 7-9 F2 10-12 B0 12-13 B1 13-14 B2 14-15",
        "1 to 0": "S0 13-16 S1 16-19 S2 19-22",
    },
    24,
)  # fmt: skip

# Stage 0's last pass: 2 alone, then a reduction of 3 takes 6, while 4 of the next 6 are done in 6, then 2 alone; then
# the last 4 take 6, while 3 of a reduction of 4 are done, and 1 of it and 3 come behind. 16 instead of 12 in all.
OVERLAPPED = [
    StageTimes(5, 12, 0, 0, 2, (Reduction(4, 3), Reduction(6, 4), Reduction(2, 3)), (), Overlap(1.5, 2)),
    StageTimes(4, 6, 0, 3, 3, (Reduction(4, 5), Reduction(2, 1))),
]
OVERLAP = Drawing(
    F1B, 2, 1, OVERLAPPED,
    {
        "stage 0": "F0 0-5 F1 5-10 B0 15-27 B1 27-43 O 47-49",
        "gradients 0": "G 29-35 G 37-44 G 44-47",
        "stage 1": "F0 5-9 B0 9-15 F1 15-19 B1 19-25 O 47-50",
        "gradients 1": "G 25-26 G 26-31 G 31-34",
    },
    50,
)  # fmt: skip
EVERY_MICROBATCH = OVERLAP._replace(
    ranges=[OVERLAPPED[0]._replace(early_reductions=OVERLAPPED[0].reductions), OVERLAPPED[1]],
    lanes={
        "stage 0": "F0 0-5 F1 5-10 B0 15-31 B1 35-51 O 55-57",
        "gradients 0": "G0 17-23 G0 25-32 G0 32-35 G 37-43 G 45-52 G 52-55",
        "stage 1": OVERLAP.lanes["stage 1"].replace("O 47-50", "O 55-58"),
        "gradients 1": OVERLAP.lanes["gradients 1"],
    },
    step=58,
)

DRAWINGS = {
    "gpipe": GPIPE_2X2,
    "1f1b": ONE_FORWARD_ONE_BACKWARD_2X3,
    "unequal stages": UNEQUAL_STAGES,
    "interleaved": INTERLEAVED_2X2X2,
    "sends": SENDS,
    "reductions beside the backward pass": OVERLAP,
    "reductions of every microbatch": EVERY_MICROBATCH,
}


def lane_of(event: Event, num_stages: int) -> str:
    match event.kind:
        case "send_forward":
            return f"{event.stage} to {(event.stage + 1) % num_stages}"
        case "send_backward":
            return f"{event.stage} to {(event.stage - 1) % num_stages}"
        case "gradient_sync":
            return f"gradients {event.stage}"
        case _:
            return f"stage {event.stage}"


def drawn(simulation: Simulation, num_stages: int) -> dict[str, str]:
    lanes = defaultdict(list)
    for event in simulation.events:
        which = f"{event.kind[0].upper()}{'' if event.microbatch is None else event.microbatch}"
        lanes[lane_of(event, num_stages)].append(f"{which}{'b' * (event.chunk or 0)} {event.start_ps}-{event.end_ps}")
    return {lane: " ".join(events) for lane, events in lanes.items()}


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_the_simulation_equals_a_timeline_drawn_by_hand(drawing: Drawing) -> None:
    configuration = (drawing.ranges, drawing.schedule, drawing.num_microbatches, drawing.num_chunks)
    found = simulate(*configuration)
    assert drawn(found, len(drawing.ranges) // drawing.num_chunks) == drawing.lanes
    assert found.step_ps == step_time_ps(*configuration) == drawing.step


def test_reductions_beside_a_backward_pass_that_slow_nothing_down_take_no_longer_than_the_longer_of_both() -> None:
    """The first element's reduction alone, of 3, has nothing beside it."""
    freely = [OVERLAPPED[0]._replace(overlap=Overlap(1, 1)), OVERLAPPED[1]]
    lanes = drawn(simulate(freely, F1B, 2), 2)
    assert lanes["stage 0"] == "F0 0-5 F1 5-10 B0 15-27 B1 27-39 O 42-44"
    assert lanes["gradients 0"] == "G 29-32 G 35-39 G 39-42"


def test_messages_of_two_kinds_between_the_same_stages_do_not_wait_for_one_another() -> None:
    """While activations go round from stage 1 to stage 0, gradients go there, and stage 1 hands itself the end."""
    ranges = [StageTimes(1, 1, send, 0, 0) for send in (0, 9, 1, 0)]
    assert drawn(simulate(ranges, INTERLEAVED, 2, 2), 2) == {
        "stage 0": "F0 0-1 F1 1-2 F0b 11-12 F1b 20-21 B0b 21-22 B1b 25-26 B0 32-33 B1 41-42",
        "0 to 1": "S0b 12-13 S1b 21-22 S0b 22-31 S1b 31-40",
        "stage 1": "F0 1-2 F1 2-3 F0b 13-14 B0b 14-15 F1b 22-23 B1b 23-24 B0 31-32 B1 40-41",
        "1 to 0": "S0 2-11 S1 11-20 S0b 15-16 S1b 24-25",
    }
