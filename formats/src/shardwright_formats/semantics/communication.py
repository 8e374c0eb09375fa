"""The bytes that every collective of a step moves: what the runtime does, in formulas.

`bytes` counts as `hardware_profile.Collective` does, the full tensor on one rank: the input of all_reduce,
reduce_scatter and all_to_all, the output of all_gather. An uneven all_to_all (redistribution, ties) counts what this
rank sends.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import lcm, prod
from typing import NamedTuple

from shardwright_formats.semantics.layout import Layout, closed_groups, parameter_box, parameter_layout, sent_numel
from shardwright_formats.types.hardware_profile import Collective
from shardwright_formats.types.model import BoundaryTensor, LayerType, Model, Region
from shardwright_formats.types.strategy import DataParallel, Recompute, SequenceParallel, Strategy

__all__ = [
    "Cause",
    "Message",
    "loss_messages",
    "parameter_messages",
    "partial_gradient_bytes",
    "redistribution_messages",
    "region_messages",
]

_REDUCTIONS = 2
"""What the cross entropy sums over the ranks for a position: the exponentials and the label's own logit."""


class Cause(StrEnum):
    """Why bytes move."""

    PARAMETERS = "parameters"
    """ZeRO gathers parameters."""
    GRADIENTS = "gradients"
    """Data-parallel ranks sum gradients."""
    PARTIAL_GRADIENTS = "partial_gradients"
    """Tensor-parallel ranks sum the gradients of whole parameters that each applied to its own part."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Activations enter and leave matrices that ranks share."""
    ULYSSES = "ulysses"
    """Positions are exchanged for heads."""
    LOSS = "loss"
    """Ranks that share a vocabulary sum their parts of the cross entropy."""
    REDISTRIBUTION = "redistribution"
    """Two layers lie differently over the ranks."""
    PIPELINE = "pipeline"
    """Sends between pipeline stages."""
    TIED_PARAMETERS = "tied_parameters"
    """Gradients of parameters that several elements hold copies of."""
    NORM = "norm"
    """Loss, gradient norm and the wish to stop, over all ranks."""


class Message(NamedTuple):
    """A collective that a rank takes part in, so many times."""

    cause: Cause
    collective: Collective
    group_size: int
    bytes: int
    times: int = 1


