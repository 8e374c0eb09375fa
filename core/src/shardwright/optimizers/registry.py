"""The optimizers that a plan may name: their states, and the bytes that these hold and move.

The stored parameters are the master weights (`Precision.parameters`); an optimizer that keeps other ones has them as a
state. An update element by element runs on any shard and sends nothing: gradients come reduced. One that needs whole
matrices says so, and is refused by whatever prices or runs updates of shards.
"""

from typing import NamedTuple

from shardwright.io import BadInput
from shardwright.types import ITEMSIZE, DType, Precision


class State(NamedTuple):
    """A number that an optimizer keeps for each number of a trained parameter."""

    name: str
    """Name in checkpoints, which is PyTorch's key of it."""
    dtype: DType | None = None
    """Number format; None: the format of the stored parameters."""

    def itemsize(self, stored: DType) -> int:
        """The bytes of one number, for parameters stored in a format."""
        return ITEMSIZE[self.dtype or stored]


class Optimizer(NamedTuple):
    """What an optimizer keeps and needs."""

    name: str
    """Name in plans."""
    states: tuple[State, ...]
    whole_matrices: bool = False
    """True if the update of a matrix needs all of it, on one rank."""

    def state_bytes(self, parameter_bytes: int, stored: DType) -> int:
        """The bytes of the states of trained parameters that are stored in this number of bytes."""
        return sum(parameter_bytes * state.itemsize(stored) // ITEMSIZE[stored] for state in self.states)

    def moved_bytes(self, numel: int, precision: Precision) -> int:
        """The bytes that a step reads and writes: parameters and states both ways, and gradients once."""
        parameter_bytes = ITEMSIZE[precision.parameters] * numel
        kept = parameter_bytes + self.state_bytes(parameter_bytes, precision.parameters)
        return 2 * kept + ITEMSIZE[precision.reduce] * numel

    def demand_shards(self, purpose: str) -> None:
        """Raise BadInput if shards cannot be updated one by one, as `purpose` assumes."""
        if self.whole_matrices:
            raise BadInput(f"optimizer {self.name}", f"updates whole matrices, which {purpose} does not", "take adamw")


ADAMW = Optimizer("adamw", (State("exp_avg"), State("exp_avg_sq")))
"""Loshchilov & Hutter 2019: the moving averages of the gradient and of its square."""
OPTIMIZERS = {optimizer.name: optimizer for optimizer in (ADAMW,)}
