"""Messages of expert parallelism: positions sent to their experts' ranks and back, and routing counts.

The formulas assume an even load, in which each rank sends as much to one rank as to another; routers may differ.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import UNSET

from shardwright.plan.axes import ParameterAxes, axes_of
from shardwright.plan.messages import Cause, Message
from shardwright.plan.schedules.passes import Pass
from shardwright.types import BoundaryTensor, Experts, LayerStrategy, LayerType, Recompute, Strategy
from shardwright.types.hardware_profile import Collective

_COUNT_BYTES = 4
"""Bytes of the number that counts how often an expert was chosen."""
_WEIGHT_BYTES = 4
"""Bytes of the weight of an expert's result, at least."""


def shares_experts(strategy: Strategy) -> bool:
    """Return whether experts have a separate grid of ranks."""
    return isinstance(strategy, LayerStrategy) and strategy.experts is not UNSET


def expert_messages(
    kind: LayerType,
    strategy: Strategy,
    samples: int,
    tensors: Mapping[str, BoundaryTensor],
    itemsize: int,
    microbatches: int,
) -> Iterator[Message]:
    """Yield the messages of one layer's experts in one step of microbatches of `samples`.

    If ranks have parts of a sequence, the balance loss takes the counts of the whole. Recomputation of the
    feed-forward part, and selective recomputation, repeat what the forward pass did.
    """
    if kind.experts is UNSET:
        return
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    replays = recompute.replays_experts
    passes = (Pass.FORWARD, Pass.BACKWARD) if replays else (Pass.FORWARD,)
    axes = axes_of(strategy)
    here = axes.rank_samples(samples)
    apart = axes.exchanges_heads or (shares_experts(strategy) and axes.gathers_sequence)
    inside = axes.layout.sample_ranks // axes.context.size if apart else 1
    for ranks in (inside, axes.context.size):
        size = here * kind.experts.number * _COUNT_BYTES
        for during in passes if ranks > 1 else ():
            yield Message(Cause.EXPERTS, Collective.ALL_REDUCE, ranks, size, during, microbatches)
    grid = strategy.expert_grid if isinstance(strategy, LayerStrategy) else None
    if grid is not None:
        positions = rank_positions(kind, strategy, samples, tensors)
        sizes = _row_bytes(kind.experts, positions, _stream(kind, tensors).features, itemsize)
        for message in _grid_messages(axes_of(grid).dense, sizes, replays):
            yield message._replace(times=message.times * microbatches)


def rank_positions(kind: LayerType, strategy: Strategy, samples: int, tensors: Mapping[str, BoundaryTensor]) -> int:
    """Return the positions of a microbatch of `samples` that each rank sends to experts on other ranks."""
    axes = axes_of(strategy)
    return axes.rank_samples(samples) * _stream(kind, tensors).sequence_length // axes.layout.sequence.size


def _stream(kind: LayerType, tensors: Mapping[str, BoundaryTensor]) -> BoundaryTensor:
    """Return the tensor that experts take in and give."""
    return next(tensors[region.leaves] for region in kind.regions if region.name == "mlp" and region.leaves)


class _Sizes(NamedTuple):
    """Bytes of the messages of one rank's positions to experts."""

    counts: int
    rows: int
    weights: int


def _row_bytes(experts: Experts, positions: int, features: int, itemsize: int) -> _Sizes:
    rows = positions * experts.top_k
    return _Sizes(experts.number * _COUNT_BYTES, rows * features * itemsize, rows * max(itemsize, _WEIGHT_BYTES))


def _grid_messages(axes: ParameterAxes, sizes: _Sizes, replays: bool) -> Iterator[Message]:
    """Yield the messages of a micro-batch: rows go to their experts' ranks, which may be tensor-parallel groups.

    These gather the rows that all of them get, and sum results as they scatter them.
    """
    if (ranks := axes.experts.size) > 1:
        for size, there, back in ((sizes.counts, 1, 0), (sizes.rows, 2, 2), (sizes.weights, 1, 1)):
            yield from _passes(Collective.ALL_TO_ALL, ranks, size, there, back + there * replays)
    if (ranks := axes.tensor.size) > 1:
        for size, back in ((sizes.counts, 0), (sizes.rows, 1), (sizes.weights, 0)):
            yield from _passes(Collective.ALL_GATHER, ranks, ranks * size, 1, back + replays)
        for size, there in ((sizes.rows, 1), (sizes.weights, 0)):
            yield from _passes(Collective.REDUCE_SCATTER, ranks, ranks * size, there, 1 + there * replays)


def _passes(collective: Collective, ranks: int, size: int, forward: int, backward: int) -> Iterator[Message]:
    """Yield messages of one size, with the number of them in each pass."""
    for during, times in ((Pass.FORWARD, forward), (Pass.BACKWARD, backward)):
        if times:
            yield Message(Cause.EXPERTS, collective, ranks, size, during, times)
