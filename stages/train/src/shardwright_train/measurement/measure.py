"""Running plans for some steps and reporting the time and memory they took."""

import gc
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_formats.io.errors import ShardwrightError
from shardwright_formats.io.json import read_document, write_document
from shardwright_formats.io.versions import versions_text
from shardwright_formats.types.measurement import Measurement, PlanMeasurement, RankMeasurement, RankMemory, Segment
from shardwright_formats.types.plan import Attention, Plan, Plans
from shardwright_train.engine import build_engine
from shardwright_train.measurement.journal import open_journal
from shardwright_train.measurement.memory_account import Category, Holdings, MemoryInterval, memory_intervals
from shardwright_train.measurement.record import clock_for, peak_resident_bytes
from shardwright_train.measurement.record_memory import record_memory, sizes_by_address
from shardwright_train.measurement.step_memory import phases_of_memory, segments_of_memory
from shardwright_train.measurement.timing import StepTiming, timing_of_step
from shardwright_train.measurement.trace import trace_file, traced
from shardwright_train.models.attention_kernels import check_kernels, settle_attention
from shardwright_train.models.registry import family_named
from shardwright_train.options import MeasureJob
from shardwright_train.parallel.data import local_tensor
from shardwright_train.parallel.fsdp_memory import gathered_parameters, unreduced_gradients
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.world import World
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import MicrobatchChunk, Step, StepHook, no_hook

__all__ = ["measure_plans"]

_SCATTER = 0.1
_MOST_ROUNDS = 3


def measure_plans(job: MeasureJob, world: World) -> None:
    """Measure every plan of the job, on all ranks; rank 0 writes the measurement."""
    plans = read_document(job.plans[0], Plans).plans
    resident = peak_resident_bytes()
    groups = Groups(world.device.type)
    kernels = _agreed_kernels(plans, world)
    taken = (kernel for plan, kernel in zip(plans, kernels, strict=True) if plan.attention is Attention.AUTO)
    head = Measurement(
        device=world.device_name,
        backend=world.backend,
        date=datetime.now(UTC).date().isoformat(),
        versions=versions_text(("torch", "transformers"), on_gpu=world.device.type == "cuda"),
        attention=next(taken, kernels[0]),
        plans=(),
    )
    journal = open_journal(job, world, head.versions)
    measured = [journal.find(plan.sha256) for plan in plans]
    if (known := sum(found is not None for found in measured)) and world.rank == 0:
        print(f"{known} of {len(plans)} plans were measured before", file=sys.stderr)
    for number, (plan, kernel) in enumerate(zip(plans, kernels, strict=True)):
        if measured[number] is not None:
            continue
        measured[number] = found = _measure(plan, kernel, job, world, groups, resident)
        gc.collect()
        journal.add([found])
        if world.rank == 0:
            step_s = statistics.median(found.step_times_s)
            print(f"measured {number + 1}/{len(plans)} {plan.name}: {step_s * 1000:.1f} ms a step", file=sys.stderr)
    if world.rank == 0:
        every = tuple(found for found in measured if found is not None)
        write_document(job.out, msgspec.structs.replace(head, plans=every))


def _agreed_kernels(plans: Sequence[Plan], world: World) -> tuple[str, ...]:
    problem: ShardwrightError | None = None
    try:
        for plan in plans:
            check_kernels(plan, family_named(plan.model.family, plan.name), world.device, plan.name)
    except ShardwrightError as error:
        problem = error
    world.agree(problem)
    return settle_attention(plans, world)


