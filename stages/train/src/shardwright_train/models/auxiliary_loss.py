"""Outputs of layers: states, and of blocks with experts a loss beside them."""

from typing import NamedTuple

from torch import Tensor

States = tuple[Tensor, ...]
"""Output of a layer: tensors [samples, positions, features], as the description's `outputs` list."""


class WithLoss(NamedTuple):
    """The output of a block that has an auxiliary loss.

    The loss is this rank's part of a sum over samples, whose mean over a step the runtime adds to the loss. Ranks that
    hold replicas of the block's states compute it alike; ranks with other positions have parts of it.
    """

    states: States
    loss: Tensor
    counts: Tensor | None = None
    """How often each expert was chosen for this rank's positions [experts]; None without experts."""
