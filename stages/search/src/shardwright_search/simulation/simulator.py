"""Event-driven simulation of one step: the very action lists that the runtime executes; its export as a trace."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import ceil, floor, lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.display.timeline import BACK, FORTH, GRADIENTS, PASSES, Lane, by_lane, lane_name
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import Estimate, Plan, Schedule, TimelineEvent

# A backward pass of one pipeline stage, overlapped with the reduction of its gradients, which ends later.


class Reduction(NamedTuple):
    """A layer's backward time, and the time to reduce its gradients, each without overlap."""

    backward_ps: int
    sync_ps: int


class Overlap(NamedTuple):
    """Slowdowns of a backward pass and a reduction that overlap: the ratio to the time without overlap."""

    compute_slowdown: float
    message_slowdown: float


class BackwardPass(NamedTuple):
    """A backward pass and its reductions, in picoseconds since its start."""

    gradient_ps: int
    """Time at which the gradient for the stage before is complete."""
    busy_ps: int
    """Time at which the reductions are over, too."""
    reductions_ps: tuple[tuple[int, int], ...] = ()
    """Begin and end of each reduction that takes time, one after the other."""


def backward_pass(layers: Sequence[Reduction], overlap: Overlap | None, gradient_sync_ps: int = 0) -> BackwardPass:
    """Simulate one pass over `layers`, which are in forward order and so run from the last to the first.

    A reduction waits for its layer's gradients and for the reductions before it. While a reduction and a layer's
    backward pass overlap, each advances at 1 / slowdown; without `overlap` all reductions follow the pass. At the end
    follows `gradient_sync_ps`.
    Every event is rounded up to a picosecond.
    """
    now = begun = 0
    waiting: list[int] = []
    spans: list[tuple[int, int]] = []
    for left, sync_ps in reversed(layers):
        while left and waiting and overlap is not None:
            spent = min(ceil(left * overlap.compute_slowdown), ceil(waiting[0] * overlap.message_slowdown))
            now += spent
            left = _left(left, overlap.compute_slowdown, spent)
            waiting[0] = _left(waiting[0], overlap.message_slowdown, spent)
            if not waiting[0]:
                del waiting[0]
                spans.append((begun, now))
                begun = now
        now += left
        if not waiting:
            begun = now
        if sync_ps:
            waiting.append(sync_ps)
    gradient_ps = now
    if overlap is None:
        begun = now
    for left in (*waiting, gradient_sync_ps):
        now += left
        spans.append((begun, now))
        begun = now
    return BackwardPass(gradient_ps, now, tuple(span for span in spans if span[0] < span[1]))


def _left(work_ps: int, slowdown: float, spent_ps: int) -> int:
    """Return the remaining work after a time at 1 / slowdown."""
    return 0 if spent_ps >= ceil(work_ps * slowdown) else work_ps - floor(spent_ps / slowdown)


_MAX_PASSES = 2**16
"""The most passes of a step that are simulated, unless it has many stages."""
_MIN_ROUNDS = 6
"""The least number of microbatches per stage that are simulated."""
_MAX_ON_TIMELINE = 2**13
"""The most passes that a prediction lists: 2.5 MB of JSON, and more than a picture can show."""


class StageTimes(NamedTuple):
    """Times of one layer range of a pipeline stage, in picoseconds: the whole stage unless it is interleaved."""

    forward_ps: int
    """Forward pass of one microbatch; the backward pass likewise."""
    backward_ps: int
    send_ps: int
    """Message of one microbatch between this range and the next, one way; 0 for the last."""
    gradient_sync_ps: int
    """Reductions when the last microbatch's backward pass and `reductions` are over."""
    optimizer_ps: int
    reductions: tuple[Reduction, ...] = ()
    """The layers of the last microbatch's backward pass, in forward order; () if no layer reduces in it."""
    early_reductions: tuple[Reduction, ...] = ()
    """The layers of every other microbatch's backward pass; () if reduction is deferred."""
    overlap: Overlap | None = None
    """Slowdowns; None if nothing is reduced before the backward pass is over."""
    further_ps: Mapping[Pass, int] = {}
    """Passes of one microbatch other than forward and backward, by kind."""

    def pass_times(self, kind: Pass, last: bool) -> BackwardPass:
        """Return the times of a pass of the last micro-batch, or of another one.

        Raises ValueError for a kind that has no time here.
        """
        if kind is Pass.BACKWARD:
            return self.backward_pass(last)
        time_ps = self.forward_ps if kind is Pass.FORWARD else self.further_ps.get(kind)
        if time_ps is None:
            raise ValueError(f"the schedule has passes of kind {kind}, for which a stage has no time")
        return BackwardPass(time_ps, time_ps)

    def backward_pass(self, last: bool) -> BackwardPass:
        """Return the backward pass of the last micro-batch, or of another one.

        Raises ValueError if the layers' backward passes do not add up to `backward_ps`.
        """
        layers = (self.reductions if last else self.early_reductions) or (Reduction(self.backward_ps, 0),)
        together_ps = sum(layer.backward_ps for layer in layers)
        if together_ps != self.backward_ps:
            raise ValueError(f"the layers' backward passes take {together_ps} ps, the range's {self.backward_ps}")
        return backward_pass(layers, self.overlap, self.gradient_sync_ps if last else 0)


