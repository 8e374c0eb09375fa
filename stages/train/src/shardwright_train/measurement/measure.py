"""Measurement of plans: each runs for some steps, and its times and memory are written to a journal immediately.

The experts of a layer are also measured separately.
"""

import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import UNSET, UnsetType
from torch import Tensor, nn

from shardwright.io import Value, read_document, write_document
from shardwright.io.versions import versions_text
from shardwright.key import ExpertKey
from shardwright.launch.backend import on_accelerator
from shardwright.launch.journal import Journal, JournalKind, Kept
from shardwright.launch.ranks import allocator_setting
from shardwright.plan.axes import Axis, ParameterAxes
from shardwright.types.measurement import Measurement, PlanMeasurement, RankMemory
from shardwright.types.model import Model
from shardwright.types.plan import Attention, ExpertMeasurement, ExpertProbe, Plan, Plans
from shardwright.types.strategy import Recompute
from shardwright_train.data.share import on_host
from shardwright_train.engine.engine import Engine, build_engine, say_compiled
from shardwright_train.measurement import timing
from shardwright_train.measurement.profiles import record_memory, segments_of_memory, trace_file, traced
from shardwright_train.measurement.timing import clock_for, reference_time_s
from shardwright_train.models.attention_kernels import check_kernels, kernels_run, settle_attention
from shardwright_train.models.base import Family, family_of
from shardwright_train.models.experts import Sparse, Unseen
from shardwright_train.options import MeasureJob
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.parallel.experts import Counts, Exchange
from shardwright_train.parallel.process_groups import Groups
from shardwright_train.parallel.sharding_rules import cuts
from shardwright_train.parallel.world import World, check_device, out_of_memory_said, peak_resident_bytes
from shardwright_train.pipeline.layer import RankContext
from shardwright_train.pipeline.runner import MicrobatchChunk, Step, StepHook, no_hook

_Places = tuple[int, ...]


def measure_plans(job: MeasureJob, world: World) -> None:
    """Measure every plan of the job, on all ranks; rank 0 writes the measurement."""
    asked = read_document(job.plans[0], Plans)
    plans, resident = asked.plans, peak_resident_bytes()
    stands_for = {probe.plan: probe.cp_size for probe in asked.context or ()}
    kernels = _agreed_kernels(plans, world)
    taken = (kernel for plan, kernel in zip(plans, kernels, strict=True) if plan.attention is Attention.AUTO)
    versions = versions_text(("torch", "transformers"), on_gpu=on_accelerator(world.device))
    device = plans[0].cluster.of_rank(0).device
    journal = open_journal(job, world, device, versions)
    measured = [journal.find(plan.sha256) for plan in plans]
    if (known := sum(measurement is not None for measurement in measured)) and world.rank == 0:
        print(f"{known} of {len(plans)} plans were already measured", file=sys.stderr)
    for places in _in_turns(asked):
        if all(measured[place] is not None for place in places):
            continue
        asked_now = [(plans[place], kernels[place], stands_for.get(place, 1)) for place in places]
        group = _measure(asked_now, job, world, resident)
        for place, measurement in zip(places, group, strict=True):
            measured[place] = measurement
        journal.add(group)
        if world.rank == 0:
            _say_measured(places, group, len(plans))
    experts: tuple[ExpertMeasurement, ...] | UnsetType = UNSET
    if asked.experts is not UNSET:
        experts = measure_experts(plans[0], asked.experts, job, world)
    if world.rank == 0:
        complete = Measurement(
            device=device,
            backend=world.backend,
            date=datetime.now(UTC).date().isoformat(),
            versions=versions,
            attention=next(taken, kernels[0]),
            attention_by=_attention_by(plans, kernels, world),
            allocator=allocator_setting(os.environ) if on_accelerator(world.device) else "",
            plans=tuple(measurement for measurement in measured if measurement is not None),
            experts=experts,
        )
        write_document(job.out, complete)


