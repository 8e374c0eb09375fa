"""Running plans for some steps and reporting the time and memory they took."""

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from shardwright_formats.io.errors import ShardwrightError
from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.io.versions import versions_text
from shardwright_formats.types.measurement import Measurement, PlanMeasurement, RankMeasurement, RankMemory, Segment
from shardwright_formats.types.plan import Attention, Plan, Plans
from shardwright_launch.ranks import allocator_setting
from shardwright_train.data.share import on_host
from shardwright_train.engine.engine import Engine, build_engine, say_compiled
from shardwright_train.measurement.journal import open_journal
from shardwright_train.measurement.memory import record_memory, segments_of_memory
from shardwright_train.measurement.reference import reference_time_s
from shardwright_train.measurement.timing import StepTiming, clock_for, timing_of_step
from shardwright_train.measurement.trace import trace_file, traced
from shardwright_train.models.attention_kernels import check_kernels, settle_attention
from shardwright_train.models.registry import family_named
from shardwright_train.options import MeasureJob
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World, check_device, out_of_memory_said, peak_resident_bytes
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import MicrobatchChunk, Step, StepHook, no_hook

_SCATTER = 0.1
_MOST_ROUNDS = 3


def measure_plans(job: MeasureJob, world: World) -> None:
    """Measure every plan of the job, on all ranks; rank 0 writes the measurement."""
    plans = read_document(job.plans[0], Plans).plans
    resident = peak_resident_bytes()
    kernels = _agreed_kernels(plans, world)
    taken = (kernel for plan, kernel in zip(plans, kernels, strict=True) if plan.attention is Attention.AUTO)
    versions = versions_text(("torch", "transformers"), on_gpu=world.device.type == "cuda")
    journal = open_journal(job, world, versions)
    measured = [journal.find(plan.sha256) for plan in plans]
    if (known := sum(found is not None for found in measured)) and world.rank == 0:
        print(f"{known} of {len(plans)} plans were measured before", file=sys.stderr)
    for number, (plan, kernel) in enumerate(zip(plans, kernels, strict=True)):
        if measured[number] is not None:
            continue
        with out_of_memory_said(plan.sha256), _alone(world.device) as groups:
            measured[number] = found = _measure(plan, kernel, job, world, groups, resident)
        journal.add([found])
        if world.rank == 0:
            step_s = statistics.median(found.step_times_s)
            taken_s = f"{step_s * 1000:.1f} ms a step, the reference workload {found.reference_s * 1000:.1f} ms"
            print(f"measured {number + 1}/{len(plans)} {plan.name}: {taken_s}", file=sys.stderr)
    if world.rank == 0:
        measurement = Measurement(
            device=world.device_name,
            backend=world.backend,
            date=datetime.now(UTC).date().isoformat(),
            versions=versions,
            attention=next(taken, kernels[0]),
            allocator=allocator_setting(os.environ) if world.device.type == "cuda" else "",
            plans=tuple(found for found in measured if found is not None),
        )
        write_document(job.out, measurement)


@contextmanager
def _alone(device: torch.device) -> Iterator[Groups]:
    """Groups for one plan; what it leaves behind on the device is given back before the next."""
    groups = Groups(device.type)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield groups
    gc.collect()
    groups.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _agreed_kernels(plans: Sequence[Plan], world: World) -> tuple[str, ...]:
    problem: ShardwrightError | None = None
    try:
        for plan in plans:
            check_device(plan, world, plan.name)
            check_kernels(plan, family_named(plan.model.family, plan.name), world.device, plan.name)
    except ShardwrightError as error:
        problem = error
    world.agree(problem)
    return settle_attention(plans, world)


@dataclass
class _Runner:
    """A plan built on this rank, with a batch to run it on."""

    engine: Engine
    work: Step
    world: World
    standing_bytes: int
    """Tensor memory that building it has left on CPU."""
    steps: int = 0

    @classmethod
    def build(cls, plan: Plan, kernel: str, world: World, groups: Groups) -> "_Runner":
        world.heartbeat.begin(f"before the first step of {plan.name}")
        family = family_named(plan.model.family, plan.name)
        generator = torch.Generator().manual_seed(0)
        context = RankContext(
            plan=plan, family=family, rank=world.rank, groups=groups, attention=kernel, device=world.device, seed=0
        )
        batch = family.learns(plan.model).random_batch(plan.global_batch_size, generator)
        work = Step.of(on_host(batch, world.device), context.share)
        with record_memory(world.device) as record:
            record.hook("start")
            engine = build_engine(context)
            assert engine.optimizer
            record.hook("built")
        return cls(engine, work, world, record.intervals[-1].after_bytes)

    def step(self, hook: StepHook) -> None:
        self.steps += 1
        self.world.heartbeat.begin(f"in step {self.steps} of {self.engine.stage.context.plan.name}")
        started = time.perf_counter()
        self.engine.train_step(self.work, hook=hook)
        plan = self.engine.stage.context.plan
        if plan.compile and self.world.rank == 0 and self.steps == 1:
            say_compiled(plan, time.perf_counter() - started)


