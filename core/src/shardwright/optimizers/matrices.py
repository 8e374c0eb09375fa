"""The matrices that an update takes whole (Muon): which they are, what their update computes and needs.

They are the matrices of blocks, not of embedding and head, as in Jordan 2024 and Moonlight (arXiv 2502.16982): each
expert by itself, and each part of a fused weight. Not among them are biases, norms of heads, and tables that are added
to scores. Five Newton-Schulz steps replace a matrix: with X [m, n], m <= n, scaled to norm 1, and (a, b, c) = (3.4445,
-4.7750, 2.0315), each is X = a X + (b A + c A A) X, where A = X X^T: 4 m^2 n + 2 m^3 operations.
"""

from collections.abc import Iterable
from math import prod

from msgspec import UNSET

from shardwright.types import Parameter

STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUMBER_BYTES = 2
"""Bytes of a number of the iteration, and of what is sent for it: bfloat16."""
_OTHERS = ("bias", "norm.weight", "relative_attention_bias.weight", "relative_position_bias_table")
"""Ends of names of what has several dims in blocks and is not a matrix."""


def matrix_dims(parameter: Parameter) -> tuple[int, int] | None:
    """The two dims of the matrices of a block's parameter, along whose others they are stacked; None if it has none.

    A weight of three dims, without that of experts, is fused: the dim before the one that tensor parallelism cuts
    counts its parts. A copy is updated as what it is a copy of: the token table is no block's.
    """
    dims = [dim for dim in range(len(parameter.shape)) if dim != parameter.ep_dim]
    if not parameter.trained or parameter.copy_of is not UNSET or parameter.name.endswith(_OTHERS):
        return None
    if len(dims) == 3 and parameter.tp_dim is not None:
        dims = [dim for dim in dims if dim != parameter.tp_dim - 1]
    return (dims[0], dims[1]) if len(dims) == 2 else None


def iteration_flops(rows: int, columns: int) -> int:
    """The operations of the update of a matrix (a multiply-add counts 2)."""
    m, n = sorted((rows, columns))
    return STEPS * (4 * m * m * n + 2 * m**3)


def update_flops(parameters: Iterable[Parameter]) -> int:
    """The operations of the update of all matrices of some parameters of a block."""
    return sum(prod(p.shape) // (m * n) * iteration_flops(m, n) for p, m, n in _shapes(parameters))


def largest_flops(parameters: Iterable[Parameter]) -> int:
    """The operations of the longest update of a matrix among those of some parameters; 0: there is none."""
    return max((iteration_flops(m, n) for _, m, n in _shapes(parameters)), default=0)


def returned_bytes(parameters: Iterable[Parameter], parts: int, shards: int) -> int:
    """The bytes that a rank gets back from matrices' homes, of the largest shards."""
    return sum(_NUMBER_BYTES * p.shard_numel(parts, shards) for p, *_ in _shapes(parameters))


def workspace_bytes(parameters: Iterable[Parameter], replicas: int) -> int:
    """The bytes that the update of the largest matrix takes at its home, while those of other homes come and go.

    In bfloat16, what each of `replicas` sends and gets, and of the matrix itself [m, n] twice, and two of [m, m].
    """
    largest = max((m * n + min(m, n) ** 2 for _, m, n in _shapes(parameters)), default=0)
    return _NUMBER_BYTES * (2 * replicas + 2) * largest


def _shapes(parameters: Iterable[Parameter]) -> Iterable[tuple[Parameter, int, int]]:
    """Yield the parameters of matrices, with rows and columns of each."""
    for each in parameters:
        if (dims := matrix_dims(each)) is not None:
            yield each, each.shape[dims[0]], each.shape[dims[1]]
