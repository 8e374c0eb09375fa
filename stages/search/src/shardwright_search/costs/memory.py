"""Memory of one rank, term by term, as this project's runtime holds it, which leaves most to FSDP2.

P: parameters of a tensor-parallel rank's share of a layer; w: data-parallel size; s, c, r: bytes of an element as
stored, computed with and reduced.
"""

from collections.abc import Iterable

from shardwright_formats.model import LayerType, Parameter
from shardwright_formats.plan import ELEMENT_BYTES, Precision
from shardwright_formats.strategy import DataParallel, Strategy

__all__ = [
    "element_bytes",
    "gathered_parameters_bytes",
    "gradients_bytes",
    "optimizer_bytes",
    "parameters_bytes",
    "stage_memory_bytes",
    "transient_gather_bytes",
    "transient_gradients_bytes",
]


def element_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return ELEMENT_BYTES[dtype]


def parameters_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Stored parameters: sP under DDP, sP/w when sharded."""
    return element_bytes(precision.parameters) * _held_elements(kind, strategy)


def gathered_parameters_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Copies for compute that stay all step long: cP under ZeRO-2 and DDP, but not where what is stored serves."""
    if strategy.data_parallel is DataParallel.ZERO3 or _as_stored(strategy, precision):
        return 0
    return element_bytes(precision.compute) * kind.parameter_count(strategy.tp_size)


def gradients_bytes(kind: LayerType, strategy: Strategy, precision: Precision, num_microbatches: int) -> int:
    """Gradients with deferred reduction: rP under DDP and while microbatches are summed up; sP/w when sharded.

    In the last backward pass reduced gradients take the place of unreduced ones layer by layer.
    """
    whole = element_bytes(precision.reduce) * kind.parameter_count(strategy.tp_size)
    if strategy.data_parallel is DataParallel.DDP or _as_stored(strategy, precision):
        return whole
    return whole if num_microbatches > 1 else element_bytes(precision.parameters) * _held_elements(kind, strategy)


def optimizer_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """Adam's two moments in the parameters' type: 2sP under DDP, 2sP/w when sharded."""
    return 2 * parameters_bytes(kind, strategy, precision)


def transient_gather_bytes(kind: LayerType, strategy: Strategy, precision: Precision) -> int:
    """The gathered parameters cP that a ZeRO-3 layer holds during its own forward or backward."""
    if strategy.data_parallel is not DataParallel.ZERO3 or _as_stored(strategy, precision):
        return 0
    return element_bytes(precision.compute) * kind.parameter_count(strategy.tp_size)


def transient_gradients_bytes(kind: LayerType, strategy: Strategy, precision: Precision, num_microbatches: int) -> int:
    """What a sharded layer's reduction holds beside `gradients_bytes`: rP with one microbatch, with several sP/w."""
    if strategy.data_parallel is DataParallel.DDP or _as_stored(strategy, precision):
        return 0
    if num_microbatches > 1:
        return element_bytes(precision.parameters) * _held_elements(kind, strategy)
    return element_bytes(precision.reduce) * kind.parameter_count(strategy.tp_size)


def stage_memory_bytes(
    process_bytes: int, states: Iterable[int], activations: Iterable[int], in_flight: int, transients: Iterable[int]
) -> int:
    """Peak of a pipeline stage: process, states, activations of the microbatches in flight, the largest transient."""
    return process_bytes + sum(states) + in_flight * sum(activations) + max(transients)


def _as_stored(strategy: Strategy, precision: Precision) -> bool:
    """Whether a layer is held whole and computed with as it is stored, without FSDP2."""
    whole = strategy.data_parallel is DataParallel.DDP or strategy.dp_size == 1
    return whole and precision.parameters == precision.compute == precision.reduce


def _held_elements(kind: LayerType, strategy: Strategy) -> int:
    shards = 1 if strategy.data_parallel is DataParallel.DDP else strategy.dp_size
    return sum(_shard_elements(p, strategy.tp_size, shards) for p in kind.parameters)


def _shard_elements(parameter: Parameter, tp_size: int, shards: int) -> int:
    """Elements of the largest shard: FSDP2 cuts the first dim into even pieces, rounded up."""
    whole = parameter.elements(tp_size)
    if not parameter.shape:
        return whole
    rows = parameter.shape[0]
    if parameter.tp_dim == 0:
        rows = -(-rows // tp_size)
    return whole // rows * -(-rows // shards)
