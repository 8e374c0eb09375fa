"""A prediction of a plan's time and memory, with the proof and the runners-up."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, UnsetType, field

from shardwright.io import Document, Removed, Value
from shardwright.types.limits import (
    Bytes,
    Count,
    NonNegativeCount,
    NonNegativeNumber,
    Number,
    PositiveNumber,
    Rank,
    Seconds,
    Sha256,
)
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


# A certificate: dual values and cuts from which the lower bound of a search is confirmed without searching.


Weight = Annotated[float, Meta(ge=0, le=1e15)]
"""A dual value."""
Picoseconds = Annotated[float, Meta(gt=0, le=1e21)]


class MemoryPrice(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dual value of a pipeline stage's memory at one moment, or at a mixture of two."""

    ps_per_byte: Weight
    """Cost of a byte."""
    phase: Annotated[int, Meta(ge=0, le=1)] = 0
    """0: all microbatches that the stage has in flight; 1: one less, if the stage has all of the step in flight."""
    last_layer: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The share of the moment at the stage's last layer; the rest is the moment at its first."""


Prices = tuple[tuple[MemoryPrice, ...], ...]
"""Prices by pipeline stage, or one entry for all; of each run of layers the price that bounds it most counts."""


class Band(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of times of the slowest stage, and the dual values that bound all plans in it."""

    slowest_below_ps: Picoseconds | None
    """Upper end of the range, whose lower end is that of the band before, or 0 for the first. Null: unlimited."""
    slowest_weights: tuple[Weight, ...]
    """Dual values of being no slower than the slowest, by pipeline stage, or one for all."""
    exposed_weights: tuple[Weight, ...]
    """Dual values, by pipeline stage or one for all, of the constraint that no stage's end is longer than the
    longest."""
    prices: Prices
    """Prices of memory, for the cost with these weights."""


class ConfigurationProof(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dual values that show that no plan of a configuration is below the bound."""

    configuration: str
    """Batch, micro-batches, pipeline degree and whatever else the search fixes first."""
    layouts: bool
    """True if moving between layouts has its cost; else it counts as free."""
    time_prices: Prices
    """Prices of memory for the least time of a microbatch in a stage."""
    bands: Annotated[tuple[Band, ...], Meta(min_length=1)]
    """Ascending; together every plan."""


class Certificate(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A certificate that no plan of a search's space is faster than a bound, by its closed form."""

    FORMAT = "shardwright.certificate"

    plan_sha256: Sha256
    """The plan that the search chose."""
    inputs_sha256: dict[str, Sha256]
    """The search file and the profiles that the bound is about, by role."""
    bound_ps: Annotated[float, Meta(ge=1, le=1e21)]
    """No plan has a lower closed form: a step of the plan's batch size, or as much for a sample."""
    configurations: Annotated[tuple[ConfigurationProof, ...], Meta(min_length=1)]
    """Every configuration of the space, in the order of the search."""
    split_bound_ps: Picoseconds | UnsetType = UNSET
    """No plan with split backward passes has a lower simulated time; omitted if nothing is confirmed of them."""
    split_configurations: tuple[ConfigurationProof, ...] = ()
    """Proofs of it: of the slowest stage, or of a weighted mean of stages, for every pipeline of the space."""


# Corrections of predictions by measured plans: a factor for each term, stored separately from profiles.


class Term(StrEnum):
    """A term of a prediction that measurements can distinguish from other terms."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT_SYNC = "gradient_sync"
    STEP_END = "step_end"
    MEMORY = "memory"


class CorrectionFactor(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured over predicted: the median over the measured plans, each plan being the median of its ranks.

    Of the end of a step, where all ranks wait for the slowest, a plan is the least of its ranks.
    """

    factor: PositiveNumber
    """The median over the plans; for memory at most what lets each plan that ran fit its devices."""
    lowest: Number
    """Factor of the plan with the lowest one; not positive if noise exceeds what was measured."""
    highest: PositiveNumber
    """Factor of the plan with the highest."""
    num_plans: Count
    """Different plans that were measured."""
    num_ranks: Count
    """Ranks that were measured, over all plans."""

    def __post_init__(self) -> None:
        if not self.lowest <= self.factor <= self.highest:
            raise ValueError(f"factor {self.factor} is not between {self.lowest} and {self.highest}")


class Correction(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratios of measured plans to their predictions from two profiles; valid only for these profiles."""

    FORMAT = "shardwright.correction"

    factors: dict[Term, CorrectionFactor]
    """Factors by term; terms about which no measured plan is informative are omitted.

    `forward` and `backward`: one microbatch's pass through a rank's layers, less what gathers and moves between layouts
    are predicted to take; `gradient_sync`: what reducing gradients adds to a step; `step_end`: the optimizer's step
    with the step's overhead, which holds the optimizer's fixed part; `memory`: the peak of a rank, process included.
    """
    plans_sha256: Annotated[tuple[Sha256, ...], Meta(min_length=1)]
    """The plans that were measured."""
    measurements_sha256: Annotated[tuple[Sha256, ...], Meta(min_length=1)]
    """The files they were read from."""
    hardware_sha256: Sha256
    """The hardware profile that they were predicted with."""
    profiles_sha256: Annotated[tuple[Sha256, ...], Meta(min_length=1)]
    """The model profiles that they were predicted with."""
    warnings: tuple[str, ...]
    """Factors whose evidence is thin."""