def _attention_by(plans: Sequence[Plan], kernels: Sequence[str], world: World) -> str:
    """Return the names of the kernels that computed attention, each once, separated by semicolons.

    Context probes, which attend in blocks as across ranks, are named by their plan's kernel.
    """
    ran = (kernels_run(plan, Attention(kernel), world.device) for plan, kernel in zip(plans, kernels, strict=True))
    return "; ".join(dict.fromkeys(filter(None, ran)))


def _in_turns(asked: Plans) -> Iterator[_Places]:
    """Yield the indices of plans that are measured alternately, ordered by the first; most groups have one plan."""
    groups = {min(group): group for group in asked.in_turns}
    others = {place for group in asked.in_turns for place in group} - groups.keys()
    for place in range(len(asked.plans)):
        if place not in others:
            yield groups.get(place, (place,))


def _say_measured(places: _Places, measured: Sequence[PlanMeasurement], count: int) -> None:
    for place, one in zip(places, measured, strict=True):
        step_s = statistics.median(one.step_times_s)
        taken_s = f"{step_s * 1000:.1f} ms a step, the reference workload {one.reference_s * 1000:.1f} ms"
        others = [str(other + 1) for other in places if other != place]
        turns = f", in turns with {' and '.join(others)}" if others else ""
        again = f", measured again {one.measured_again} of {timing.MAX_AGAIN} times" if one.measured_again else ""
        print(f"measured {place + 1}/{count} {one.plan.name}: {taken_s}{turns}{again}", file=sys.stderr)


def _agreed_kernels(plans: Sequence[Plan], world: World) -> tuple[str, ...]:
    def check() -> None:
        for plan in plans:
            check_device(plan, world, plan.name)
            check_kernels(plan, family_of(plan.model, plan.name), world.device, plan.name)

    world.together(check)
    return settle_attention(plans, world)


@dataclass
class _Runner:
    """A plan built on this rank with its process groups and a batch, until it is closed."""

    engine: Engine
    work: Step
    world: World
    groups: Groups
    standing_bytes: int
    """Bytes of tensors on CPU after building the plan, without optimizer states in host memory."""
    steps: int = 0

    @classmethod
    def build(cls, plan: Plan, kernel: str, stands_for: int, world: World, warmup_steps: int) -> "_Runner":
        world.heartbeat.begin(f"before the first step of {plan.name}")
        groups = Groups(world.device.type)
        if on_accelerator(world.device):
            torch.accelerator.reset_peak_memory_stats(world.device)
        family = family_of(plan.model, plan.name)
        generator = torch.Generator().manual_seed(0)
        context = RankContext(
            plan=plan,
            family=family,
            rank=world.rank,
            groups=groups,
            # Attention across ranks uses sdpa's kernels in blocks, whatever the kernel for a rank's own positions.
            attention=kernel if stands_for == 1 else Attention.SDPA.value,
            device=world.device,
            seed=0,
            stands_for=stands_for,
        )
        with out_of_memory_said(plan.sha256):
            batch = family.learns(plan.model).random_batch(plan.global_batch_size, generator)
            work = Step.of_batch(on_host(batch, world.device), context.share)
            with record_memory(world.device) as record:
                record.hook("start")
                engine = build_engine(context)
                assert engine.optimizer
                record.hook("built")
        # On CPU the record includes what is in host memory.
        hosted = sum(x.nbytes for states in engine.optimizer.host_states for x in states.values())
        runner = cls(engine, work, world, groups, record.intervals[-1].after_bytes - hosted)
        for _ in range(warmup_steps):
            runner.step(no_hook)
        return runner

    @property
    def plan(self) -> Plan:
        return self.engine.stage.context.plan

    def step(self, hook: StepHook) -> None:
        self.steps += 1
        plan = self.plan
        self.world.heartbeat.begin(f"in step {self.steps} of {plan.name}")
        started = time.perf_counter()
        with out_of_memory_said(plan.sha256):
            self.engine.train_step(self.work, hook=hook)
        if plan.compile and self.world.rank == 0 and self.steps == 1:
            say_compiled(plan, time.perf_counter() - started)

    def timed(self) -> timing.StepTiming:
        reference_s = timing.reference_time_s(self.world.device)
        dist.barrier()
        clock = timing.clock_for(self.world.device)
        self.step(clock.hook)
        return timing.timing_of_step(clock.intervals(), reference_s)

    def trace(self, folder: Path) -> None:
        dist.barrier()
        with traced(self.world.device, self.world.rank, trace_file(folder, self.plan, self.world.rank)) as hook:
            self.step(hook)

    def close(self) -> None:
        """Free the plan's device memory, including its communicators' buffers."""
        del self.engine, self.work
        gc.collect()
        self.groups.close()
        if on_accelerator(self.world.device):
            torch.accelerator.empty_cache()


