"""Table of optimizers: their states, and the bytes that states occupy and move.

The stored parameters are the master weights (`Precision.parameters`); an optimizer that keeps separate master weights
has them as a state. An element-wise update runs on any shard without messages: gradients arrive reduced. For an
optimizer that needs whole matrices (`whole_matrices`), each matrix is temporarily whole on one rank, while its states
are sharded as usual.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.types import ITEMSIZE, DType, LayerType, Parameter, Precision

# Matrices that an update needs as a whole (Muon): which they are, and what their update computes and needs.
#
# They are the matrices of blocks, not of embedding and head, as in Jordan 2024 and Moonlight (arXiv 2502.16982): each
# expert's matrix separately, and each part of a fused weight. Biases, norms of heads, and tables that are added to
# scores are excluded. Five Newton-Schulz steps replace a matrix: with X [m, n], m <= n, scaled to norm 1, and (a, b, c)
# = (3.4445, -4.7750, 2.0315), each is X = a X + (b A + c A A) X, where A = X X^T: 4 m^2 n + 2 m^3 operations.


STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUMBER_BYTES = 2
"""Bytes per number in the iteration and in its messages: bfloat16."""
_OTHERS = ("bias", "norm.weight", "relative_attention_bias.weight", "relative_position_bias_table")
"""Ends of names of parameters of blocks that have several dims but are not matrices."""


def matrix_dims(parameter: Parameter) -> tuple[int, int] | None:
    """Return the dims of rows and columns of a block's parameter; its other dims count stacked matrices.

    None: the parameter is not updated as whole matrices. That includes a copy, because its original, the token table,
    does not belong to a block. In a weight of three dims, not counting the dim of experts, several matrices are fused:
    the dim before the one that tensor parallelism splits counts them.
    """
    dims = [dim for dim in range(len(parameter.shape)) if dim != parameter.ep_dim]
    if not parameter.trained or parameter.copy_of is not UNSET or parameter.name.endswith(_OTHERS):
        return None
    if len(dims) == 3 and parameter.tp_dim is not None:
        dims = [dim for dim in dims if dim != parameter.tp_dim - 1]
    return (dims[0], dims[1]) if len(dims) == 2 else None


def iteration_flops(rows: int, columns: int) -> int:
    """Return the operations of the update of one matrix (a multiply-add counts 2)."""
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


def update_flops(parameters: Iterable[Parameter]) -> int:
    """Return the operations of the updates of all matrices of a block's parameters."""
    return sum(prod(p.shape) // (m * n) * iteration_flops(m, n) for p, m, n in _shapes(parameters))


def largest_flops(parameters: Iterable[Parameter]) -> int:
    """Return the operations of the longest update of one matrix among a block's parameters; 0 if there is none."""
    return max((iteration_flops(m, n) for _, m, n in _shapes(parameters)), default=0)


def returned_bytes(parameters: Iterable[Parameter], parts: int, shards: int) -> int:
    """Return the bytes that a rank receives back from the matrices' home ranks, for the largest shards."""
    return sum(_NUMBER_BYTES * p.shard_numel(parts, shards) for p, *_ in _shapes(parameters))


def workspace_bytes(parameters: Iterable[Parameter], replicas: int) -> int:
    """Return the bytes that the update of the largest matrix needs on its home rank, with other matrices in transit.

    In bfloat16: what each of `replicas` sends and receives, the matrix itself [m, n] twice, and two matrices [m, m].
    """
    largest = max((m * n + min(m, n) ** 2 for _, m, n in _shapes(parameters)), default=0)
    return _NUMBER_BYTES * (2 * replicas + 2) * largest


def _shapes(parameters: Iterable[Parameter]) -> Iterable[tuple[Parameter, int, int]]:
    """Yield the parameters that are matrices, each with its numbers of rows and columns."""
    for each in parameters:
        if (dims := matrix_dims(each)) is not None:
            yield each, each.shape[dims[0]], each.shape[dims[1]]


class Shard(NamedTuple):
    """The part of a trained parameter that a rank holds."""

    numel: int
    shape: tuple[int, ...] | None = None
    """Shape of the whole parameter; None for many parameters together, whose states count as the smallest possible
    ones."""
    columns: int = 0
    """Number of elements of a matrix row that the rank holds."""
    whole: bool = True
    """Whether the parameter is updated as whole matrices (`matrix_dims`); True if that is not known."""

    @classmethod
    def of(cls, parameter: Parameter, parts: int, shards: int) -> "Shard":
        """Return the largest shard of a parameter: a tensor-parallel part, sharded by ZeRO."""
        last = len(parameter.shape) - 1
        numel, columns = parameter.shard_numel(parts, shards), 0
        if last > 0:
            columns = parameter.part_length(last, parts)
            columns = -(-columns // shards) if parameter.states_dim(parts, shards) == last else columns
        return cls(numel, parameter.shape, columns, matrix_dims(parameter) is not None)

    @property
    def is_matrix(self) -> bool:
        """Return whether the parameter is a matrix; True if its shape is not known."""
        return self.shape is None or len(self.shape) > 1

    def blocks(self, size: int) -> int:
        """Return the number of quantization blocks of `size` elements whose scales the rank holds.

        If shard boundaries split blocks, the blocks of whole rows count.
        """
        if self.shape is None or self.numel == 0:
            return 0
        row = self.shape[-1] if self.cuts_blocks(size) else self.columns
        return -(-self.numel // self.columns) * -(-row // size)

    def cuts_blocks(self, size: int) -> bool:
        """Return whether a shard boundary splits a quantization block of this size."""
        return self.shape is not None and 0 < self.columns < self.shape[-1] and self.columns % size != 0


def shards_of(kind: LayerType, parts: int, shards: int = 1) -> tuple[Shard, ...]:
    """Return the largest shards of a layer's trained parameters."""
    return tuple(Shard.of(parameter, parts, shards) for parameter in kind.trained_parameters)


class State(NamedTuple):
    """A value that an optimizer keeps for each element of a trained parameter."""

    name: str
    """Name in checkpoints, which is PyTorch's key of the state."""
    dtype: DType | None = None
    """Number format; None if it is the format of the stored parameters."""
    block: int = 0
    """Number of elements of a row that share a float32 scale, each stored in one byte; 0 if the state is not
    quantized."""

    def bytes_of(self, held: Shard, stored: DType) -> int:
        """Return the bytes of the state for the elements that a rank holds, if parameters are stored in a format."""
        if self.block:
            return held.numel + ITEMSIZE["float32"] * held.blocks(self.block)
        return held.numel * ITEMSIZE[self.dtype or stored]


class Optimizer(NamedTuple):
    """An optimizer: its states, and what its update needs."""

    name: str
    """Name in plans."""
    states: tuple[State, ...]
    """States of a matrix."""
    of_vectors: tuple[State, ...] | None = None
    """States of a vector, or of whatever is not updated as a whole matrix; None if a matrix has the same states."""
    temporary: int = 0
    """Number of values per element, in the parameters' format, that a step writes and reads again because it is not
    fused."""
    whole_matrices: bool = False
    """Whether the update of a block's matrix needs the whole matrix on one rank; AdamW updates everything else."""

    @property
    def at_ends(self) -> "Optimizer":
        """Return the optimizer that updates embedding and head."""
        return ADAMW if self.whole_matrices else self

    def state_bytes(self, parameter_bytes: int, stored: DType) -> int:
        """Return the least bytes of the states of trained parameters whose stored values take `parameter_bytes`."""
        return self.held_bytes([Shard(parameter_bytes // ITEMSIZE[stored])], stored)

    def held_bytes(self, held: Iterable[Shard], stored: DType) -> int:
        """Return the bytes of the states of the shards that a rank holds, if parameters are stored in a format."""
        return sum(state.bytes_of(each, stored) for each in held for state in self._states_of(each))

    def states_of(self, is_matrix: bool) -> tuple[State, ...]:
        """Return the states that a parameter has."""
        return self.states if is_matrix or self.of_vectors is None else self.of_vectors

    def _states_of(self, held: Shard) -> tuple[State, ...]:
        return self.states_of(held.whole if self.whole_matrices else held.is_matrix)

    def agreed_bytes(self, held: Shard) -> int:
        """Return the bytes of the scales on which ranks with other columns of the same rows agree in a step."""
        cut = [state.block for state in self.states if state.block and held.cuts_blocks(state.block)]
        return sum(ITEMSIZE["float32"] * held.blocks(size) for size in cut)

    def moved_bytes(self, held: Iterable[Shard], precision: Precision) -> int:
        """Return the bytes that a step reads and writes: parameters and states both ways, and gradients once."""
        held = tuple(held)
        numel, stored = sum(each.numel for each in held), ITEMSIZE[precision.parameters]
        kept = (1 + self.temporary) * stored * numel + self.held_bytes(held, precision.parameters)
        return 2 * kept + ITEMSIZE[precision.reduce] * numel

    def step_bytes(self, held: Iterable[Shard], precision: Precision) -> int:
        """Return the bytes of a step with clipping, which reads gradients twice (norm, scale) and writes them once."""
        held = tuple(held)
        clipped = 3 * ITEMSIZE[precision.reduce] * sum(each.numel for each in held)
        return self.moved_bytes(held, precision) + clipped

    def share_of_adamw(self, held: Iterable[Shard], precision: Precision) -> float:
        """Return the step's time relative to AdamW's, which profiles measure; both are bound by memory bandwidth."""
        held = tuple(held)
        if self == ADAMW or not held:
            return 1.0
        return self.step_bytes(held, precision) / ADAMW.step_bytes(held, precision)

    def demand_shards(self, purpose: str) -> None:
        """Raise BadInput if the optimizer cannot update shards one by one, as `purpose` requires."""
        if self.whole_matrices:
            raise BadInput(f"optimizer {self.name}", f"updates whole matrices, which {purpose} does not", "take adamw")


_MOMENTS = "exp_avg", "exp_avg_sq"
ADAMW = Optimizer("adamw", tuple(map(State, _MOMENTS)))
"""Loshchilov & Hutter 2019: the moving averages of the gradient and of its square."""
ADAMW_BF16 = Optimizer("adamw-bf16", tuple(State(name, "bfloat16") for name in _MOMENTS), temporary=4)
"""AdamW whose averages are rounded to bfloat16 after each step, as DeepSeek-V3 keeps them (arXiv 2412.19437)."""
ADAMW_8BIT = Optimizer(
    "adamw-8bit", tuple(State(name, block=256) for name in _MOMENTS), of_vectors=ADAMW.states, temporary=14
)
"""Dettmers et al. 2022: averages of matrices in 8 bits, with a scale for each block of a row."""
SGD = Optimizer("sgd", (State("momentum_buffer"),))
"""Sutskever et al. 2013, as in torch.optim.SGD: the sum of decayed gradients."""
LION = Optimizer("lion", (State("exp_avg"),), temporary=5)
"""Chen et al. 2023 (arXiv 2302.06675): the sign of an average of gradients."""
MUON = Optimizer("muon", (State("momentum_buffer"),), of_vectors=ADAMW.states, temporary=5, whole_matrices=True)
"""Jordan 2024, with the step size of Moonlight (arXiv 2502.16982): the orthogonal matrix nearest to an average."""
OPTIMIZERS = {optimizer.name: optimizer for optimizer in (ADAMW, ADAMW_BF16, ADAMW_8BIT, SGD, LION, MUON)}
