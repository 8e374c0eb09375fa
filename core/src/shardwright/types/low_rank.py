"""Low-rank adaptation (LoRA): small trained matrices added to frozen ones."""

from math import sqrt
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from shardwright.io import Value
from shardwright.types.limits import Length, PositiveNumber, Sha256

LOW_RANK = ".lora_"
"""Text between the name of a module and the names of its low-rank matrices, A and B (Hu et al. 2021), as in peft."""


class LowRank(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank matrices added to frozen ones (Hu et al. 2021): y = W x + scaling B A x; only A and B are trained."""

    rank: Length
    """Rows of A, and columns of B, except for matrices with a rank of their own."""
    alpha: PositiveNumber
    """Numerator of the scaling."""
    targets: Annotated[tuple[str, ...], Meta(min_length=1)]
    """The modules that have them, as the adapter's configuration names them."""
    rank_stabilized: bool = False
    """Whether the scaling is alpha over the root of the rank (Kalajdzievski 2023), and not over the rank."""
    starts_at_zero: bool = True
    """Whether B is drawn as zeros, so that the model begins as the frozen one; else as A is."""
    alphas: dict[str, PositiveNumber] | UnsetType = UNSET
    """Other numerators, by the full names of modules, or of experts' parameters, in the stock model; omitted if
    none."""
    weights_sha256: Sha256 | UnsetType = UNSET
    """Identity of the adapter's trained weights, with which a run starts; omitted if they are drawn."""

    def alpha_of(self, name: str) -> float:
        """Return the numerator of a module, or of a parameter of experts, by its full name in the stock model."""
        return self.alpha if self.alphas is UNSET else self.alphas.get(name, self.alpha)

    def scaling_of(self, name: str, rank: int) -> float:
        """Return the factor of a module's low-rank product, by the module's name and rank."""
        return self.alpha_of(name) / (sqrt(rank) if self.rank_stabilized else rank)
