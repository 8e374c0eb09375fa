"""Measurements of plans: time by microbatch, segment and pass, memory by segment, for every rank."""

from statistics import fmean, median, median_low
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from shardwright.io import Document, Value
from shardwright.types.limits import (
    Bytes,
    NonNegativeCount,
    PositiveSeconds,
    Rank,
    Seconds,
    SeveralRanks,
    SignedSeconds,
)
from shardwright.types.plan import ExpertMeasurement, Plan


class Segment(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of a micro-batch in the embedding, the layers or the head of a rank, one entry per repeat.

    Each entry is the mean over a step's `middle` micro-batches. The first and the last are left out: the first forward
    pass also gathers parameters, the first backward pass adds to no gradients yet, and the last backward pass also
    reduces them. With two micro-batches, the entry has the time of the second forward or the first backward pass; with
    one, the times include all of this.
    """

    name: str
    """`embedding`, `layers` or `head`."""
    forward_s: tuple[Seconds, ...]
    """Time of the forward pass of one microbatch."""
    backward_s: tuple[Seconds, ...]
    """Time of the backward pass of one microbatch, its recomputation included."""


class PassTime(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pass of one micro-batch through one layer range of a rank's pipeline stage, in one step.

    The rank waited from `start_s - wait_s` to `start_s`, and the pass ended at `start_s + time_s`.
    """

    kind: Literal["forward", "backward", "weight"]
    """Kind of the pass."""
    microbatch: NonNegativeCount
    """Number of the microbatch."""
    chunk: NonNegativeCount
    """Number of the layer range in the stage's `layers`."""
    wait_s: Seconds
    """Time spent waiting for messages at the start of the pass; close to zero if there were none."""
    start_s: Seconds
    """Time from the rank's start of the step until the messages had arrived and computing began."""
    time_s: Seconds
    """Time of computing and of communication during the pass: gathers, reductions and exchanges between the stage's
    ranks."""


class SegmentMemory(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor memory of one micro-batch in the embedding, the layers or the head of a rank."""

    name: str
    """`embedding`, `layers` or `head`."""
    activation_bytes: Bytes
    """Bytes that the forward pass kept for the backward pass."""
    forward_workspace_bytes: Bytes
    """Peak of the forward pass, minus what was resident before it and what it kept."""
    backward_workspace_bytes: Bytes
    """Peak of the backward pass, minus what was resident when it began."""


class RankMemory(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor memory of one rank, counted by the allocator, or on CPU by its recorded allocations."""

    parameters_bytes: Bytes
    """Parameters as stored between steps."""
    gradients_bytes: Bytes
    """Gradients just before the optimizer's step."""
    optimizer_bytes: Bytes
    """Optimizer state."""
    peak_bytes: Bytes
    """The most that is resident at once in a step, including parameters, gradients and optimizer state."""
    segments: tuple[SegmentMemory, ...]
    """The memory of each segment that the rank's pipeline stage has."""
    process_bytes: Bytes
    """Device memory outside the tensors (0 on CPU, where the process is counted in resident_bytes)."""
    peak_reserved_bytes: Bytes
    """The most device memory that the allocator reserved during the steps, including freed memory that it kept for
    reuse (0 on CPU)."""
    device_used_bytes: Bytes
    """Memory of the device in use after the last step, by this and all other processes, as nvidia-smi shows it (0 on
    CPU)."""
    resident_bytes: Bytes
    """Host memory of the process before the model was built."""


class RankMeasurement(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part of a plan's measurement; lists have one entry per repeat."""

    rank: Rank
    """Number of the rank in the plan."""
    stage: Rank
    """The rank's pipeline stage."""
    step_s: Annotated[tuple[Seconds, ...], Meta(min_length=1)]
    """Time of a whole step, from one barrier to the next."""
    reference_s: Annotated[tuple[PositiveSeconds, ...], Meta(min_length=1)]
    """Time of the reference workload right before each step, which shows how fast the device was."""
    segments: tuple[Segment, ...]
    """The time of each segment that the rank's pipeline stage has."""
    gradient_reduction_s: tuple[SignedSeconds, ...]
    """Time of the last micro-batch's backward pass beyond the `middle` ones, including the waiting after it.

    Empty if there is one micro-batch.
    """
    optimizer_s: tuple[Seconds, ...]
    """Time of gradient clipping and the optimizer's step."""
    passes: tuple[PassTime, ...]
    """The passes of one step, in order; the step is the repeat `median_repeat` of the plan."""
    memory: RankMemory
    """Memory, measured in a separate step that is not timed."""


class PlanMeasurement(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured times and memory of one plan."""

    plan: Plan
    """Plan that was run."""
    ranks: Annotated[tuple[RankMeasurement, ...], Meta(min_length=1)]
    """Every rank of the plan, in order."""
    in_turns: tuple[str, ...] = ()
    """SHA-256 of the plans that were stepped alternately with this one, including this one, the reference plan first;
    steps of equal number belong to one round. Empty if it was measured by itself."""
    measured_again: NonNegativeCount = 0
    """Number of times that all of these plans were measured again because the difference of their times was
    uncertain."""
    cp_size: SeveralRanks | UnsetType = UNSET
    """Number of ranks over which longer samples would be split; each measured rank represented one of them, and had the
    keys of all of them. Omitted if the plan was run as it is."""

    def __post_init__(self) -> None:
        if [r.rank for r in self.ranks] != list(range(self.plan.world_size)):
            raise ValueError(
                f"ranks {[r.rank for r in self.ranks]} were measured, but the plan has {self.plan.world_size}"
            )
        if len({len(times) for r in self.ranks for times in (r.step_s, r.reference_s)}) != 1:
            raise ValueError("the ranks have different numbers of repeats")
        for rank in self.ranks:
            self._check_passes(rank)

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Return the time of each step in seconds, which is the slowest rank's time."""
        return tuple(max(times) for times in zip(*(r.step_s for r in self.ranks), strict=True))

    @property
    def reference_s(self) -> float:
        """Return the time of the reference workload during the measurement: mean of the ranks, median of the steps.

        The slowest rank's time would overstate the effect on a step: ranks wait for each other many times in a step, so
        that another process on one of two cores makes a step 1.4 times as long, not twice.
        """
        return float(median(self.reference_times_s))

    @property
    def reference_times_s(self) -> tuple[float, ...]:
        """Return the reference time before each step in seconds, as the mean of the ranks."""
        return tuple(fmean(times) for times in zip(*(r.reference_s for r in self.ranks), strict=True))

    def slowdown(self, reference_s: float) -> float:
        """Return the time of the reference workload here over `reference_s`, another machine's time; 1 if that is 0."""
        return self.reference_s / reference_s if reference_s else 1.0

    @property
    def median_repeat(self) -> int:
        """Return the index of the repeat with the median step time (the lower of two), the earliest of equal ones."""
        times = self.step_times_s
        return times.index(median_low(times))

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of the rank with the most, including the process's memory outside of tensors."""
        return max(r.memory.peak_bytes + r.memory.process_bytes for r in self.ranks)

    def _check_passes(self, rank: RankMeasurement) -> None:
        stage = next(i for i, stage in enumerate(self.plan.stages) if rank.rank in stage.ranks)
        if rank.stage != stage:
            raise ValueError(f"rank {rank.rank} belongs to stage {stage}, not {rank.stage}")
        chunks = range(len(self.plan.stages[stage].layers))
        microbatches = range(self.plan.num_microbatches)
        kinds = ("backward", "forward", *["weight"] * self.plan.schedule.splits)
        wanted = [(kind, i, chunk) for kind in kinds for i in microbatches for chunk in chunks]
        if sorted((p.kind, p.microbatch, p.chunk) for p in rank.passes) != wanted:
            raise ValueError(
                f"rank {rank.rank} has {len(rank.passes)} passes instead of each of the plan's {len(wanted)} once"
            )


class PlanFailure(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan whose measurement failed."""

    plan: Plan
    """Plan that was run."""
    category: Literal["out_of_memory"]
    """Kind of the failure."""
    rank: Rank
    """The first rank that failed."""
    where: str
    """What the rank was doing: `before the first step of ...` or `in step 2 of ...`."""
    asked_bytes: Bytes | None
    """Size of the allocation that failed, to three digits; null if PyTorch did not report it."""


class Measurement(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plans that were run for some steps: the machine, and the results."""

    FORMAT = "shardwright.measurement"
    VERSION = 6

    device: str
    """The device's name as its driver gives it, or `cpu`."""
    backend: str
    """Backend of the collectives: `gloo` or `nccl`."""
    date: str
    """UTC day on which the last plan was run, such as 2026-01-31."""
    versions: str
    """Versions of the software and the device's driver, such as `torch 2.13.0, transformers 5.17.0, driver 550.54`."""
    attention: str
    """The attention kernel that was used for plans with `attention: auto`."""
    attention_by: str = ""
    """The kernels that PyTorch's scaled_dot_product_attention chose, such as `cudnn`; empty for other attention, and in
    files of earlier versions."""
    allocator: str
    """Settings of PyTorch's allocator of device memory, such as `expandable_segments:True`; empty on CPU."""
    plans: tuple[PlanMeasurement, ...]
    """Plans that were measured, in the order in which they were requested."""
    failed: tuple[PlanFailure, ...] = ()
    """Plans whose measurement failed, in the order in which they were requested."""
    experts: tuple[ExpertMeasurement, ...] | UnsetType = UNSET
    """Experts that were measured by themselves; omitted if there are none."""

    def __post_init__(self) -> None:
        if not self.plans and not self.failed:
            raise ValueError("no plan was measured, and none failed")