def parameter_messages(
    kind: LayerType, strategy: Strategy, compute_bytes: int, reduce_bytes: int, microbatches: int, every: bool
) -> Iterator[Message]:
    """What data parallelism moves for one layer in one step (Rajbhandari et al. 2020).

    ZeRO cuts the first dim of every parameter's tensor-parallel share into equal parts, the last ones padded; ZeRO-2
    gathers once a step, ZeRO-3 for every forward and every backward pass (recomputation happens inside the latter).
    Gradients are reduced once, or with `every` after each microbatch.
    """
    layout = parameter_layout(strategy)
    ranks = layout.dp_size
    if ranks == 1:
        return
    shapes = [_share(parameter.shape, parameter.tp_dim, layout.tp_size) for parameter in kind.parameters]
    reductions = microbatches if every else 1
    if strategy.data_parallel is DataParallel.DDP:
        whole = sum(prod(shape) for shape in shapes)
        yield Message(Cause.GRADIENTS, Collective.ALL_REDUCE, ranks, whole * reduce_bytes, reductions)
        return
    padded = sum(-(-shape[0] // ranks) * ranks * prod(shape[1:]) for shape in shapes)
    gathers = 2 * microbatches if strategy.data_parallel is DataParallel.ZERO3 else 1
    yield Message(Cause.PARAMETERS, Collective.ALL_GATHER, ranks, padded * compute_bytes, gathers)
    yield Message(Cause.GRADIENTS, Collective.REDUCE_SCATTER, ranks, padded * reduce_bytes, reductions)


def partial_gradient_bytes(kind: LayerType, strategy: Strategy, rank: int, parameter_bytes: int) -> int:
    """Bytes that this rank's tensor-parallel group adds up once a step: gradients of whole parameters, as stored.

    Those used inside a region are parts of a sum on every rank, the others where Megatron splits the sequence.
    """
    if parameter_layout(strategy).tp_size == 1:
        return 0
    everywhere = strategy.sequence_parallel is SequenceParallel.MEGATRON
    parts = (p for p in kind.parameters if p.tp_dim is None and (p.inside or everywhere))
    boxes = (parameter_box(parameter, strategy, rank) for parameter in parts)
    return sum(prod(high - low for low, high in box) for box in boxes) * parameter_bytes


def region_messages(
    model: Model, type_name: str, strategy: Strategy, samples: int, itemsize: int, microbatches: int
) -> Iterator[Message]:
    """What tensor and sequence parallelism move for one layer in one step, `samples` being those of a microbatch.

    Without sequence parallelism a region sums its output forward and the gradient of its inputs backward (Shoeybi et
    al. 2019); Megatron's gathers and scatters the sequence in place of both (Korthikanti et al. 2022); Ulysses
    exchanges queries, keys, values and the result, and their gradients (Jacobs et al. 2023), key and value heads
    repeated until the degree divides their number. Recomputation repeats what the forward pass did, but stops when it
    has all it needs: the last sum of what is recomputed is left out, unless `replays_sum` names the kind.
    """
    if strategy.tp_size == 1:
        return
    kind = model.types[type_name]
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    share = samples // strategy.dp_size * itemsize
    sizes = {tensor.name: share * tensor.sequence_length for tensor in model.boundary}
    features = {tensor.name: tensor.features for tensor in model.boundary}
    for index, region in enumerate(kind.regions):
        alone = recompute.value == region.name
        replays = recompute is Recompute.FULL or alone
        ends = (alone or index == len(kind.regions) - 1) and recompute.value not in region.replays_sum
        if strategy.sequence_parallel is SequenceParallel.ULYSSES:
            yield from _exchanges(region, strategy.tp_size, sizes, (3 if replays else 2) * microbatches)
            continue
        for name in region.enters:
            yield from _entering(strategy, sizes[name] * features[name], replays, microbatches)
        if region.leaves is not None:
            yield from _leaving(
                strategy, sizes[region.leaves] * features[region.leaves], replays and not ends, microbatches
            )


def _entering(strategy: Strategy, size: int, replays: bool, microbatches: int) -> Iterator[Message]:
    ranks = strategy.tp_size
    if strategy.sequence_parallel is SequenceParallel.MEGATRON:
        times = (2 if replays else 1) * microbatches
        yield Message(Cause.TENSOR_PARALLEL, Collective.ALL_GATHER, ranks, size, times)
        yield Message(Cause.TENSOR_PARALLEL, Collective.REDUCE_SCATTER, ranks, size, microbatches)
    else:
        yield Message(Cause.TENSOR_PARALLEL, Collective.ALL_REDUCE, ranks, size, microbatches)


def _leaving(strategy: Strategy, size: int, replays: bool, microbatches: int) -> Iterator[Message]:
    ranks, times = strategy.tp_size, (2 if replays else 1) * microbatches
    if strategy.sequence_parallel is SequenceParallel.MEGATRON:
        yield Message(Cause.TENSOR_PARALLEL, Collective.REDUCE_SCATTER, ranks, size, times)
        yield Message(Cause.TENSOR_PARALLEL, Collective.ALL_GATHER, ranks, size, microbatches)
    else:
        yield Message(Cause.TENSOR_PARALLEL, Collective.ALL_REDUCE, ranks, size, times)


def _exchanges(region: Region, ranks: int, sizes: dict[str, int], times: int) -> Iterator[Message]:
    heads = region.attention
    if heads is None:
        return
    queries = sizes[heads.queries] * heads.heads * heads.head_features // ranks
    keys = sizes[heads.keys] * lcm(heads.kv_heads, ranks) * heads.head_features // ranks
    for size, number in ((queries, 2), (keys, 2)):
        yield Message(Cause.ULYSSES, Collective.ALL_TO_ALL, ranks, size, number * times)


def loss_messages(
    kind: LayerType, strategy: Strategy, samples: int, itemsize: int, microbatches: int
) -> Iterator[Message]:
    """What the cross entropy over a shared vocabulary moves in one step: a maximum and two sums for each position.

    They are computed in float32 at least.
    """
    ranks = parameter_layout(strategy).tp_size
    positions = samples // strategy.dp_size * kind.labels * max(4, itemsize)
    if ranks > 1 and positions:
        for size in (positions, _REDUCTIONS * positions):
            yield Message(Cause.LOSS, Collective.ALL_REDUCE, ranks, size, microbatches)


def redistribution_messages(
    tensors: Sequence[BoundaryTensor],
    source: Layout,
    target: Layout,
    rank: int,
    samples: int,
    itemsize: int,
    microbatches: int,
) -> Iterator[Message]:
    """What one rank sends in a step where tensors change their layout: one uneven all_to_all each, and one back.

    A rank that keeps all it has takes part in none. Recomputation does not repeat it: the layer's input is kept as it
    arrived.
    """
    if source == target:
        return
    for tensor in tensors:
        length = tensor.sequence_length
        members = next(group for group in closed_groups(source, target, samples, length) if rank in group)
        for before, after in ((source, target), (target, source)):
            sent = sent_numel(before, after, samples, length, tensor.features)[rank]
            if len(members) > 1:
                size = sent * itemsize
                yield Message(Cause.REDISTRIBUTION, Collective.ALL_TO_ALL, len(members), size, microbatches)


def _share(shape: tuple[int, ...], tp_dim: int | None, tp_size: int) -> tuple[int, ...]:
    return tuple(-(-length // tp_size) if dim == tp_dim else length for dim, length in enumerate(shape))
