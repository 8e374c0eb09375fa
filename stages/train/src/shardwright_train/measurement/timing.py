"""Timing of steps by segment and pass, with a reference workload before each step, also of alternating plans."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardwright.launch.accelerator import CPU, GPU
from shardwright.launch.backend import on_accelerator
from shardwright.plan.differences import MAX_RELATIVE_ERROR, paired_difference
from shardwright.plan.schedules.passes import Pass, middle
from shardwright.types import PassTime, RankMeasurement, RankMemory, Segment
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.runner import MicrobatchChunk

_FORWARD, _BACKWARD = ".forward", ".backward"
_REPEATS = 4
"""Repeats of the workload: together as long as a small model's step, which an interruption of 10 ms hardly changes."""
_SCATTER = 0.1
_MAX_SCATTERED = 3
"""Largest number of steps of a plan measured by itself, if times scatter, as a multiple of the requested steps."""
MAX_AGAIN = 2
"""Largest number of repetitions of the first rounds for plans that are measured alternately."""
_LAYERS = "layers"


class Interval(NamedTuple):
    """The time from the previous event to the event `name`."""

    name: str
    at: MicrobatchChunk | None
    start_s: float
    """Seconds since the first event."""
    time_s: float


class Clock(Protocol):
    """A clock that records events and returns the times between them."""

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        """Record an event."""

    def intervals(self) -> list[Interval]:
        """Return the times between the events so far, after waiting for the device."""


class _HostClock:
    """A clock for devices that compute in the calling thread."""

    def __init__(self) -> None:
        self._events: list[tuple[str, MicrobatchChunk | None, float]] = []

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        self._events.append((name, at, time.perf_counter()))

    def intervals(self) -> list[Interval]:
        first, pairs = self._events[0][-1], pairwise(self._events)
        return [Interval(name, at, before - first, after - before) for (*_, before), (name, at, after) in pairs]


class _DeviceClock:
    """A clock for accelerators: events on the current stream, read after it is done."""

    def __init__(self) -> None:
        self._events: list[tuple[str, MicrobatchChunk | None, torch.Event]] = []

    def hook(self, name: str, at: MicrobatchChunk | None = None) -> None:
        event = torch.Event(enable_timing=True)
        event.record()
        self._events.append((name, at, event))

    def intervals(self) -> list[Interval]:
        torch.accelerator.synchronize()
        first = self._events[0][-1]
        return [
            Interval(name, at, first.elapsed_time(before) / 1000, before.elapsed_time(after) / 1000)
            for (*_, before), (name, at, after) in pairwise(self._events)
        ]


def clock_for(device: torch.device) -> Clock:
    """Return a clock for a device."""
    return _DeviceClock() if on_accelerator(device) else _HostClock()


@dataclass(frozen=True)
class StepTiming:
    """The times of one step of one rank; segment times are means over middle micro-batches (see `Segment`)."""

    reference_s: float
    """Seconds of the reference workload, just before the step."""
    step_s: float
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    gradient_reduction_s: float | None
    optimizer_s: float
    passes: tuple[PassTime, ...]


def timing_of_step(intervals: Sequence[Interval], reference_s: float) -> StepTiming:
    """Return the times of one step by segment and pass; a microbatch's chunks are added up."""
    forward, backward = _by_segment(intervals, _FORWARD), _by_segment(intervals, _BACKWARD)
    passes = [sum(times) for times in zip(*backward.values(), strict=True)]
    reduced_less_s = statistics.fmean(middle(passes, Pass.BACKWARD))
    # Reductions begin in the last backward pass and are waited for after it.
    waited_s = sum(i.time_s for i in intervals if i.name == "reduced")
    return StepTiming(
        reference_s=reference_s,
        step_s=sum(i.time_s for i in intervals),
        forward_s={name: statistics.fmean(middle(times, Pass.FORWARD)) for name, times in forward.items()},
        backward_s={name: statistics.fmean(middle(times, Pass.BACKWARD)) for name, times in backward.items()},
        gradient_reduction_s=passes[-1] - reduced_less_s + waited_s if len(passes) > 1 else None,
        optimizer_s=next(i.time_s for i in intervals if i.name == "optimizer"),
        passes=tuple(_passes(intervals)),
    )


def _by_segment(intervals: Sequence[Interval], suffix: str) -> dict[str, list[float]]:
    """Return the times of each segment, one per microbatch in the order of the microbatches."""
    by_segment: dict[str, dict[int, float]] = {}
    for interval in intervals:
        if interval.name.endswith(suffix) and interval.at is not None:
            microbatch, _ = interval.at
            times = by_segment.setdefault(interval.name.removesuffix(suffix), {})
            times[microbatch] = times.get(microbatch, 0.0) + interval.time_s
    return {name: [times[microbatch] for microbatch in sorted(times)] for name, times in by_segment.items()}


def _passes(intervals: Sequence[Interval]) -> Iterator[PassTime]:
    waited: Interval | None = None
    for interval in intervals:
        match interval.name.partition("."):
            case ("forward" | "backward", _, "wait") | ("weight", _, "begin"):
                waited = interval
            case ("forward" | "backward" | "weight" as kind, _, "end"):
                assert waited is not None and interval.at is not None
                start_s = waited.start_s + waited.time_s
                microbatch, chunk = interval.at
                yield PassTime(
                    kind=kind,
                    microbatch=microbatch,
                    chunk=chunk,
                    wait_s=waited.time_s,
                    start_s=start_s,
                    time_s=interval.start_s + interval.time_s - start_s,
                )


