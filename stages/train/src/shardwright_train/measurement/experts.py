"""Time and memory of a layer's experts in isolation, on one rank, with the same number of rows for each expert."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from shardwright.key import ExpertKey
from shardwright.plan.axes import Axis, ParameterAxes
from shardwright.types import ExpertMeasurement, ExpertProbe, Model, Plan, Recompute
from shardwright_train.measurement.profiles import record_memory
from shardwright_train.measurement.timing import clock_for, reference_time_s
from shardwright_train.models.base import Family, family_of
from shardwright_train.models.experts import Sparse, Unseen
from shardwright_train.options import MeasureJob
from shardwright_train.parallel.checkpointing import Recomputation
from shardwright_train.parallel.data import torch_dtype
from shardwright_train.parallel.experts import Counts, Exchange
from shardwright_train.parallel.sharding_rules import cuts
from shardwright_train.parallel.world import World, out_of_memory_said
from shardwright_train.pipeline.runner import StepHook, no_hook

_MAX_STEPS = 200
"""Limit of the steps of a probe, however short they are."""


def measure_experts(
    plan: Plan, probes: Sequence[ExpertProbe], job: MeasureJob, world: World
) -> tuple[ExpertMeasurement, ...]:
    """Measure experts of a plan's model on all ranks at once; each rank returns its own measurement."""
    return tuple(_measure(plan, probe, job, world) for probe in probes)


def _measure(plan: Plan, probe: ExpertProbe, job: MeasureJob, world: World) -> ExpertMeasurement:
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
    """Whether rows come from several ranks, and are not kept as they come."""

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
            # A layer ends so, and needs no results of experts in a replay.
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
    """The module of the experts of a type of layer, with the part of one rank."""
    with torch.device("meta"):
        block = family.build(model, f"layers[{model.layers.index(type_name)}]")
    for cut in cuts(block, family.rules):
        if "ep" in cut.dims:
            numbers = torch.empty(cut.part_shape(axes), dtype=dtype, device=device).normal_(std=0.02)
            setattr(block.get_submodule(cut.owner), cut.name.rpartition(".")[2], nn.Parameter(numbers))
    experts: nn.Module = block.get_submodule("mlp.experts")
    return experts
