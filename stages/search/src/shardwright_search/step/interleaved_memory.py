"""The memory of a pipeline stage with several chunks: its action list walked once, and what a pass through one takes.

A chunk's gradients are made by its first backward pass, layer by layer; while a microbatch is on its way through a
chunk, the most that it holds there comes on top of the activations and gradients that all chunks hold.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from shardwright_formats.semantics.schedules.passes import Action, Pass
from shardwright_search.step.memory import LayerMemory


class Moment(NamedTuple):
    """A pass of a stage, and what is there beside it."""

    chunk: int
    """The chunk that is worked on."""
    in_flight: tuple[int, ...]
    """By chunk: the microbatches whose activations are held, without the one on its way."""
    made: tuple[bool, ...]
    """By chunk: whether its gradients are there, because it has been through a backward pass before."""
    makes: bool
    """Whether this is the first backward pass of the chunk worked on."""


def moments(actions: Iterable[Action], num_chunks: int) -> Iterator[Moment]:
    """Yield the moment of every action of a stage, in order."""
    in_flight, made = [0] * num_chunks, [False] * num_chunks
    for action in actions:
        backward = action.kind is Pass.BACKWARD
        in_flight[action.chunk] -= backward
        yield Moment(action.chunk, tuple(in_flight), tuple(made), backward and not made[action.chunk])
        in_flight[action.chunk] += not backward
        made[action.chunk] |= backward


def layer_passes(gradients: ArrayLike, activation: ArrayLike, workspace: ArrayLike) -> LayerMemory:
    """Return what a layer holds of one microbatch [options, kinds of passes]: those that make no gradients, and others.

    States are counted apart, and so are gradients that are there.
    """
    made = np.multiply.outer(np.asarray(gradients, float), [0.0, 1.0])
    kept, moment = (np.asarray(kind, float)[..., None] for kind in (activation, workspace))
    return LayerMemory(np.zeros_like(made), made, kept, moment)