def _measure(
    asked: Sequence[tuple[Plan, str, int]], job: MeasureJob, world: World, resident: int
) -> tuple[PlanMeasurement, ...]:
    """Measure plans, all built at once, step by step alternately; the memory of each is recorded separately.

    `asked`: each plan, its attention kernel, and the number of ranks of which each rank represents one.
    """
    memory: dict[int, RankMemory] = {}
    runners = [_Runner.build(*asked[0], world, job.warmup_steps)]
    if len(asked) > 1:
        memory[0] = _memory(runners[0], resident)
    runners += [_Runner.build(*each, world, job.warmup_steps) for each in asked[1:]]
    timing.reference_time_s(world.device)  # the first call also loads kernels
    limits = timing.Limits(job.steps, job.min_time_s, lambda value: _of_all_ranks(value, world))
    measured = timing.measure_in_turns([runner.timed for runner in runners], limits, _forward_only(asked))
    if job.trace is not None:
        for runner in runners:
            runner.trace(job.trace)
    stages = [runner.engine.stage.context.stage_index for runner in runners]
    last = runners.pop()
    while runners:
        runners.pop(0).close()
    memory[len(asked) - 1] = _memory(last, resident)
    last.close()
    for place in range(1, len(asked) - 1):
        alone = _Runner.build(*asked[place], world, job.warmup_steps)
        memory[place] = _memory(alone, resident)
        alone.close()
    plans = tuple(plan for plan, *_ in asked)
    return tuple(
        PlanMeasurement(
            plan=plan,
            ranks=timing.rank_measurements(steps, stages[place], memory[place], world),
            in_turns=tuple(other.sha256 for other in plans) if len(plans) > 1 else (),
            measured_again=measured.again,
            cp_size=UNSET if asked[place][2] == 1 else asked[place][2],
        )
        for place, (plan, steps) in enumerate(zip(plans, measured.steps, strict=True))
    )


def _forward_only(asked: Sequence[tuple[Plan, str, int]]) -> list[int]:
    """Return the indices of plans that differ from the first one by layers without a backward pass."""
    further = [Counter(plan.model.layers) - Counter(asked[0][0].model.layers) for plan, *_ in asked]
    types = asked[0][0].model.types
    return [place for place, more in enumerate(further) if more and not any(types[kind].has_backward for kind in more)]


