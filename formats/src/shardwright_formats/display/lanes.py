"""Which of a timeline's events share a lane: on each of them one thing goes on at a time."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from shardwright_formats.types.prediction import TimelineEvent

PASSES, GRADIENTS, FORTH, BACK = "passes", "gradients", "send_forward", "send_backward"


class Lane(NamedTuple):
    """A pipeline stage's passes, its reductions, or its link to the next (`FORTH`) or the previous (`BACK`) stage."""

    stage: int
    kind: str


def lane_name(lane: Lane, num_stages: int) -> str:
    """What a lane is called, such as `stage 0` or `0 → 1`."""
    match lane.kind:
        case "send_forward":
            return f"{lane.stage} → {(lane.stage + 1) % num_stages}"
        case "send_backward":
            return f"{lane.stage} → {(lane.stage - 1) % num_stages}"
        case "gradients":
            return "gradient sync"
        case _:
            return f"stage {lane.stage}"


def by_lane(events: Iterable[TimelineEvent]) -> dict[Lane, list[TimelineEvent]]:
    """The events of each lane that has any, by start."""
    kinds = {"gradient_sync": GRADIENTS, FORTH: FORTH, BACK: BACK}

    def lane(event: TimelineEvent) -> Lane:
        return Lane(event.stage, kinds.get(event.kind, PASSES))

    return {key: list(own) for key, own in groupby(sorted(events, key=lambda e: (lane(e), e.start_s)), key=lane)}


def idle_s(events: Iterable[TimelineEvent], stage: int, over_s: float) -> float:
    """How long a stage neither computes nor reduces until `over_s`; what its links carry does not count."""
    own = [event for event in events if event.stage == stage and event.kind not in (FORTH, BACK)]
    idle = reached = 0.0
    for event in sorted(own, key=lambda event: event.start_s):
        idle += max(event.start_s - reached, 0.0)
        reached = max(event.end_s, reached)
    return idle + over_s - reached
