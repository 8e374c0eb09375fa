"""A certificate: dual values and cuts from which the lower bound of a search is confirmed without searching."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from shardwright.io import Document, Value
from shardwright.types.limits import Sha256

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