def _of_all_ranks(value: float, world: World) -> float:
    """Return the largest value of all ranks."""
    largest = torch.tensor(value, dtype=torch.float64, device=world.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _memory(runner: _Runner, resident: int) -> RankMemory:
    device, optimizer = runner.world.device, runner.engine.optimizer
    gradients = 0
    with record_memory(device, runner.standing_bytes) as record:

        def hook(name: str, at: MicrobatchChunk | None = None) -> None:
            nonlocal gradients
            record.hook(name, at)
            if name == "reduced":
                gradients = optimizer.gradient_bytes

        runner.step(hook)
    used = reserved = peak_reserved = 0
    if on_accelerator(device):
        free, total = torch.get_device_module(device).mem_get_info(device)
        used, reserved = total - free, torch.accelerator.memory_reserved(device)
        peak_reserved = max(record.peak_reserved_bytes, torch.accelerator.max_memory_reserved(device))
    return RankMemory(
        parameters_bytes=optimizer.parameter_bytes,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer.state_bytes,
        peak_bytes=max(interval.peak_bytes for interval in record.intervals),
        segments=segments_of_memory(record.intervals),
        process_bytes=used - reserved,
        peak_reserved_bytes=peak_reserved,
        device_used_bytes=used,
        resident_bytes=resident,
    )


class MeasureIdentity(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that must be equal for a plan's earlier measurement to be reused."""

    steps: int
    warmup_steps: int
    min_time_s: float
    device: str
    backend: str
    versions: str


_KIND: JournalKind[MeasureIdentity, PlanMeasurement] = JournalKind(
    format="shardwright.measure_journal",
    run="measurement",
    identity=MeasureIdentity,
    entry=PlanMeasurement,
    key=lambda measurement: (measurement.plan.sha256,),
)


def open_journal(
    job: MeasureJob, world: World, device: str, versions: str
) -> Journal[MeasureIdentity, PlanMeasurement]:
    """Return a measurement's journal, the same on every rank; it restarts if settings, device or versions differ."""
    identity = MeasureIdentity(
        steps=job.steps,
        warmup_steps=job.warmup_steps,
        min_time_s=job.min_time_s,
        device=device,
        backend=world.backend,
        versions=versions,
    )
    kept = world.first_says(lambda: _KIND.read(job.journal, identity, anew=True), Kept[PlanMeasurement])
    return Journal(job.journal if world.rank == 0 else None, _KIND, identity, kept)


# Time and memory of only a layer's experts, on one rank, with the same number of rows for each expert.


_MAX_STEPS = 200
"""Largest number of steps of a probe, however short they are."""


def measure_experts(
    plan: Plan, probes: Sequence[ExpertProbe], job: MeasureJob, world: World
) -> tuple[ExpertMeasurement, ...]:
    """Measure experts of a plan's model on all ranks at once; each rank returns its own measurement."""
    return tuple(_measure_probe(plan, probe, job, world) for probe in probes)


def _measure_probe(plan: Plan, probe: ExpertProbe, job: MeasureJob, world: World) -> ExpertMeasurement:
    world.heartbeat.begin(f"while {ExpertKey.from_fields(probe)} compute {probe.rows} rows")
    with out_of_memory_said():
        run = _Run.build(plan, probe, world.device)
        for _ in range(job.warmup_steps):
            run.step(no_hook)
        reference_s = reference_time_s(world.device)
        clock, began = clock_for(world.device), time.monotonic()
        clock.hook("start")
        steps = 0
        while steps < job.steps or (time.monotonic() - began < job.min_time_s and steps < _MAX_STEPS):
            run.step(clock.hook)
            steps += 1
        times = {name: [i.time_s for i in clock.intervals() if i.name == name] for name in ("forward", "backward")}
        activation, workspace = run.memory()
    return ExpertMeasurement(
        probe=probe,
        forward_s=tuple(times["forward"]),
        backward_s=tuple(times["backward"]),
        activation_bytes=activation,
        workspace_bytes=workspace,
        reference_s=reference_s,
    )


@dataclass(frozen=True)
class _Run:
    """The experts of one rank, with the rows that it receives, and the gradient of their results."""

    compute: Callable[[Tensor, Tensor], Tensor]
    rows: Tensor
    weights: Tensor
    is_exchanged: bool
    """Whether rows come from several ranks: then only their sorted copy is kept."""

    @classmethod
    def build(cls, plan: Plan, probe: ExpertProbe, device: torch.device) -> "_Run":
        model, dtype = plan.model, torch_dtype(plan.precision.compute)
        family = family_of(model, plan.name)
        assert isinstance(family, Sparse)
        whole = model.types[probe.type].experts
        assert whole
        parts = Axis(whole.number // probe.experts)
        axes = ParameterAxes(tensor=Axis(probe.etp_size), states=Axis(1), shards=1, experts=parts)
        experts = _experts(family, model, probe.type, axes, dtype, device)
        share, more = divmod(probe.rows, probe.experts)
        each = [share + (i < more) for i in range(probe.experts)]
        counts = Counts(torch.tensor(each, dtype=torch.int32, device=device), lambda _: each)
        order = torch.arange(probe.rows, device=device).flip(0)
        away = Exchange(None, None, (), (), (), order, order, counts)
        is_exchanged = axes.experts.size > 1 or axes.tensor.size > 1

        def compute(rows: Tensor, weights: Tensor, recomputation: Recomputation) -> Tensor:
            if is_exchanged:
                rows, weights = away.there(rows), away.there(weights)
            results = family.compute_experts(experts, rows, Unseen(weights), counts, recomputation)
            # A layer ends in the same way: its replay does not need the results of experts.
            return recomputation.sum(lambda output: output, away.back(results) if is_exchanged else results)

        hidden = model.boundary[0].features
        wide = torch.promote_types(torch.float32, dtype)
        return cls(
            compute=_recomputed(compute, probe.recompute),
            rows=torch.randn(probe.rows, hidden, dtype=dtype, device=device).requires_grad_(),
            weights=torch.rand(probe.rows, dtype=wide, device=device).requires_grad_(),
            is_exchanged=is_exchanged,
        )

    @cached_property
    def gradient(self) -> Tensor:
        return torch.randn_like(self.rows)

    def step(self, hook: StepHook) -> int:
        """Run a forward and a backward pass; return the bytes of the results between them."""
        self.rows.grad = self.weights.grad = None
        hook("start")
        results = self.compute(self.rows, self.weights)
        hook("forward")
        results.backward(self.gradient)
        hook("backward")
        return results.nbytes

    def memory(self) -> tuple[int, int]:
        """Return the bytes saved between the passes, and the peak in excess of them."""
        with record_memory(self.rows.device) as record:
            results_bytes = self.step(record.hook)
        passes = {interval.name: interval for interval in record.intervals}
        forward, backward = passes["forward"], passes["backward"]
        kept = forward.after_bytes - forward.before_bytes - results_bytes
        peak = max(forward.peak_bytes, backward.peak_bytes) - forward.before_bytes
        received = 0 if self.is_exchanged else self.rows.nbytes + self.weights.nbytes
        return max(0, kept + received), max(0, peak - kept)


def _recomputed(compute: Callable[..., Tensor], recompute: Recompute) -> Callable[[Tensor, Tensor], Tensor]:
    recomputation = Recomputation(keeps_last=False, parts=recompute.parts)
    plain = partial(compute, recomputation=recomputation)
    match recompute:
        case _ if recompute is Recompute.FULL or recompute.half is Recompute.MLP:
            return partial(recomputation.full, plain)
        case Recompute.SELECTIVE:
            return partial(recomputation.selective, plain)
        case _ if recompute.parts:
            return partial(recomputation.by_part, plain)
        case _:
            return plain


def _experts(
    family: Family, model: Model, type_name: str, axes: ParameterAxes, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Return the module of a layer type's experts, with one rank's part of the parameters."""
    with torch.device("meta"):
        block = family.build(model, f"layers[{model.layers.index(type_name)}]")
    for cut in cuts(block, family.rules):
        if "ep" in cut.dims:
            numbers = torch.empty(cut.part_shape(axes), dtype=dtype, device=device).normal_(std=0.02)
            setattr(block.get_submodule(cut.owner), cut.name.rpartition(".")[2], nn.Parameter(numbers))
    experts: nn.Module = block.get_submodule("mlp.experts")
    return experts
