"""Running plans for some steps and reporting the time and memory they took."""

import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.files import read_document, write_document
from shardwright_formats.measurement import (
    Measurement,
    PlanMeasurement,
    RankMeasurement,
    RankMemory,
    Segment,
    SegmentMemory,
)
from shardwright_formats.plan import Plan, Plans
from shardwright_train.element import Site
from shardwright_train.families import family_named
from shardwright_train.jobs import MeasureJob
from shardwright_train.optimiser import Hyperparameters, ShardedAdamW
from shardwright_train.parallel.groups import Groups
from shardwright_train.parallel.tensor_parallel import local_tensor
from shardwright_train.pipeline import Pipeline, Step, no_mark, run_step
from shardwright_train.record import Interval, MemoryInterval, clock_for, peak_resident_bytes, record_memory
from shardwright_train.stage import Mark, build_stage
from shardwright_train.support import attention_kernel
from shardwright_train.world import World

__all__ = ["StepTiming", "measure_plans", "segments_of_memory", "timing_of_step"]

# Only time and memory are of interest; the weights may go where they like, as long as they stay finite.
_SETTINGS = Hyperparameters(learning_rate=1e-4, warmup_steps=0, steps=1, weight_decay=0.1, clip_norm=1.0)
_SCATTER = 0.1
_MOST_ROUNDS = 3
_FORWARD, _BACKWARD = ".forward", ".backward"


def measure_plans(job: MeasureJob, world: World) -> None:
    """Measure every plan of the job, on all ranks; rank 0 writes the measurement."""
    plans = read_document(Path(job.plans), Plans).plans
    resident = peak_resident_bytes()
    groups = Groups(world.device.type)
    measured = []
    for number, plan in enumerate(plans, start=1):
        measured.append(_measure(plan, job, world, groups, resident))
        gc.collect()
        if world.rank == 0:
            step_s = statistics.median(measured[-1].step_times_s)
            print(f"measured {number}/{len(plans)} {plan.name}: {step_s * 1000:.1f} ms a step", file=sys.stderr)
    if world.rank == 0:
        measurement = Measurement(
            device=world.device_name,
            backend=world.backend,
            torch_version=str(torch.__version__),
            attention=attention_kernel(plans[0]),
            plans=tuple(measured),
        )
        write_document(Path(job.out), measurement)


class _Runner:
    """A plan built on this rank, with a batch to run it on."""

    def __init__(self, plan: Plan, world: World, groups: Groups) -> None:
        self._watch, self._name, self._steps = world.watch, plan.name, 0
        self._watch.begin(f"before the first step of {plan.name}")
        groups.prepare(plan)
        family = family_named(plan.model.family, plan.name)
        self.stage = build_stage(Site(plan, family, world.rank, groups, attention_kernel(plan), world.device, 0))
        self.place = Pipeline.of(plan, world.rank, groups, world.device)
        self.optimiser = ShardedAdamW(self.stage.parameters_by_name(), _SETTINGS, self.stage.copies())
        self.optimiser.begin(0)
        generator = torch.Generator().manual_seed(0)
        self.work = Step(family.random_batch(plan.model, plan.global_batch_size, generator))

    def step(self, mark: Mark) -> int:
        """One step; returns the bytes of its gradients on this rank once they are reduced."""
        self._steps += 1
        self._watch.begin(f"in step {self._steps} of {self._name}")
        mark("start")
        loss = run_step(self.stage, self.place, self.work, mark)
        gradients = sum(_local_bytes(p.grad) for p in self.optimiser.parameters.values() if p.grad is not None)
        mark("reduced")
        self.optimiser.step(1, loss, stop=False)
        mark("optimizer")
        return gradients


