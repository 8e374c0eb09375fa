"""Kinds of passes through a pipeline stage's layers; a schedule is an order of them.

What sets one kind of pass apart stands in the table `Pass`, which schedules, the runtime, the simulator and the memory
of a stage read. They ask a row for its facts rather than for its name.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """The kinds of passes of a micro-batch through a layer range, in the order in which a micro-batch makes them."""

    way: int
    """Which range receives its result: 1 the next range, -1 the previous one, 0 none."""
    needs: str | None
    """The kind of pass of the same microbatch and range that precedes it, and whose activations it frees."""
    makes_gradients: bool
    """Whether it adds to the gradients of parameters: none goes through layers before the first trained one."""
    fill: int
    """How often it counts in the time that the pipeline takes to fill and drain: 0 or less if other passes hide it."""

    FORWARD = "forward", 1, None, False, 1
    BACKWARD = "backward", -1, "forward", True, 1
    WEIGHT = "weight", 0, "backward", True, -1
    """Gradients of matrices, which a split backward pass leaves to a pass of their own."""

    def __new__(cls, name: str, way: int, needs: str | None, makes_gradients: bool, fill: int) -> "Pass":
        """Make a row of the table of passes."""
        row = str.__new__(cls, name)
        row._value_, row.way, row.needs, row.makes_gradients, row.fill = name, way, needs, makes_gradients, fill
        return row


class Action(NamedTuple):
    """A pass of one microbatch through one layer range of a pipeline stage."""

    kind: Pass
    microbatch: int
    chunk: int = 0
    """Number of the layer range in the stage's `layers`; a microbatch goes through chunk 0 of every stage first."""


def middle(times: Sequence[float], during: Pass) -> Sequence[float]:
    """Return the times of passes without communication of parameters or gradients, if a step has such passes.

    `times`: of one pass of each microbatch, in order. The first forward pass gathers, the first backward pass adds to
    nothing, the last one reduces.
    """
    return times[1:-1] or (times[:-1] if during.makes_gradients else times[1:]) or times
