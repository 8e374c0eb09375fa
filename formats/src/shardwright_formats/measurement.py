"""What running plans took: time by microbatch and segment, memory by category, for every rank."""

from typing import Annotated

from msgspec import Meta

from shardwright_formats.files import Document, Value
from shardwright_formats.plan import Plan

__all__ = ["Measurement", "PlanMeasurement", "RankMeasurement", "RankMemory", "Segment", "SegmentMemory"]

Seconds = Annotated[float, Meta(ge=0)]
Bytes = Annotated[int, Meta(ge=0)]


class Segment(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One microbatch's way through the embedding, the layers or the head of a rank, one entry per repeat.

    Each entry is the mean over a step's microbatches, without the first one's forward pass, which also gathers
    parameters, and without the last one's backward pass, which also reduces gradients (a step of one microbatch has no
    others, and there they are inside).
    """

    name: str
    """`embedding`, `layers` or `head`."""
    forward_s: tuple[Seconds, ...]
    """Time of the forward pass of one microbatch."""
    backward_s: tuple[Seconds, ...]
    """Time of the backward pass of one microbatch, its recomputation included."""


class SegmentMemory(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor memory of one microbatch's way through a segment of a rank."""

    name: str
    """`embedding`, `layers` or `head`."""
    activation_bytes: Bytes
    """What the forward pass left behind for the backward pass."""
    forward_transient_bytes: Bytes
    """The most that was held in the forward pass beyond what stood before and what was left behind."""
    backward_transient_bytes: Bytes
    """The most that was held in the backward pass beyond what stood when it began."""


class RankMemory(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor memory of one rank, counted by the allocator; on CPU by its recorded allocations."""

    parameters_bytes: Bytes
    """Parameters as stored between steps."""
    gradients_bytes: Bytes
    """Gradients as they stand before the optimizer's step."""
    optimizer_bytes: Bytes
    """Optimizer state."""
    peak_bytes: Bytes
    """The most held at once in a step, parameters, gradients and optimizer state included."""
    segments: tuple[SegmentMemory, ...]
    """The memory of each segment that the rank's pipeline stage has."""
    process_bytes: Bytes
    """Device memory outside the tensors (0 on CPU, where the process is counted in resident_bytes)."""
    resident_bytes: Bytes
    """Host memory of the process before the model was made."""


class RankMeasurement(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's share of a measured plan; lists have one entry per repeat."""

    rank: Annotated[int, Meta(ge=0)]
    """Number of the rank in the plan."""
    stage: Annotated[int, Meta(ge=0)]
    """The rank's pipeline stage."""
    step_s: Annotated[tuple[Seconds, ...], Meta(min_length=1)]
    """Time of a whole step, from one barrier to the next."""
    segments: tuple[Segment, ...]
    """The time of each segment that the rank's pipeline stage has."""
    gradient_reduction_s: tuple[float, ...]
    """How much longer the last microbatch's backward pass took than the others' mean; empty with one microbatch."""
    optimizer_s: tuple[Seconds, ...]
    """Gradient clipping and the optimizer's step."""
    memory: RankMemory
    """Taken in a step of its own that is not timed."""


class PlanMeasurement(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one plan took."""

    plan: Plan
    """What was run."""
    ranks: Annotated[tuple[RankMeasurement, ...], Meta(min_length=1)]
    """Every rank of the plan, in order."""

    def __post_init__(self) -> None:
        if [r.rank for r in self.ranks] != list(range(self.plan.world_size)):
            raise ValueError(f"measured ranks {[r.rank for r in self.ranks]} of a plan for {self.plan.world_size}")
        if len({len(r.step_s) for r in self.ranks}) != 1:
            raise ValueError("the ranks have different numbers of repeats")

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Time of each step: that of its slowest rank."""
        return tuple(max(times) for times in zip(*(r.step_s for r in self.ranks), strict=True))

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest rank, process included."""
        return max(r.memory.peak_bytes + r.memory.process_bytes for r in self.ranks)


class Measurement(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plans that were run for some steps, on what and with what result."""

    FORMAT = "shardwright.measurement"

    device: str
    """The device's name as its driver gives it, or `cpu`."""
    backend: str
    """What carried the collectives: `gloo` or `nccl`."""
    torch_version: str
    """The version of PyTorch that ran the plans."""
    attention: str
    """The kernel that was taken where the plan said `auto`."""
    plans: Annotated[tuple[PlanMeasurement, ...], Meta(min_length=1)]
    """One entry per plan, in the order they were asked for."""
