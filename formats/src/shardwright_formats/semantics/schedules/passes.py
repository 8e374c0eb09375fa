"""Passes through the layers of a pipeline stage: a schedule is an order of them, run by the runtime and simulated."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """A direction through some layers of a pipeline stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Action(NamedTuple):
    """A pass of one microbatch through one layer range of a pipeline stage."""

    kind: Pass
    microbatch: int
    chunk: int = 0
    """Number of the layer range in the stage's `layers`; a microbatch goes through chunk 0 of every stage first."""


def middle(times: Sequence[float], during: Pass) -> Sequence[float]:
    """Return the times of the passes that only compute and add to gradients, where a step has such.

    `times`: of one pass of each microbatch, in order. The first forward pass gathers, the first backward pass adds to
    nothing, the last one reduces.
    """
    return times[1:-1] or (times[1:] if during is Pass.FORWARD else times[:-1]) or times
