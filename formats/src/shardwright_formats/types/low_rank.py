"""Low-rank adaptation (LoRA): small trained matrices beside frozen ones."""

from math import sqrt
from typing import Annotated

from msgspec import Meta

from shardwright_formats.io import Value
from shardwright_formats.types.limits import Length, PositiveNumber

LOW_RANK = ".lora_"
"""Text between the name of a module and those of its low-rank matrices, A and B (Hu et al. 2021), as in peft."""


class LowRank(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank matrices beside frozen ones (Hu et al. 2021): y = W x + scaling B A x, with A and B trained alone."""

    rank: Length
    """Rows of A, and columns of B."""
    alpha: PositiveNumber
    """Numerator of the scaling."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Modules of blocks that have them, by the ends of their names."""
    rank_stabilized: bool = False
    """Whether the scaling is alpha over the root of the rank (Kalajdzievski 2023), and not over the rank."""
    starts_at_zero: bool = True
    """Whether B is drawn as zeros, so that the model begins as the frozen one; else as A is."""

    @property
    def scaling(self) -> float:
        """Return the factor of what the low-rank matrices add."""
        return self.alpha / (sqrt(self.rank) if self.rank_stabilized else self.rank)
