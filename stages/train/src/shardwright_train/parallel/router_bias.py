"""Biases of routers, which a step corrects by how often each expert was chosen in it (Wang et al. 2024)."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from shardwright_formats.types import LayerType, Parameter


def corrected_bias(kind: LayerType) -> Parameter | None:
    """Return the bias that steps correct in a type of layer; None where there is none, or a frozen one."""
    return next((p for p in kind.parameters if p.is_buffer and p.frozen is not True), None)


class RouterBias(NamedTuple):
    """The bias of a layer's router: what is added to scores where experts are chosen [experts]."""

    bias: Tensor
    """The same on all ranks of the layer."""
    experts: slice
    """Numbers of the layer's experts among those of all layers."""


class RouterBiases(NamedTuple):
    """The biases of routers that this rank holds."""

    of_layer: Mapping[str, RouterBias]

    def correct(self, assignments: Tensor, rate: Tensor) -> None:
        """Add rate x sign(mean - count) to the biases, by the counts of all layers' experts, summed over all ranks.

        Counts are whole numbers in float64, so that the sum is exact under any plan. Ranks that hold replicas of
        positions count these several times, but those of all experts as often, which no sign tells apart.
        """
        for bias, experts in self.of_layer.values():
            counts = assignments[experts]
            bias.add_(rate * (counts.sum() - len(counts) * counts).sign())
