"""A prediction of a plan's time and memory, with the proof and the runners-up."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, UnsetType, field

from shardwright.io import Document, Removed, Value
from shardwright.types.limits import Bytes, NonNegativeCount, NonNegativeNumber, Rank, Seconds, Sha256
from shardwright.types.plan import Plan


class StagePrediction(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of a pipeline stage: time of a microbatch and of a step's end, peak memory of a rank, each by term."""

    time_s: Seconds
    """Forward and backward of one microbatch, sends included."""
    time_terms_s: dict[str, Seconds]
    """Terms that `time_s` is made of."""
    memory_bytes: Bytes
    """Peak memory of a rank."""
    memory_terms_bytes: dict[str, Bytes]
    """Terms that `memory_bytes` is made of."""
    host_bytes: Bytes | UnsetType = UNSET
    """Host memory of a rank, which offloaded layers take; omitted if there are none."""


class TimelineEvent(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An action of the simulated step."""

    stage: Rank
    """The pipeline stage; of a message the one that sends it."""
    kind: str
    """`forward`, `backward`, `send_forward` (to the next stage), `send_backward` (to the previous one),
    `gradient_sync`, which may go on beside a backward pass, or `optimizer`."""
    microbatch: NonNegativeCount | None
    """The microbatch it is done for; null if it is for all of them."""
    chunk: NonNegativeCount | None
    """Number of the layer range in the stage's `layers`; null if it is for all of them."""
    start_s: Seconds
    """Time since the step began."""
    end_s: Seconds
    """Time since the step began."""


class Proof(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is proven about a searched plan."""

    objective: str
    """Objective that was minimised, in words."""
    objective_s: Seconds
    """Its value for the chosen plan."""
    objective_bound_s: Seconds
    """No plan in the scope has a lower value."""
    gap: NonNegativeNumber
    """objective_s / objective_bound_s - 1; 0 means optimal."""
    scope: str
    """The space of plans for which it holds."""
    examined: NonNegativeCount
    """Cases (pipeline degree, microbatches, schedule) that were looked at."""
    solved: NonNegativeCount
    """How many of these were solved exactly; the others were ruled out by bounds."""
    split_bound_s: Seconds | UnsetType = UNSET
    """No plan with split backward passes has a lower simulated time; 0: nothing is proven of them; omitted if the
    search did not look for any."""
    second_opinion: str | None = field(default=None, name="certificate")
    """Verdict of the solver HiGHS, which earlier versions asked; read and never written, and unrelated to `verify`."""

    @property
    def nearness(self) -> str:
        """Return, in words, how close to the optimum the plan is proven to be."""
        if not self.objective_bound_s:
            return "not known to be near the optimum"
        return f"within {self.gap:.2%} of the optimum" if self.gap else "optimal"


class Estimate(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted time and memory of one plan under the cost model."""

    simulated_step_time_s: Seconds
    """The event-driven simulation of the plan's action list."""
    simulated_lower_bound_s: Seconds
    """No order of the same actions can take less."""
    objective_s: Seconds
    """The closed form that the search minimises."""
    samples_per_s: NonNegativeNumber
    """Global batch size over the simulated step time."""
    usd_per_step: NonNegativeNumber | None
    """Price of the cluster for one step; null if a node has no price."""
    stages: Annotated[tuple[StagePrediction, ...], Meta(min_length=1)]
    """The pipeline stages, first to last."""
    timeline: tuple[TimelineEvent, ...]
    """The simulated step, by start."""

    @property
    def memory_bytes(self) -> int:
        """Return the peak memory of a rank of the fullest pipeline stage."""
        return max(stage.memory_bytes for stage in self.stages)


class RunnerUp(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best plan of another configuration (pipeline degree, micro-batches, schedule) than the chosen plan's."""

    plan: Plan
    """The plan."""
    estimate: Estimate
    """Prediction for that plan."""


class Prediction(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prediction for a plan, in a separate file next to the plan's."""

    FORMAT = "shardwright.prediction"
    REMOVED: ClassVar[Mapping[str, Removed]] = {"robust": Removed("", ignored=None)}
    VERSION = 3

    plan_sha256: Sha256
    """Identity of the plan: SHA-256 of its canonical JSON."""
    memory_budget_bytes: Bytes | None
    """Bytes that a rank of the fullest pipeline stage may hold; null for a plan that was only evaluated."""
    estimate: Estimate
    """Predicted time and memory of the plan."""
    proof: Proof | None
    """Null for a plan that was not searched."""
    runners_up: tuple[RunnerUp, ...]
    """Plans that were not chosen, the best first; empty if nobody asked for them."""
    warnings: tuple[str, ...]
    """Facts beyond measurements that the prediction leans on, such as extrapolation."""
    inputs_sha256: dict[str, Sha256]
    """SHA-256 of every profile and of the search file, by role."""
    reference_s: Seconds = 0.0
    """Time of the reference workload on the machine as it was profiled; 0 if none was run."""
    versions: str = ""
    """Name and version of the program that predicted; empty in files of earlier versions."""
