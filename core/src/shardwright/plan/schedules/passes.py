"""Kinds of passes through a pipeline stage's layers; a schedule is an order of them.

The facts that distinguish the kinds of passes are in the table `Pass`, which schedules, the runtime, the simulator and
the memory of a stage read. They use a row's facts, not its name.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Pass(StrEnum):
    """The kinds of passes of a micro-batch through a layer range, in the order in which they are run."""

    way: int
    """Direction of the pass's result: 1 for the next layer range, -1 for the previous one, 0 if no range receives
    it."""
    needs: str | None
    """The kind of pass of the same micro-batch and range that must come before, and whose activations this pass
    frees."""
    makes_gradients: bool
    """Whether the pass adds to the gradients of parameters; such a pass skips the layers before the first trained
    one."""
    fill: int
    """How often the pass counts in the time in which the pipeline fills and drains: 0 or less if other passes hide
    it."""

    FORWARD = "forward", 1, None, False, 1
    BACKWARD = "backward", -1, "forward", True, 1
    WEIGHT = "weight", 0, "backward", True, -1
    """Gradients of matrices, which a split backward pass leaves to a separate pass."""

    def __new__(cls, name: str, way: int, needs: str | None, makes_gradients: bool, fill: int) -> "Pass":
        """Create a row of the table of passes."""
        row = str.__new__(cls, name)
        row._value_, row.way, row.needs, row.makes_gradients, row.fill = name, way, needs, makes_gradients, fill
        return row


class Action(NamedTuple):
    """A pass of one microbatch through one layer range of a pipeline stage."""

    kind: Pass
    microbatch: int
    chunk: int = 0
    """Index of the layer range in the stage's `layers`; a micro-batch goes through chunk 0 of every stage first."""


def middle(times: Sequence[float], during: Pass) -> Sequence[float]:
    """Return the times of passes without communication of parameters or gradients, if a step has such passes.

    `times`: of one pass of each micro-batch, in order. The first forward pass gathers parameters, the first backward
    pass adds to no gradients yet, and the last backward pass reduces them.
    """
    return times[1:-1] or (times[:-1] if during.makes_gradients else times[1:]) or times