class _Workload(NamedTuple):
    """A workload like layers and optimizers: products of square matrices, then sums of vectors that exceed caches."""

    dtype: torch.dtype
    side: int
    products: int
    numel: int
    sums: int


_WORKLOADS = {
    CPU: _Workload(torch.float32, side=256, products=40, numel=1 << 20, sums=20),
    GPU: _Workload(torch.float16, side=4096, products=40, numel=1 << 24, sums=100),
}
"""Workload by device type, about 15 ms on a processor core and on an H100; only times of equal ones are comparable."""


def reference_time_s(device: torch.device) -> float:
    """Return the mean seconds of the reference workload on this rank's device while all ranks run it; collective.

    Between training steps its tensors use memory that activations have freed.
    """
    work = _WORKLOADS[device.type]
    factor = torch.ones(work.side, work.side, dtype=work.dtype, device=device)
    product = torch.empty_like(factor)
    terms, total = torch.ones(work.numel, device=device), torch.zeros(work.numel, device=device)
    dist.barrier()
    clock = clock_for(device)
    clock.hook("start")
    for _ in range(_REPEATS):
        for _ in range(work.products):
            torch.mm(factor, factor, out=product)
        for _ in range(work.sums):
            torch.add(total, terms, out=total)
    clock.hook("reference")
    return sum(interval.time_s for interval in clock.intervals()) / _REPEATS


Taken = tuple[list[StepTiming], ...]
"""Timed steps of each plan; steps of equal index belong to one round."""


class Measured(NamedTuple):
    """The timed steps of some plans."""

    steps: Taken
    again: int
    """Number of times that the first rounds were repeated."""


class Limits(NamedTuple):
    """The limits of the duration of a measurement."""

    steps: int
    min_time_s: float
    """Minimum seconds for each plan; for alternating plans, of their mean."""
    of_all_ranks: Callable[[float], float]
    """Function that returns the largest value over all ranks; collective."""


def measure_in_turns(
    step: Sequence[Callable[[], StepTiming]], limits: Limits, forward_only: Collection[int] = ()
) -> Measured:
    """Measure one step of each plan in turn, until all have been measured for long enough.

    A plan measured by itself is measured for longer if its step times scatter. Several plans are compared with the
    first one: if the difference in layer time has too large an error, all are measured again. `forward_only`: indices
    of plans whose additional layers have no backward pass.
    """
    taken: Taken = tuple([] for _ in step)
    while len(taken[0]) < limits.steps or limits.of_all_ranks(_spent_s(taken)) < limits.min_time_s * len(taken):
        _round(step, taken)
    if len(taken) == 1:
        while len(taken[0]) < _MAX_SCATTERED * limits.steps and limits.of_all_ranks(_scatter(taken[0])) > _SCATTER:
            _round(step, taken)
        return Measured(taken, 0)
    again, rounds = 0, len(taken[0])
    while again < MAX_AGAIN and limits.of_all_ranks(largest_error(taken, forward_only)) > MAX_RELATIVE_ERROR:
        for _ in range(rounds):
            _round(step, taken)
        again += 1
    return Measured(taken, again)


def largest_error(taken: Taken, forward_only: Collection[int] = ()) -> float:
    """Return the largest relative error, in either pass, of the difference between two plans' layer times."""
    forward = [[step.forward_s[_LAYERS] for step in steps] for steps in taken]
    compared = (steps for place, steps in enumerate(taken) if place not in forward_only)
    backward = [[step.backward_s[_LAYERS] for step in steps] for steps in compared]
    pairs = [(first, other) for first, *others in (forward, backward) for other in others]
    return max(paired_difference(*pair).relative_error for pair in pairs)


def _round(step: Sequence[Callable[[], StepTiming]], taken: Taken) -> None:
    for measure, steps in zip(step, taken, strict=True):
        steps.append(measure())


def _spent_s(taken: Taken) -> float:
    return sum(step.step_s for steps in taken for step in steps)


def _scatter(steps: Sequence[StepTiming]) -> float:
    """Return the spread of the middle half of the step times, as a fraction of the median."""
    times = sorted(step.step_s for step in steps)
    return (times[(3 * len(times)) // 4] - times[len(times) // 4]) / statistics.median(times)


def rank_measurements(
    steps: Sequence[StepTiming], stage: int, memory: RankMemory, world: World
) -> tuple[RankMeasurement, ...]:
    """Return the times and memory of all ranks in the steps of a plan; collective."""
    names = steps[0].forward_s
    mine = RankMeasurement(
        rank=world.rank,
        stage=stage,
        step_s=tuple(step.step_s for step in steps),
        reference_s=tuple(step.reference_s for step in steps),
        segments=tuple(
            Segment(
                name=name,
                forward_s=tuple(step.forward_s[name] for step in steps),
                backward_s=tuple(step.backward_s[name] for step in steps),
            )
            for name in names
        ),
        gradient_reduction_s=tuple(s.gradient_reduction_s for s in steps if s.gradient_reduction_s is not None),
        optimizer_s=tuple(step.optimizer_s for step in steps),
        passes=steps[_median_repeat(steps, world)].passes,
        memory=memory,
    )
    return tuple(world.all_say(mine, RankMeasurement))


def _median_repeat(steps: Sequence[StepTiming], world: World) -> int:
    """Return the step that `PlanMeasurement.median_repeat` will give when all ranks' measurements are combined."""
    slowest = torch.tensor([step.step_s for step in steps], dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times: list[float] = slowest.tolist()
    return times.index(statistics.median_low(times))