def _measure(plan: Plan, kernel: str, job: MeasureJob, world: World, groups: Groups, resident: int) -> PlanMeasurement:
    runner = _Runner.build(plan, kernel, world, groups)
    for _ in range(job.warmup_steps):
        runner.step(no_hook)
    reference_time_s(world.device)  # the first one also loads kernels
    steps = [_timed(runner) for _ in range(job.steps)]
    while _too_short(steps, job, world) or (len(steps) < _MOST_ROUNDS * job.steps and _scatter_anywhere(steps, world)):
        steps.append(_timed(runner))
    mine = RankMeasurement(
        rank=world.rank,
        stage=runner.engine.stage.context.stage_index,
        step_s=tuple(step.step_s for step in steps),
        reference_s=tuple(step.reference_s for step in steps),
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
        passes=steps[_median_repeat(steps, world)].passes,
        memory=_memory(runner, resident),
    )
    if job.trace is not None:
        dist.barrier()
        with traced(world.device, world.rank, trace_file(job.trace, plan, world.rank)) as hook:
            runner.step(hook)
    every: list[RankMeasurement | None] = [None] * world.size
    dist.all_gather_object(every, mine)
    return PlanMeasurement(plan=plan, ranks=tuple(rank for rank in every if rank is not None))


def _timed(runner: _Runner) -> StepTiming:
    reference_s = reference_time_s(runner.world.device)
    dist.barrier()
    clock = clock_for(runner.world.device)
    runner.step(clock.hook)
    return timing_of_step(clock.intervals(), reference_s)


def _too_short(steps: Sequence[StepTiming], job: MeasureJob, world: World) -> bool:
    """Whether the slowest rank has not yet measured for as long as it was asked to."""
    spent = torch.tensor(sum(step.step_s for step in steps), device=world.device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item() < job.min_time_s


def _scatter_anywhere(steps: Sequence[StepTiming], world: World) -> bool:
    """Whether on some rank the middle half of the step times spans more than a tenth of their median."""
    times = sorted(step.step_s for step in steps)
    span = times[(3 * len(times)) // 4] - times[len(times) // 4]
    worst = torch.tensor(span / statistics.median(times), device=world.device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item() > _SCATTER


def _median_repeat(steps: Sequence[StepTiming], world: World) -> int:
    """The repeat that `PlanMeasurement.median_repeat` will name, before all ranks' measurements are put together."""
    slowest = torch.tensor([step.step_s for step in steps], dtype=torch.float64, device=world.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    times: list[float] = slowest.tolist()
    return times.index(statistics.median_low(times))


def _memory(runner: _Runner, resident: int) -> RankMemory:
    device, optimizer = runner.world.device, runner.engine.optimizer
    gradients = 0
    with record_memory(device, runner.standing_bytes) as record:

        def hook(name: str, at: MicrobatchChunk | None = None) -> None:
            nonlocal gradients
            record.hook(name, at)
            if name == "reduced":
                gradients = sum(
                    local_tensor(p.grad).nbytes for p in optimizer.parameters.values() if p.grad is not None
                )

        runner.step(hook)
    used = reserved = peak_reserved = 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used, reserved = total - free, torch.cuda.memory_reserved(device)
        peak_reserved = max(record.peak_reserved_bytes, torch.cuda.max_memory_reserved(device))
    return RankMemory(
        parameters_bytes=sum(local_tensor(p).nbytes for p in optimizer.parameters.values()),
        gradients_bytes=gradients,
        optimizer_bytes=optimizer.state_bytes,
        peak_bytes=max(interval.peak_bytes for interval in record.intervals),
        segments=segments_of_memory(record.intervals),
        process_bytes=used - reserved,
        peak_reserved_bytes=peak_reserved,
        device_used_bytes=used,
        resident_bytes=resident,
    )
