"""The memory of a pipeline stage: one recurrence over its layers, for a plan's numbers and for columns of labels alike.

In a phase with k microbatches in flight a stage holds its state, (k - 1) times its activations, and the most that one
more microbatch holds on its way: while layer j works, the activations of the layers up to j, j's workspace, and the
gradients: of all layers, or in the first backward pass of those from j on. Besides it holds what it received of each
microbatch in flight and what it is receiving for the next pass, taken to be as large, and of one microbatch the
gradients of what it received and of what it gives out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright_search.solver.pareto import Ints, Numbers


class Phase(NamedTuple):
    """A part of a step in which a pipeline stage may hold the most."""

    in_flight: int
    late: bool = False
    """Whether gradients come layer by layer, and are not all there from the start."""


def phases(in_flight: int, num_microbatches: int) -> tuple[Phase, ...]:
    """When a stage with that many microbatches in flight may hold the most.

    Where all microbatches are in flight before the first backward pass, that pass has them all but makes the gradients
    only now; the passes after it have one less and all gradients.
    """
    if in_flight < num_microbatches:
        return (Phase(in_flight),)
    first = Phase(in_flight, late=True)
    return (first,) if in_flight == 1 else (first, Phase(in_flight - 1))


class LayerMemory(NamedTuple):
    """What a layer holds [options, phases], in bytes."""

    static: Numbers
    """All phase long."""
    late: Numbers
    """From the layer's backward pass on."""
    activation: Numbers
    """Of the microbatch on its way."""
    workspace: Numbers
    """In the layer's own forward or backward pass."""

    def take(self, rows: Ints | int) -> "LayerMemory":
        """Some of the options."""
        return LayerMemory._make(column[rows] for column in self)


def layer_memory(
    parts: Sequence[Phase], state: ArrayLike, gradients: ArrayLike, activation: ArrayLike, workspace: ArrayLike
) -> LayerMemory:
    """Of one layer, or of each of its options, from the bytes of each kind."""
    kinds = (state, gradients, activation, workspace)
    states, made, kept, moment = (np.asarray(kind, float)[..., None] for kind in kinds)
    others = np.array([phase.in_flight - 1.0 for phase in parts])
    late = made * np.array([phase.late for phase in parts])
    return LayerMemory(states + others * kept + made - late, late, kept, moment)


class StageMemory(NamedTuple):
    """What a stage's layers so far hold [labels, phases], in bytes."""

    resident: Numbers
    """At the end, the activations of the last microbatch included."""
    peak: Numbers
    """The most so far, with the late gradients."""

    def take(self, rows: Ints | int) -> "StageMemory":
        """Some of the labels."""
        return StageMemory(self.resident[rows], self.peak[rows])

    def then(self, layer: LayerMemory) -> "StageMemory":
        """With one more layer behind."""
        moment = self.resident + layer.activation + layer.workspace
        return StageMemory(
            self.resident + layer.static + layer.activation, layer.static + layer.late + np.maximum(self.peak, moment)
        )


def no_layers(parts: Sequence[Phase], received: ArrayLike) -> StageMemory:
    """Before the first layer: what was received of the microbatches, of one so many bytes.

    Beside those in flight are the gradient of one, and what comes for the next pass while this one computes.
    """
    resident = np.asarray(received, float)[..., None] * np.array([phase.in_flight + 2.0 for phase in parts])
    return StageMemory(resident, resident)
