"""Memory that a layer's parameters take on one rank, as this project's runtime holds it, which leaves most to FSDP2.

P: parameters of a rank's share of a layer before ZeRO (under Ulysses the whole layer); w: the ranks that share them by
data parallelism (of a shard group); s, c, r: bytes of a number as stored, computed with and reduced. P/w is rounded up
to FSDP2's shards.
"""

import msgspec

from shardwright_formats.semantics.axes import ParameterAxes, axes_of
from shardwright_formats.semantics.buckets import copied_bucket_bytes
from shardwright_formats.types import ITEMSIZE, DataParallel, LayerType, Parameter, Precision, Strategy


class ParameterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer's parameters on one rank."""

    parameters: int
    """As stored: sP under DDP, sP/w when sharded."""
    gathered_parameters: int
    """Copies for compute that stay all step long: cP under ZeRO-2 and DDP, but not where what is stored serves.

    Under ZeRO-3 that is the gather buffer of the model's first layer, which FSDP2 keeps until the next gather.
    """
    gradients: int
    """What a backward pass makes: rP under DDP and while several microbatches are summed up; sP/w when sharded.

    In the last backward pass reduced gradients take the place of unreduced ones layer by layer. Of a sharded first
    layer that reduces every microbatch the reduction's buffer, rP, is kept until the next microbatch's first reduction.
    Replicas of shards keep what they have summed, rP/w, until the backward pass is over, which is the gradient itself
    where both formats are one.
    """
    gradient_sums: int
    """sP of replicas that reduce every microbatch: of the microbatches before, beside what a backward pass makes anew.

    What that one makes is on its way until the next backward pass of the stage begins.
    """
    optimizer: int
    """Adam's two moments in the parameters' type."""
    buffers: int
    """What FSDP2 holds of a layer's collectives while the layer works: of gathers under ZeRO-3 2cP, of reductions rP.

    Beside the parameters it works with lie those of the layer that comes next, on their way. The reduction buffer of
    the layer before it, here taken to be as large, is kept until its own is ready; where the reduction is deferred that
    one has taken the place of gradients that are counted, and only its outcome, sP/w, comes on top.
    """
    unreduced_gradients: int
    """rP that a sharded layer makes and has reduced when its backward pass is over, unless that is deferred.

    They grow while what the pass itself holds for a moment goes: the larger of both counts. Of a replicated layer, the
    largest bucket that its gradients are copied to.
    """


def itemsize(dtype: str) -> int:
    """Bytes of one number."""
    return ITEMSIZE[dtype]


def parameter_memory(
    kind: LayerType,
    strategy: Strategy,
    precision: Precision,
    *,
    deferred: bool,
    reduce_every_microbatch: bool = False,
    is_first_layer: bool = False,
) -> ParameterMemory:
    """Of one layer on one rank.

    `deferred`: several microbatches are summed up before the reduction; `reduce_every_microbatch`: they are reduced one
    by one. With a single microbatch neither holds.
    """
    axes, ddp = axes_of(strategy).dense, strategy.data_parallel is DataParallel.DDP
    numel, shard = kind.parameter_count(axes.tensor.size), _shard_numel(kind, axes)
    whole, computed = itemsize(precision.reduce) * numel, itemsize(precision.compute) * numel
    own = itemsize(precision.parameters) * shard
    one_format = precision.parameters == precision.compute == precision.reduce
    as_stored = (ddp or axes.states.size == 1) and one_format  # without FSDP2
    replicated = ddp and axes.states.size > 1
    zero3, fsdp = strategy.data_parallel is DataParallel.ZERO3, not (replicated or as_stored)
    summed = (
        itemsize(precision.reduce) * shard * bool(axes.replicates_shards and precision.reduce != precision.parameters)
    )
    gradients = own + summed + whole * (reduce_every_microbatch and is_first_layer)
    if replicated or deferred or as_stored:
        gradients = whole
    return ParameterMemory(
        parameters=own,
        gathered_parameters=0 if as_stored or (zero3 and not is_first_layer) else computed,
        gradients=gradients,
        gradient_sums=own * (replicated and reduce_every_microbatch),
        optimizer=2 * own,
        buffers=fsdp * (2 * computed * zero3 + (own if deferred else whole)),
        unreduced_gradients=_bucket_bytes(kind, axes.tensor.size, precision)
        if replicated
        else whole * (fsdp and not deferred),
    )


def _bucket_bytes(kind: LayerType, parts: int, precision: Precision) -> int:
    return copied_bucket_bytes([itemsize(precision.reduce) * p.numel(parts) for p in kind.parameters])


def _shard_numel(kind: LayerType, axes: ParameterAxes) -> int:
    """Numbers in a layer's largest shard: FSDP2 cuts the first dim of each parameter into even pieces, rounded up."""
    return sum(_rows_numel(parameter, axes.tensor.size, axes.shards) for parameter in kind.parameters)


def _rows_numel(parameter: Parameter, parts: int, shards: int) -> int:
    numel = parameter.numel(parts)
    if not parameter.shape:
        return numel
    rows = parameter.shape[0]
    if parameter.tp_dim == 0:
        rows = -(-rows // parts)
    return numel // rows * -(-rows // shards)