class _Runner:
    """A plan built on this rank, with a batch to run it on."""

    def __init__(self, plan: Plan, kernel: str, work: Step, world: World, groups: Groups) -> None:
        self._heartbeat, self._name, self._steps = world.heartbeat, plan.name, 0
        self.work = work
        context = RankContext(
            plan=plan,
            family=family_named(plan.model.family, plan.name),
            rank=world.rank,
            groups=groups,
            attention=kernel,
            device=world.device,
            seed=0,
        )
        self.engine = build_engine(context)
        self.stage, self.optimizer = self.engine.stage, self.engine.optimizer

    def step(self, hook: StepHook) -> int:
        """One step; returns the bytes of its gradients on this rank once they are reduced."""
        self._steps += 1
        self._heartbeat.begin(f"in step {self._steps} of {self._name}")
        gradients = 0

        def counting(name: str, at: MicrobatchChunk | None = None) -> None:
            nonlocal gradients
            if name == "reduced":
                gradients = sum(_local_bytes(p.grad) for p in self.optimizer.parameters.values() if p.grad is not None)
            hook(name, at)

        self.engine.train_step(self.work, hook=counting)
        return gradients

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the copies of parameters for compute that are held now."""
        return self._bytes_of(gathered_parameters)

    @property
    def unreduced_bytes(self) -> int:
        """Bytes of the gradients that wait for their reduction now."""
        return self._bytes_of(unreduced_gradients)

    def lasting(self) -> Holdings:
        """What parameters and optimizer hold, between steps and in them."""
        return {
            Category.PARAMETERS: sizes_by_address(map(local_tensor, self.optimizer.parameters.values())),
            Category.OPTIMIZER: sizes_by_address(map(local_tensor, self.optimizer.state().values())),
        }

    @torch.no_grad()
    def passing(self) -> Holdings:
        """What gradients and, among the buffers, gathered parameters hold now."""
        owned = (p for chunk in self.stage.chunks for p in chunk.parameters())
        reduced = (p.grad for p in (*owned, *self.optimizer.parameters.values()) if p.grad is not None)
        unreduced = (x for chunk in self.stage.chunks for x in unreduced_gradients(chunk))
        gathered = (x for chunk in self.stage.chunks for x in gathered_parameters(chunk))
        reductions = (x.parallel.gradient_all_reduce for x in self.stage.layers if x.parallel.gradient_all_reduce)
        summed = (x for reduction in reductions for x in reduction.resident())
        return {
            Category.GRADIENTS: sizes_by_address(map(local_tensor, (*reduced, *unreduced, *summed))),
            Category.BUFFERS: sizes_by_address(gathered),
        }

    def _bytes_of(self, tensors_of: Callable[[torch.nn.Module], Iterable[Tensor]]) -> int:
        return sum(sum(sizes_by_address(map(local_tensor, tensors_of(chunk))).values()) for chunk in self.stage.chunks)


def _measure(plan: Plan, kernel: str, job: MeasureJob, world: World, groups: Groups, resident: int) -> PlanMeasurement:
    runner, building = _built(plan, kernel, world, groups)
    for _ in range(job.warmup_steps):
        runner.step(no_hook)
    steps = [_timed(runner, world) for _ in range(job.steps)]
    while _too_short(steps, job, world) or (len(steps) < _MOST_ROUNDS * job.steps and _scatter_anywhere(steps, world)):
        steps.append(_timed(runner, world))
    mine = RankMeasurement(
        rank=world.rank,
        stage=runner.stage.context.stage_index,
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
        passes=steps[_median_repeat(steps, world)].passes,
        memory=_memory(runner, building, world, resident),
    )
    if job.trace is not None:
        dist.barrier()
        with traced(world.device, world.rank, trace_file(job.trace, plan, world.rank)) as hook:
            runner.step(hook)
    every: list[RankMeasurement | None] = [None] * world.size
    dist.all_gather_object(every, mine)
    return PlanMeasurement(plan=plan, ranks=tuple(rank for rank in every if rank is not None))


def _built(plan: Plan, kernel: str, world: World, groups: Groups) -> tuple[_Runner, list[MemoryInterval]]:
    """The plan on this rank, and the memory that building it took."""
    world.heartbeat.begin(f"before the first step of {plan.name}")
    generator = torch.Generator().manual_seed(0)
    batch = (
        family_named(plan.model.family, plan.name).learns(plan.model).random_batch(plan.global_batch_size, generator)
    )
    runner: _Runner | None = None
    with record_memory(world.device, lambda: runner.lasting() if runner else {}) as record:
        record.hook("start")
        runner = _Runner(plan, kernel, Step(batch), world, groups)
        record.hook("model")
    return runner, memory_intervals(record.items, {}, 0)


def _timed(runner: _Runner, world: World) -> StepTiming:
    dist.barrier()
    clock = clock_for(world.device)
    runner.step(clock.hook)
    return timing_of_step(clock.intervals())


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


def _memory(runner: _Runner, building: Sequence[MemoryInterval], world: World, resident: int) -> RankMemory:
    gathered = unreduced = 0
    standing = runner.lasting()
    with record_memory(world.device, runner.passing) as record:

        def hook(name: str, at: MicrobatchChunk | None = None) -> None:
            nonlocal gathered, unreduced
            if name.endswith(".begin"):
                gathered, unreduced = max(gathered, runner.gathered_bytes), max(unreduced, runner.unreduced_bytes)
            record.hook(name, at)

        gradients = runner.step(hook)
    # What the model stands in beside parameters and optimizer stays as it was when the model was made.
    intervals = memory_intervals(record.items, standing, building[-1].after.buffers_bytes)
    phases = phases_of_memory(building, intervals)
    process = 0
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        process = total - free - torch.cuda.memory_reserved(world.device)
    return RankMemory(
        parameters_bytes=sum(_local_bytes(p) for p in runner.optimizer.parameters.values()),
        gradients_bytes=gradients,
        optimizer_bytes=runner.optimizer.state_bytes,
        gathered_parameters_bytes=gathered,
        unreduced_gradients_bytes=unreduced,
        peak_bytes=max(i.peak.total_bytes for i in intervals),
        phases=phases,
        segments=segments_of_memory(intervals),
        process_bytes=process,
        resident_bytes=resident,
    )


def _local_bytes(x: Tensor) -> int:
    local = local_tensor(x)
    return local.numel() * local.element_size()
