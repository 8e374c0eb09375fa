"""The simulated step as a Chrome trace, which Perfetto and chrome://tracing show."""

from typing import Any

from shardwright.display.timeline import BACK, FORTH, GRADIENTS, PASSES, Lane, by_lane, lane_name
from shardwright.types import Estimate, Plan, TimelineEvent

_THREADS = (PASSES, GRADIENTS, FORTH, BACK)


def chrome_trace(plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """Return a trace: a process for each pipeline stage, a thread for each of its lanes, an entry for each event.

    Times are in microseconds with all digits down to the picosecond (Google's "Trace Event Format").
    """
    lanes = by_lane(estimate.timeline, plan.schedule.turns)
    names = [
        _name("process_name", stage, 0, f"stage {stage}, ranks {_ranks(plan, stage)}")
        for stage in range(len(plan.stages))
    ]
    for lane in lanes:
        name = "passes" if lane.kind == PASSES else lane_name(lane, len(plan.stages))
        names.append(_name("thread_name", lane.stage, _THREADS.index(lane.kind), name))
    spans = [_span(lane, event) for lane, events in lanes.items() for event in events]
    return {"displayTimeUnit": "ms", "otherData": {"plan": plan.name}, "traceEvents": names + spans}


def _span(lane: Lane, event: TimelineEvent) -> dict[str, Any]:
    known = {"microbatch": event.microbatch, "chunk": event.chunk}
    number = "" if event.microbatch is None else f" {event.microbatch}"
    return {
        "name": event.kind.replace("_", " ") + number,
        "cat": event.kind,
        "ph": "X",
        "ts": round(event.start_s * 1e6, 6),
        "dur": round((event.end_s - event.start_s) * 1e6, 6),
        "pid": lane.stage,
        "tid": _THREADS.index(lane.kind),
        "args": {key: value for key, value in known.items() if value is not None},
    }


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _ranks(plan: Plan, stage: int) -> str:
    ranks = plan.stages[stage].ranks
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}, {len(ranks)} of them"
