"""Messages of experts: positions that go to the ranks of their experts and back, and counts of what was chosen.

A router sends positions where it will; the formulas are those of even load, in which each rank sends as much to one as
to another.
"""

from collections.abc import Iterator, Mapping

from msgspec import UNSET

from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.semantics.messages import Cause, Message
from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import BoundaryTensor, Experts, LayerStrategy, LayerType, Recompute, Strategy
from shardwright_formats.types.hardware_profile import Collective

_COUNT_BYTES = 4
"""Bytes of the number that counts how often an expert was chosen."""
_WEIGHT_BYTES = 4
"""Bytes of the weight of an expert's result, at least."""


def shares_experts(strategy: Strategy) -> bool:
    """Return whether ranks share experts out as a whole."""
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

    Where ranks have parts of a sequence, the balance loss takes the counts of the whole. Recomputation of the
    feed-forward part, and selective recomputation, repeat what the forward pass did.
    """
    if kind.experts is UNSET:
        return
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    replays = recompute in (Recompute.FULL, Recompute.SELECTIVE, Recompute.MLP)
    passes = (Pass.FORWARD, Pass.BACKWARD) if replays else (Pass.FORWARD,)
    axes = axes_of(strategy)
    here = axes.rank_samples(samples)
    if axes.exchanges_heads or (shares_experts(strategy) and axes.gathers_sequence):
        size = here * kind.experts.number * _COUNT_BYTES
        for during in passes:
            yield Message(Cause.EXPERTS, Collective.ALL_REDUCE, axes.layout.sample_ranks, size, during, microbatches)
    grid = strategy.expert_grid if isinstance(strategy, LayerStrategy) else None
    if grid is not None and (ranks := axes_of(grid).dense.tensor.size) > 1:
        stream = next(tensors[region.leaves] for region in kind.regions if region.name == "mlp" and region.leaves)
        positions = here * stream.sequence_length // axes.layout.sequence.size
        for during, size, times in _exchanges(kind.experts, positions, stream.features, itemsize, replays):
            yield Message(Cause.EXPERTS, Collective.ALL_TO_ALL, ranks, size, during, times * microbatches)


def _exchanges(
    experts: Experts, positions: int, features: int, itemsize: int, replays: bool
) -> Iterator[tuple[Pass, int, int]]:
    """Yield pass, bytes and number of all-to-alls: counts, rows there and back, and weights."""
    rows = positions * experts.top_k
    for size, once in (
        (experts.number * _COUNT_BYTES, 0),
        (rows * features * itemsize, 2),
        (rows * max(itemsize, _WEIGHT_BYTES), 1),
    ):
        there = max(once, 1)
        yield Pass.FORWARD, size, there
        if again := once + there * replays:
            yield Pass.BACKWARD, size, again
