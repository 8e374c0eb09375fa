"""Corrections of predictions by measured plans: a factor for each term, stored separately from profiles."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from shardwright.io import Document, Value
from shardwright.types.limits import Count, Number, PositiveNumber, Sha256


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
