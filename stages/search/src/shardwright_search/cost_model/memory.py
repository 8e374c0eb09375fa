"""Memory of one rank, term by term, as this project's runtime holds it, which leaves most to FSDP2.

P: parameters of a rank's share of a layer before ZeRO (under Ulysses the whole layer); w: the ranks that share them by
data parallelism; s, c, r: bytes of an element as stored, computed with and reduced.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright_formats.semantics.layout import parameter_layout
from shardwright_formats.types.model import LayerType, Parameter
from shardwright_formats.types.plan import ITEMSIZE, Precision
from shardwright_formats.types.strategy import DataParallel, Strategy

__all__ = [
    "Workspace",
    "buffer_bytes",
    "gathered_parameters_bytes",
    "gradients_bytes",
    "itemsize",
    "optimizer_bytes",
    "parameters_bytes",
    "peak_bytes",
    "unreduced_bytes",
]


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return ITEMSIZE[dtype]


def parameters_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Stored parameters: sP under DDP, sP/w when sharded."""
    return itemsize(precision.parameters) * _sharded_numel(kind, strategy)


def gathered_parameters_bytes(kind: LayerType, strategy: Strategy, precision: Precision, first: bool = False) -> int:
    """Copies for compute that stay all step long: cP under ZeRO-2 and DDP, but not where what is stored serves.

    Under ZeRO-3 that is the message of the `first` element of the model, which FSDP2 keeps until the next gather.
    """
    passing = strategy.data_parallel is DataParallel.ZERO3 and not first
    if passing or _as_stored(strategy, precision):
        return 0
    return itemsize(precision.compute) * _unsharded_numel(kind, strategy)


def gradients_bytes(
    kind: LayerType, strategy: Strategy, precision: Precision, deferred: bool, again: bool = False, first: bool = False
) -> int:
    """Gradients: rP under DDP and, `deferred`, while several microbatches are summed up; sP/w when sharded.

    In the last backward pass reduced gradients take the place of unreduced ones layer by layer. Replicas that reduce
    `again`, every microbatch, keep the sum of what was reduced, sP, beside what is being reduced; of a sharded `first`
    element of the model the message, rP, is kept until the next microbatch's first reduction.
    """
    whole = itemsize(precision.reduce) * _unsharded_numel(kind, strategy)
    resident = itemsize(precision.parameters) * _sharded_numel(kind, strategy)
    if _replicated(strategy):
        return whole + resident * again
    return whole if deferred or _as_stored(strategy, precision) else resident + whole * (again and first)


def optimizer_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Adam's two moments in the parameters' type: 2sP under DDP, 2sP/w when sharded."""
    return 2 * parameters_bytes(kind, strategy, precision)


def buffer_bytes(kind: LayerType, strategy: Strategy, precision: Precision, deferred: bool) -> int:
    """What FSDP2 holds of a layer's messages while the layer works: of gathers under ZeRO-3 2cP, of reductions rP.

    Beside the parameters it works with lie those of the layer that comes next, on their way. The message of the layer
    before it, here taken to be as large, is kept until its own is ready; `deferred` that one has taken the place of
    gradients that are counted, and only its outcome, sP/w, comes on top.
    """
    if _replicated(strategy) or _as_stored(strategy, precision):
        return 0
    whole = _unsharded_numel(kind, strategy)
    gathers = 2 * itemsize(precision.compute) * whole if strategy.data_parallel is DataParallel.ZERO3 else 0
    if deferred:
        return gathers + itemsize(precision.parameters) * _sharded_numel(kind, strategy)
    return gathers + itemsize(precision.reduce) * whole


def unreduced_bytes(kind: LayerType, strategy: Strategy, precision: Precision, deferred: bool) -> int:
    """Gradients rP that a sharded layer makes and has reduced when its backward pass is over, unless `deferred`.

    They grow while what the pass itself holds for a moment goes: the larger of both counts.
    """
    if deferred or _replicated(strategy) or _as_stored(strategy, precision):
        return 0
    return itemsize(precision.reduce) * _unsharded_numel(kind, strategy)


class Workspace(NamedTuple):
    """What one element adds to the memory of a microbatch on its way."""

    activation_bytes: int
    """Held from the element's forward pass to its backward pass."""
    workspace_bytes: int
    """Held for a moment in either."""
    late_bytes: int
    """Held from its first backward pass on: gradients."""


def peak_bytes(workspaces: Sequence[Workspace]) -> int:
    """The most that one microbatch holds on its way through a chain of elements.

    While element j works, the activations of the elements up to j are there, j's own transient, and the late bytes of
    j and of the elements behind it.
    """
    peak = resident = 0
    for workspace in workspaces:
        peak = workspace.late_bytes + max(peak, resident + workspace.activation_bytes + workspace.workspace_bytes)
        resident += workspace.activation_bytes
    return peak


def _replicated(strategy: Strategy) -> bool:
    """Whether several ranks hold all of a layer, and sum its gradients where they lie."""
    return strategy.data_parallel is DataParallel.DDP and parameter_layout(strategy).dp_size > 1


def _as_stored(strategy: Strategy, precision: Precision) -> bool:
    """Whether a layer is held whole and computed with as it is stored, without FSDP2."""
    whole = strategy.data_parallel is DataParallel.DDP or parameter_layout(strategy).dp_size == 1
    return whole and precision.parameters == precision.compute == precision.reduce


def _unsharded_numel(kind: LayerType, strategy: Strategy) -> int:
    return kind.parameter_count(parameter_layout(strategy).tp_size)


def _sharded_numel(kind: LayerType, strategy: Strategy) -> int:
    layout = parameter_layout(strategy)
    shards = 1 if strategy.data_parallel is DataParallel.DDP else layout.dp_size
    return sum(_shard_numel(p, layout.tp_size, shards) for p in kind.parameters)


def _shard_numel(parameter: Parameter, tp_size: int, shards: int) -> int:
    """Elements of the largest shard: FSDP2 cuts the first dim into even pieces, rounded up."""
    whole = parameter.numel(tp_size)
    if not parameter.shape:
        return whole
    rows = parameter.shape[0]
    if parameter.tp_dim == 0:
        rows = -(-rows // tp_size)
    return whole // rows * -(-rows // shards)
