"""A prediction of a plan's time and memory, with a proof of how good the plan is, and the next best plans."""

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
    """Predictions for a pipeline stage: time of a micro-batch and of the step's end, peak memory of a rank; by term."""

    time_s: Seconds
    """Time of the forward and backward pass of one micro-batch, including sends."""
    time_terms_s: dict[str, Seconds]
    """The terms of `time_s`, and the terms of the step's end (`gradient_sync`, `optimizer`), by name."""
    memory_bytes: Bytes
    """Peak memory of one rank."""
    memory_terms_bytes: dict[str, Bytes]
    """The terms of `memory_bytes`, by name."""
    host_bytes: Bytes | UnsetType = UNSET
    """Host memory of one rank for what its layers offload; omitted if they offload nothing."""


class TimelineEvent(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An action of the simulated step."""

    stage: Rank
    """The pipeline stage; for a message, the one that sends it."""
    kind: str
    """`forward`, `backward`, `send_forward` (to the next stage), `send_backward` (to the previous one),
    `gradient_sync`, which may overlap with a backward pass, or `optimizer`."""
    microbatch: NonNegativeCount | None
    """The micro-batch of the action; null if it concerns all of them."""
    chunk: NonNegativeCount | None
    """Index of the layer range in the stage's `layers`; null if the action concerns all of them."""
    start_s: Seconds
    """Start, as the time since the step began."""
    end_s: Seconds
    """End, as the time since the step began."""


class Proof(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is proven about a plan that a search found."""

    objective: str
    """Objective that was minimised, in words."""
    objective_s: Seconds
    """Value of the objective for the chosen plan."""
    objective_bound_s: Seconds
    """Lower bound: no plan in the scope has a lower value."""
    gap: NonNegativeNumber
    """objective_s / objective_bound_s - 1; 0 means optimal."""
    scope: str
    """The space of plans for which the bound holds."""
    examined: NonNegativeCount
    """Number of cases (pipeline degree, micro-batches, schedule) that were examined."""
    solved: NonNegativeCount
    """Number of cases that were solved exactly; the others were ruled out by bounds."""
    split_bound_s: Seconds | UnsetType = UNSET
    """Lower bound of the simulated time of plans with split backward passes; 0 if nothing is proven about them; omitted
    if the search did not consider any."""
    second_opinion: str | None = field(default=None, name="certificate")
    """Verdict of the solver HiGHS in files of earlier versions; never written, and unrelated to `verify`."""

    @property
    def nearness(self) -> str:
        """Return, in words, how close to the optimum the plan is proven to be."""
        if not self.objective_bound_s:
            return "not known to be near the optimum"
        return f"within {self.gap:.2%} of the optimum" if self.gap else "optimal"


class Estimate(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted time and memory of one plan under the cost model."""

    simulated_step_time_s: Seconds
    """Step time by an event-driven simulation of the plan's actions."""
    simulated_lower_bound_s: Seconds
    """Lower bound of the step time for any order of the same actions."""
    objective_s: Seconds
    """Step time by the closed form that the search minimises."""
    samples_per_s: NonNegativeNumber
    """Global batch size over the simulated step time."""
    usd_per_step: NonNegativeNumber | None
    """Price of the cluster for one step; null if a node has no price."""
    stages: Annotated[tuple[StagePrediction, ...], Meta(min_length=1)]
    """The pipeline stages, first to last."""
    timeline: tuple[TimelineEvent, ...]
    """The actions of the simulated step, sorted by start."""

    @property
    def memory_bytes(self) -> int:
        """Return the peak memory of a rank in the pipeline stage with the most."""
        return max(stage.memory_bytes for stage in self.stages)


class RunnerUp(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best plan of a configuration (pipeline degree, micro-batches, schedule) other than the chosen plan's."""

    plan: Plan
    """The plan."""
    estimate: Estimate
    """Prediction for that plan."""


class Prediction(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prediction for a plan, in a separate file next to the plan's file."""

    FORMAT = "shardwright.prediction"
    REMOVED: ClassVar[Mapping[str, Removed]] = {"robust": Removed("", ignored=None)}
    VERSION = 3

    plan_sha256: Sha256
    """Identity of the plan: SHA-256 of its canonical JSON."""
    memory_budget_bytes: Bytes | None
    """Memory budget of a rank in the pipeline stage with the highest peak; null if the plan was only evaluated."""
    estimate: Estimate
    """Predicted time and memory of the plan."""
    proof: Proof | None
    """What the search proved; null if the plan was not searched."""
    runners_up: tuple[RunnerUp, ...]
    """Plans that were not chosen, the best first; empty if none were requested."""
    warnings: tuple[str, ...]
    """What the prediction assumes beyond measurements, such as extrapolation."""
    inputs_sha256: dict[str, Sha256]
    """SHA-256 of every profile and of the search file, by role."""
    reference_s: Seconds = 0.0
    """Time of the reference workload on the machine as it was profiled; 0 if none was run."""
    versions: str = ""
    """Name and version of the program that predicted; empty in files of earlier versions."""


# A certificate: dual values and cuts that confirm the lower bound of a search without searching again.


Weight = Annotated[float, Meta(ge=0, le=1e15)]
"""A dual value, without unit or in picoseconds per byte."""
Picoseconds = Annotated[float, Meta(gt=0, le=1e21)]


class MemoryPrice(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The dual value of a pipeline stage's memory at one moment, or at a mixture of two moments."""

    ps_per_byte: Weight
    """Cost of one byte."""
    phase: Annotated[int, Meta(ge=0, le=1)] = 0
    """0: all micro-batches that the stage has in flight are held; 1: one less, if the stage has all of the step in
    flight."""
    last_layer: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """The weight of the moment at the stage's last layer; the rest is the weight of the moment at its first layer."""


Prices = tuple[tuple[MemoryPrice, ...], ...]
"""Prices by pipeline stage, or one entry for all stages; for each run of layers, the price that gives the highest bound
applies."""


class Band(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of the slowest stage's time, and the dual values that bound all plans in this range."""

    slowest_below_ps: Picoseconds | None
    """Upper end of the range; null if it is unlimited. The lower end is the previous band's upper end, or 0 for the
    first."""
    slowest_weights: tuple[Weight, ...]
    """Dual values, by pipeline stage or one for all, of the constraint that no stage is slower than the slowest."""
    exposed_weights: tuple[Weight, ...]
    """Dual values, by pipeline stage or one for all, of the constraint that no stage's exposed end of the step is
    longer than the longest."""
    prices: Prices
    """Prices of memory, for the cost with these weights."""


class ConfigurationProof(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Dual values that show that no plan of a configuration is faster than the bound."""

    configuration: str
    """Name of the configuration: batch, micro-batches, pipeline degree, and what else the search fixes first."""
    layouts: bool
    """True if moving between layouts has a cost; false if it counts as free."""
    time_prices: Prices
    """Prices of memory for the least time of a microbatch in a stage."""
    bands: Annotated[tuple[Band, ...], Meta(min_length=1)]
    """Bands in ascending order, which together cover every plan."""


class Certificate(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A certificate that no plan of a search's space is faster than a bound, by the closed form of the step time."""

    FORMAT = "shardwright.certificate"

    plan_sha256: Sha256
    """SHA-256 of the plan that the search chose."""
    inputs_sha256: dict[str, Sha256]
    """SHA-256 of the search file and of each profile that the bound depends on, by role."""
    bound_ps: Annotated[float, Meta(ge=1, le=1e21)]
    """Lower bound of the closed form over all plans, as the time of a step with the chosen plan's batch size; the time
    of other batch sizes is scaled to that number of samples."""
    configurations: Annotated[tuple[ConfigurationProof, ...], Meta(min_length=1)]
    """Proofs for every configuration of the space, in the order of the search."""
    split_bound_ps: Picoseconds | UnsetType = UNSET
    """Lower bound of the simulated time of plans with split backward passes; omitted if none is confirmed."""
    split_configurations: tuple[ConfigurationProof, ...] = ()
    """Proofs of `split_bound_ps`, for every pipeline of the space: by the slowest stage, or by a weighted mean of
    stages."""


# Corrections of predictions by measured plans: a factor for each term, stored separately from profiles.


class Term(StrEnum):
    """A term of a prediction that measurements can distinguish from other terms."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT_SYNC = "gradient_sync"
    STEP_END = "step_end"
    MEMORY = "memory"


class CorrectionFactor(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured over predicted: the median over the measured plans of the median over each plan's ranks.

    For the end of a step, where all ranks wait for the slowest, a plan's lowest rank counts instead of the median rank.
    """

    factor: PositiveNumber
    """The median over the plans; for memory, at most the factor with which each plan that ran fits its devices."""
    lowest: Number
    """Factor of the plan with the lowest factor; not positive if noise exceeds what was measured."""
    highest: PositiveNumber
    """Factor of the plan with the highest factor."""
    num_plans: Count
    """Number of different plans that were measured."""
    num_ranks: Count
    """Number of ranks that were measured, over all plans."""

    def __post_init__(self) -> None:
        if not self.lowest <= self.factor <= self.highest:
            raise ValueError(f"factor {self.factor} is not between {self.lowest} and {self.highest}")


class Correction(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratios of measured plans to their predictions from certain profiles; valid only for these profiles."""

    FORMAT = "shardwright.correction"

    factors: dict[Term, CorrectionFactor]
    """Factors by term; terms that no measured plan gives information about are omitted.

    `forward` and `backward`: one micro-batch's pass through a rank's layers, minus the predicted time of gathers and of
    moves between layouts. `gradient_sync`: what reducing gradients adds to a step. `step_end`: the optimizer's step
    with the step's overhead, which includes the optimizer's fixed part. `memory`: the peak of a rank, including the
    process.
    """
    plans_sha256: Annotated[tuple[Sha256, ...], Meta(min_length=1)]
    """SHA-256 of the plans that were measured."""
    measurements_sha256: Annotated[tuple[Sha256, ...], Meta(min_length=1)]
    """SHA-256 of the measurement files."""
    hardware_sha256: Sha256
    """SHA-256 of the hardware profile of the predictions."""
    profiles_sha256: Annotated[tuple[Sha256, ...], Meta(min_length=1)]
    """SHA-256 of the model profiles of the predictions."""
    warnings: tuple[str, ...]
    """Warnings about factors with little evidence."""
