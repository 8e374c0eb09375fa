"""Messages of context parallelism: keys and values of other ranks, and their gradients.

Sources: gather, Grattafiori et al. 2024; ring, Liu et al. 2023, whose gradients go round behind keys and values.
"""

from collections.abc import Iterator, Mapping
from math import lcm
from typing import NamedTuple

from shardwright.plan.axes import axes_of
from shardwright.plan.messages import Cause, Message, sent_through
from shardwright.plan.schedules.passes import Pass
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import LayerType
from shardwright.types.regions import BoundaryTensor, Heads
from shardwright.types.strategy import ContextParallel, LayerStrategy, Recompute, Strategy


class KeysAndValues(NamedTuple):
    """The keys and values of one attention, for all samples of a rank, with positions split over ranks."""

    numel: int
    """Elements of keys and values, for the positions of all ranks and the heads of one."""
    queries: int
    """Elements of the queries of one rank, or of the result if it is larger."""
    ranks: int


def keys_and_values(
    kind: LayerType, strategy: Strategy, samples: int, tensors: Mapping[str, BoundaryTensor]
) -> tuple[KeysAndValues, ...]:
    """Return the keys and values of each attention of a layer for microbatches of `samples`.

    None without context parallelism.
    Of tensor-parallel ranks each has its heads; Ulysses repeats those of keys until its degree divides their number.
    """
    axes = axes_of(strategy)
    if not axes.shares_context:
        return ()

    def of_region(heads: Heads) -> KeysAndValues:
        ranks = axes.region.size
        count = lcm(heads.kv_heads, ranks) if axes.exchanges_heads else heads.kv_heads
        widths, parts = (heads.head_features, heads.features_of_values), axes.context.size
        of_keys, of_queries = (
            axes.rank_samples(samples) * tensors[name].sequence_length for name in (heads.keys, heads.queries)
        )
        both = of_keys * count * sum(widths) // ranks
        queries = of_queries * heads.heads * max(widths) // ranks // parts
        return KeysAndValues(both, queries, parts)

    return tuple(of_region(region.attention) for region in kind.regions if region.attention is not None)


def context_messages(
    kind: LayerType,
    strategy: Strategy,
    samples: int,
    tensors: Mapping[str, BoundaryTensor],
    compute_itemsize: int,
    reduce_itemsize: int,
    microbatches: int,
) -> Iterator[Message]:
    """Yield the messages of one layer's context parallelism in one step of microbatches of `samples`.

    Gathered keys and values are gathered again in the backward pass, or by the replay right before it, and their
    gradients scattered. Round a ring of n ranks, keys and values take n-1 steps forward and as many backward, once more
    where attention is recomputed but for selective recomputation, which keeps its result; their gradients take n.
    """
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    is_ring = isinstance(strategy, LayerStrategy) and strategy.context is ContextParallel.RING
    for numel, _, ranks in keys_and_values(kind, strategy, samples, tensors):
        size, reduced = numel * compute_itemsize, numel * reduce_itemsize
        if is_ring:
            again = 1 + (recompute.replays("attention") and recompute is not Recompute.SELECTIVE)
            steps = (
                (Pass.FORWARD, size, ranks - 1),
                (Pass.BACKWARD, size, again * (ranks - 1)),
                (Pass.BACKWARD, reduced, ranks),
            )
            sent = [
                Message(Cause.CONTEXT, Collective.P2P, 2, each // ranks, during, times * microbatches)
                for during, each, times in steps
            ]
        else:
            sent = [
                Message(Cause.CONTEXT, Collective.ALL_GATHER, ranks, size, Pass.FORWARD, microbatches),
                Message(Cause.CONTEXT, Collective.ALL_GATHER, ranks, size, Pass.BACKWARD, microbatches),
                Message(Cause.CONTEXT, Collective.REDUCE_SCATTER, ranks, reduced, Pass.BACKWARD, microbatches),
            ]
        yield from sent_through(kind, sent)