def _measure(plan: Plan, job: MeasureJob, world: World, groups: Groups, resident: int) -> PlanMeasurement:
    runner = _Runner(plan, world, groups)
    for _ in range(job.warmup_steps):
        runner.step(no_mark)
    steps = [_timed(runner, world) for _ in range(job.steps)]
    while len(steps) < _MOST_ROUNDS * job.steps and _scatter_anywhere(steps, world):
        steps.append(_timed(runner, world))
    mine = RankMeasurement(
        rank=world.rank,
        stage=runner.place.index,
        step_s=tuple(step.step_s for step in steps),
        segments=tuple(
            Segment(
                name=name,
                forward_s=tuple(step.forward_s[name] for step in steps),
                backward_s=tuple(step.backward_s[name] for step in steps),
            )
            for name in steps[0].forward_s
        ),
        gradient_reduction_s=tuple(s.gradient_reduction_s for s in steps if s.gradient_reduction_s is not None),
        optimizer_s=tuple(step.optimizer_s for step in steps),
        memory=_memory(runner, world, resident),
    )
    every: list[RankMeasurement | None] = [None] * world.size
    dist.all_gather_object(every, mine)
    return PlanMeasurement(plan=plan, ranks=tuple(rank for rank in every if rank is not None))


def _timed(runner: _Runner, world: World) -> "StepTiming":
    dist.barrier()
    clock = clock_for(world.device)
    runner.step(clock.mark)
    return timing_of_step(clock.intervals())


def _scatter_anywhere(steps: Sequence["StepTiming"], world: World) -> bool:
    """Whether on some rank the middle half of the step times spans more than a tenth of their median."""
    times = sorted(step.step_s for step in steps)
    span = times[(3 * len(times)) // 4] - times[len(times) // 4]
    worst = torch.tensor(span / statistics.median(times), device=world.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item() > _SCATTER


@dataclass(frozen=True)
class StepTiming:
    """The times of one step of one rank; by segment they are means over microbatches (see `Segment`)."""

    step_s: float
    forward_s: dict[str, float]
    backward_s: dict[str, float]
    gradient_reduction_s: float | None
    optimizer_s: float


def timing_of_step(intervals: Sequence[Interval]) -> StepTiming:
    """Sort the times between the marks of one step by segment and pass."""
    forward, backward = _by_segment(intervals, _FORWARD), _by_segment(intervals, _BACKWARD)
    passes = [sum(times) for times in zip(*backward.values(), strict=True)]
    return StepTiming(
        step_s=sum(i.time_s for i in intervals),
        forward_s={name: statistics.fmean(times[1:] or times) for name, times in forward.items()},
        backward_s={name: statistics.fmean(times[:-1] or times) for name, times in backward.items()},
        gradient_reduction_s=passes[-1] - statistics.fmean(passes[:-1]) if len(passes) > 1 else None,
        optimizer_s=next(i.time_s for i in intervals if i.name == "optimizer"),
    )


def segments_of_memory(intervals: Sequence[MemoryInterval]) -> tuple[SegmentMemory, ...]:
    """What the second microbatch (or the only one) left behind and held for a moment in each segment.

    The first microbatch also gathers parameters and makes gradients, which are counted as states.
    """
    found = []
    for name in dict.fromkeys(i.name.removesuffix(_FORWARD) for i in intervals if i.name.endswith(_FORWARD)):
        forward = [i for i in intervals if i.name == name + _FORWARD][:2][-1]
        backward = [i for i in intervals if i.name == name + _BACKWARD][:2][-1]
        found.append(
            SegmentMemory(
                name=name,
                activation_bytes=max(0, forward.after - forward.before),
                forward_transient_bytes=forward.peak - max(forward.before, forward.after),
                backward_transient_bytes=backward.peak - backward.before,
            )
        )
    return tuple(found)


def _by_segment(intervals: Sequence[Interval], suffix: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, time_s in intervals:
        if name.endswith(suffix):
            found.setdefault(name.removesuffix(suffix), []).append(time_s)
    return found


def _memory(runner: _Runner, world: World, resident: int) -> RankMemory:
    parameters = sum(_local_bytes(p) for p in runner.optimiser.parameters.values())
    held = parameters + runner.optimiser.state_bytes
    with record_memory(world.device) as recording:
        gradients = runner.step(recording.mark)
    intervals = recording.intervals
    process = 0
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        process = total - free - torch.cuda.memory_reserved(world.device)
    return RankMemory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=runner.optimiser.state_bytes,
        peak_bytes=held + max(i.peak for i in intervals),
        segments=segments_of_memory(intervals),
        process_bytes=process,
        resident_bytes=resident,
    )


def _local_bytes(x: Tensor) -> int:
    local = local_tensor(x)
    return local.numel() * local.element_size()