class Event(NamedTuple):
    """An event of a pipeline stage; None if it does not belong to one micro-batch or one chunk.

    `send_forward` and `send_backward` are on the stage's link to the next or to the previous stage.
    """

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
    ranges: Sequence[StageTimes],
    schedule: Schedule,
    num_microbatches: int,
    num_chunks: int = 1,
) -> Simulation:
    """Simulate the schedule: an action starts when its stage is free and its message has arrived.

    `ranges` are in the order a microbatch goes through them (`Schedule.way`).

    Sends are asynchronous: they delay the receiver, not the sender; a link carries one message in a direction at a
    time. Reductions overlap with the backward pass (see `backward_pass`): its message leaves when the backward pass is
    over, and the stage's next pass begins when the reductions are over, too. The optimizer waits for all stages, as
    clipping needs the norm of all gradients.
    """
    num_stages = len(ranges) // num_chunks
    order, way = _order(schedule, num_stages, num_microbatches, num_chunks), schedule.way(num_stages, num_chunks)
    steps = _steps(ranges, schedule)
    times = _run_passes(order, steps, num_stages, num_microbatches)
    events = []
    for slot, then, step, stage, _ in order:
        here, microbatch = steps[step], slot % num_microbatches
        start, there = times.starts[slot], times.arrivals[then]
        _, chunk = way[here.range_number]
        which = None if here.last else microbatch
        events += [
            Event(stage, here.kind, microbatch, chunk, start, start + here.times.gradient_ps),
            Event(stage, f"send_{here.kind}", microbatch, chunk, there - here.send_ps, there),
            *(Event(stage, "gradient_sync", which, chunk, start + a, start + b) for a, b in here.times.reductions_ps),
        ]
    over = max(times.free)
    events += [Event(i, "optimizer", None, None, over, over + last) for i, last in _optimizers(ranges, way)]
    step_ps = max(event.end_ps for event in events[-num_stages:])
    return Simulation(
        tuple(sorted((e for e in events if e.end_ps > e.start_ps), key=lambda e: (e.start_ps, e.stage))), step_ps
    )


def step_time_ps(ranges: Sequence[StageTimes], schedule: Schedule, num_microbatches: int, num_chunks: int = 1) -> int:
    """Return when the last event of `simulate` ends, without making the events.

    If there are very many microbatches, only some are simulated, until the passes repeat themselves; each further
    period adds as much time as the last one. If they do not repeat themselves yet, half of the simulated microbatches
    count as a period.
    """
    num_stages = len(ranges) // num_chunks
    enough = num_played(len(ranges), num_stages, num_microbatches)
    step_ps, starts = _played(ranges, schedule, enough, num_chunks)
    if enough == num_microbatches:
        return step_ps
    period, pace_ps = _period(np.array(starts).reshape(-1, enough), num_stages)
    if num_chunks > 1:  # whole groups of interleaved microbatches
        times = lcm(period, num_stages) // period
        period, pace_ps = period * times, None if pace_ps is None else pace_ps * times
    more = (num_microbatches - enough) // period
    fewer = num_microbatches - more * period
    if fewer != enough:
        step_ps, _ = _played(ranges, schedule, fewer, num_chunks)
    if pace_ps is None:
        before_ps, _ = _played(ranges, schedule, fewer - period, num_chunks)
        pace_ps = step_ps - before_ps
    return max(step_ps + more * pace_ps, lower_bound_ps(ranges, num_microbatches, num_chunks, schedule.turns))


