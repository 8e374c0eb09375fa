"""The load of experts that a run logged: the positions routed to each, which decide the fullest rank's work."""

from collections.abc import Sequence
from math import isclose
from typing import Annotated

from msgspec import Meta

from shardwright.io import Document, Value
from shardwright.types.limits import Count, Name, NonNegativeCount, PositiveNumber, Ranks, Share

_ROUNDING = 1e-6
"""Distance from 1 of the sum of a layer's shares, at most."""


class GroupLoad(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load of the fullest group if a layer's experts are split into groups of neighbours."""

    ep_size: Ranks
    """Number of groups into which the experts are split."""
    imbalance: PositiveNumber
    """Load of the fullest group over the mean group's load, both averaged over the steps."""

    def __post_init__(self) -> None:
        if not 1 - _ROUNDING <= self.imbalance <= self.ep_size * (1 + _ROUNDING):
            raise ValueError(f"imbalance {self.imbalance} of {self.ep_size} groups is not from 1 to {self.ep_size}")


class LayerLoad(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load of the experts of one layer, as shares of all rows."""

    layer: NonNegativeCount
    """Number of the block, from 0."""
    shares: Annotated[tuple[Share, ...], Meta(min_length=1)]
    """Share of each expert in the assignments of positions to experts; they add up to 1."""
    groups: tuple[GroupLoad, ...] = ()
    """The fullest group for each number of groups, step by step; omitted if only the shares are known."""

    def __post_init__(self) -> None:
        if not isclose(total := sum(self.shares), 1.0, abs_tol=_ROUNDING):
            raise ValueError(f"the shares of layer {self.layer} add up to {total:g}, not to 1")

    def imbalance(self, ep_size: int) -> float:
        """Return the fullest of `ep_size` groups' load divided by the mean group's, from 1 to `ep_size`.

        Without figures of single steps it is that of the shares, which hide a peak that moves from step to step. Raises
        ValueError if `ep_size` does not divide the experts.
        """
        for group in self.groups:
            if group.ep_size == ep_size:
                return group.imbalance
        if len(self.shares) % ep_size:
            raise ValueError(f"ep_size {ep_size} does not divide {len(self.shares)} experts")
        size = len(self.shares) // ep_size
        return self.placed_imbalance([range(first, first + size) for first in range(0, len(self.shares), size)])

    def placed_imbalance(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the load of the fullest of given groups of experts divided by the mean group's, by the shares."""
        return len(groups) * max(sum(self.shares[expert] for expert in group) for group in groups)


class ExpertLoad(Document, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """load.json: the load of experts in a run, an input of search and prediction."""

    FORMAT = "shardwright.expert_load"

    model: Name
    """Name of the model description."""
    first_step: Count
    """The first step that is counted."""
    last_step: Count
    """The last one."""
    layers: Annotated[tuple[LayerLoad, ...], Meta(min_length=1)]
    """The layers with experts, in ascending order."""

    def __post_init__(self) -> None:
        if self.last_step < self.first_step:
            raise ValueError(f"last_step {self.last_step} is before first_step {self.first_step}")
        numbers = [one.layer for one in self.layers]
        if sorted(set(numbers)) != numbers:
            raise ValueError("its layers are not in ascending order")