def num_played(num_ranges: int, num_stages: int, num_microbatches: int) -> int:
    """Return the number of micro-batches that `step_time_ps` simulates before it looks for a period, at most all.

    The others are a whole multiple of `num_stages`: how interleaved passes repeat themselves depends on the remainder.
    """
    enough = max(_MIN_ROUNDS * num_stages, _MAX_PASSES // (2 * num_ranges))
    return num_microbatches - max(0, num_microbatches - enough) // num_stages * num_stages


def has_timeline(num_ranges: int, num_stages: int, num_microbatches: int) -> bool:
    """Return whether a step has so few passes, all of them simulated, that a prediction lists them."""
    is_whole = num_played(num_ranges, num_stages, num_microbatches) == num_microbatches
    return is_whole and 2 * num_ranges * num_microbatches <= _MAX_ON_TIMELINE


def _played(
    ranges: Sequence[StageTimes], schedule: Schedule, num_microbatches: int, num_chunks: int
) -> tuple[int, list[int]]:
    """Return when the last event ends, and when each pass starts, by its index on a micro-batch's way."""
    num_stages = len(ranges) // num_chunks
    order = _order(schedule, num_stages, num_microbatches, num_chunks)
    times = _run_passes(order, _steps(ranges, schedule), num_stages, num_microbatches)
    step_ps = max(times.free) + max(last for _, last in _optimizers(ranges, schedule.way(num_stages, num_chunks)))
    return step_ps, times.starts[:-num_microbatches]


def _period(starts: NDArray[np.int64], num_stages: int) -> tuple[int, int | None]:
    """Return the period, in micro-batches, after which all starts [passes, microbatches] repeat with a shift.

    Also return the shift, if it is the same for all passes, else None: GPipe's forward and backward passes differ.
    """
    count = int(starts.shape[1])
    tail = starts[:, count // 3 : count - min(4 * num_stages, count // 3)]  # neither the first nor the last ones
    for period in range(1, int(tail.shape[1]) // 2):
        later = tail[:, period:] - tail[:, :-period]
        if bool((later == later[:, :1]).all()):
            paces = set(later[:, 0].tolist())
            return period, paces.pop() if len(paces) == 1 else None
    return count // 2, None


def lower_bound_ps(
    ranges: Sequence[StageTimes], num_microbatches: int, num_chunks: int = 1, turns: bool = False
) -> int:
    """Return a lower bound of the step time for any order of the passes; `turns`: of chunks in the form of a V.

    Range j starts when the first microbatch has come through the ranges before it. Then its stage does all passes of it
    and of the later ranges that the stage holds, with their reductions. The last of these passes is a backward pass:
    its message, which waits for no reduction, must still go back to each range k < j and be reduced there. Passes
    that send nothing may come before or after that message, but the last such pass of range k comes after it.
    """
    bounds = []
    fill = 0
    way = (Schedule.ZERO_BUBBLE_V if turns else Schedule.INTERLEAVED_1F1B).way(len(ranges) // num_chunks, num_chunks)
    early, last = ([here.backward_pass(is_last) for here in ranges] for is_last in (False, True))
    for j, first in enumerate(ranges):
        stage_ranges = [i for i in range(j, len(ranges)) if way[i][0] == way[j][0]]
        forward = sum(ranges[i].forward_ps for i in stage_ranges)
        reduced = sum((num_microbatches - 1) * early[i].busy_ps + last[i].busy_ps for i in stage_ranges)
        further = sum(num_microbatches * sum(ranges[i].further_ps.values()) for i in stage_ranges)
        drains, back = [further], -max(last[i].busy_ps - last[i].gradient_ps for i in stage_ranges)
        for k in reversed(range(j)):
            drains.append(back + ranges[k].send_ps + last[k].busy_ps + sum(ranges[k].further_ps.values()))
            back += ranges[k].send_ps + last[k].gradient_ps
        bounds.append(fill + num_microbatches * forward + reduced + max(drains))
        fill += first.forward_ps + first.send_ps
    return max(bounds) + max(last_ps for _, last_ps in _optimizers(ranges, way))


def _optimizers(ranges: Sequence[StageTimes], way: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return every stage with the time of its optimizer."""
    times = Counter[int]()
    for here, (stage, _) in zip(ranges, way, strict=True):
        times[stage] += here.optimizer_ps
    return sorted(times.items())


class _Step(NamedTuple):
    """Times of one pass of a microbatch through one range."""

    kind: Pass
    range_number: int
    last: bool
    """True for the last microbatch's step."""
    times: BackwardPass
    send_ps: int


def _steps(ranges: Sequence[StageTimes], schedule: Schedule) -> list[_Step]:
    """Return the steps of a microbatch: each kind of pass through all ranges, first to last or back.

    The steps of the last microbatch follow.
    """
    sends = [here.send_ps for here in ranges[:-1]]
    sends_by_way = {1: [*sends, 0], -1: [0, *sends], 0: [0] * len(ranges)}
    steps = []
    for last in (False, True):
        for kind in schedule_of(schedule).kinds:
            through = list(enumerate(zip(ranges, sends_by_way[kind.way], strict=True)))[:: kind.way or 1]
            steps += [_Step(kind, i, last, here.pass_times(kind, last), send) for i, (here, send) in through]
    return steps


class _OrderedAction(NamedTuple):
    """An action in its place among all stages' actions."""

    slot: int
    """Number of the step on a microbatch's way x microbatches + the microbatch."""
    then: int
    """The slot that its message is for: the slot of the next step, or one in which nothing begins."""
    step: int
    """Number in `_steps`."""
    stage: int
    link: int
    """Number of the link that carries its message."""


@lru_cache(maxsize=16)
def _order(schedule: Schedule, num_stages: int, num_microbatches: int, num_chunks: int) -> tuple[_OrderedAction, ...]:
    """Return the actions of all stages, each after those it depends on; cached, since many plans are simulated."""
    pipeline_schedule, num_ranges = schedule_of(schedule), num_stages * num_chunks
    kinds = pipeline_schedule.kinds
    before, length = {kind: number * num_ranges for number, kind in enumerate(kinds)}, len(kinds) * num_ranges
    way = schedule.way(num_stages, num_chunks)
    index = {place: number for number, place in enumerate(way)}

    def ordered(kind: Pass, microbatch: int, chunk: int, stage: int) -> _OrderedAction:
        through, forward = index[stage, chunk], kind.way > 0
        step = before[kind] + (num_ranges - 1 - through if kind.way < 0 else through)
        # A stage has a link to the next stage and one to the previous stage.
        link = 2 * stage + (forward is not (schedule.turns and chunk % 2 == 1))
        # No link carries what a stage hands to itself at the model's end or between chunks, or the end of the way, and
        # a silent pass sends nothing.
        if not kind.way:
            link = 2 * num_stages + 2
        elif through == (num_ranges - 1 if forward else 0):
            link = 2 * num_stages + forward
        elif way[through + kind.way][0] == stage:
            link = 2 * num_stages + 3 + forward
        last = microbatch == num_microbatches - 1
        slot, then = (at * num_microbatches + microbatch for at in (step, step + 1 if kind.way else length))
        return _OrderedAction(slot, then, step + last * length, stage, link)

    lists = [pipeline_schedule.actions(num_stages, num_microbatches, stage, num_chunks) for stage in range(num_stages)]
    waiting = [[ordered(*action, stage) for action in reversed(actions)] for stage, actions in enumerate(lists)]
    # A pass that sends nothing receives nothing either: it follows the pass that it needs in its stage's list.
    silent = {before[kind] + through for kind in kinds if not kind.way for through in range(num_ranges)}
    come = {step * num_microbatches + i for step in {0, *silent} for i in range(num_microbatches)}
    order: list[_OrderedAction] = []
    while any(waiting):
        for actions in waiting:
            while actions and actions[-1].slot in come:
                order.append(actions.pop())
                come.add(order[-1].then)
    return tuple(order)


class _PassTimes(NamedTuple):
    """Times at which each slot's action starts and its message arrives, and at which each stage is finally free."""

    starts: list[int]
    arrivals: list[int]
    free: list[int]


def _run_passes(
    order: Sequence[_OrderedAction], steps: Sequence[_Step], num_stages: int, num_microbatches: int
) -> _PassTimes:
    """Return the times of all actions in one walk; with plain lists, as this is the search's innermost loop."""
    lengths = [step.times.gradient_ps for step in steps]
    busy = [step.times.busy_ps for step in steps]
    sends = [step.send_ps for step in steps]
    slots = (len(steps) // 2 + 1) * num_microbatches
    starts, arrivals, free, sent = [0] * slots, [0] * slots, [0] * num_stages, [0] * (2 * num_stages + 5)
    for slot, then, step, stage, link in order:
        start = arrivals[slot]
        if free[stage] > start:
            start = free[stage]
        starts[slot] = start
        free[stage] = start + busy[step]
        leaves = start + lengths[step]
        if sent[link] > leaves:
            leaves = sent[link]
        sent[link] = arrivals[then] = leaves + sends[step]
    return _PassTimes(starts, arrivals, free)


# The simulated step as a Chrome trace, which Perfetto and chrome://tracing show.


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
