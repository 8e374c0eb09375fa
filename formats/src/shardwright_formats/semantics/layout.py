"""Which ranks work together under a strategy, which part of a batch each holds, and what moves between two layouts."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple

from shardwright_formats.types import Parameter, SequenceParallel, Strategy


class ActivationShard(NamedTuple):
    """A part of a microbatch: samples [batch_start, batch_end) x positions [sequence_start, sequence_end)."""

    batch_start: int
    batch_end: int
    sequence_start: int
    sequence_end: int

    @property
    def tokens(self) -> int:
        """Number of positions over all samples."""
        return (self.batch_end - self.batch_start) * (self.sequence_end - self.sequence_start)

    def intersect(self, other: "ActivationShard") -> "ActivationShard | None":
        """The common part, or None."""
        common = ActivationShard(
            max(self.batch_start, other.batch_start),
            min(self.batch_end, other.batch_end),
            max(self.sequence_start, other.sequence_start),
            min(self.sequence_end, other.sequence_end),
        )
        empty = common.batch_start >= common.batch_end or common.sequence_start >= common.sequence_end
        return None if empty else common


class Layout(NamedTuple):
    """How a microbatch lies over the ranks of a pipeline stage, before and after a layer.

    Ranks are counted inside the stage. Use `layout_of`: it gives equal layouts one spelling.
    """

    stage_size: int
    tp_size: int
    consecutive: bool
    sequence_split: bool

    @property
    def dp_size(self) -> int:
        """Number of shares the samples are cut into."""
        return self.stage_size // self.tp_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The data-parallel and the tensor-parallel index of a rank."""
        if self.consecutive:
            return rank // self.tp_size, rank % self.tp_size
        return rank % self.dp_size, rank // self.dp_size

    def activation_shard(self, rank: int, samples: int, sequence_length: int) -> ActivationShard:
        """The part of a microbatch of `samples` that a rank holds."""
        dp_index, tp_index = self.coordinates(rank)
        share = samples // self.dp_size
        first = dp_index * share
        if not self.sequence_split:
            return ActivationShard(first, first + share, 0, sequence_length)
        length = sequence_length // self.tp_size
        return ActivationShard(first, first + share, tp_index * length, (tp_index + 1) * length)

    def holders(self, dp_index: int) -> tuple[int, ...]:
        """The ranks of one tensor-parallel group, in tensor-parallel order."""
        if self.consecutive:
            return tuple(range(dp_index * self.tp_size, (dp_index + 1) * self.tp_size))
        return tuple(range(dp_index, self.stage_size, self.dp_size))


class Transfer(NamedTuple):
    """One piece that moves from one rank to another (or stays) when the layout changes, ranks counted in a stage."""

    source: int
    target: int
    piece: ActivationShard


def layout_of(strategy: Strategy) -> Layout:
    """The layout of the activations that enter and leave a layer of this strategy."""
    size = strategy.tp_size * strategy.dp_size
    alone = strategy.tp_size in (1, size)
    split = strategy.sequence_parallel is not SequenceParallel.NONE and strategy.tp_size > 1
    return Layout(size, strategy.tp_size, strategy.tp_consecutive or alone, split)


def parameter_layout(strategy: Strategy) -> Layout:
    """How the ranks of a stage share the parameters of a layer; under Ulysses all of them are data-parallel."""
    size = strategy.tp_size * strategy.dp_size
    if strategy.sequence_parallel is SequenceParallel.ULYSSES:
        return Layout(size, 1, True, False)
    return layout_of(strategy)._replace(sequence_split=False)


Box = tuple[tuple[int, int], ...]
"""A part of a parameter: for each dim the half-open range [start, stop)."""


def parameter_box(parameter: Parameter, strategy: Strategy, rank: int) -> Box:
    """The part of a parameter that a rank of its pipeline stage stores, the last share of a dim cut short if need be.

    Tensor parallelism cuts `tp_dim` first; ZeRO then cuts the first dim of what is left among neighbouring
    data-parallel ranks, `shard_size` of them or all.
    """
    layout = parameter_layout(strategy)
    dp_index, tp_index = layout.coordinates(rank)
    ranges = [(0, length) for length in parameter.shape]
    if parameter.tp_dim is not None:
        ranges[parameter.tp_dim] = _share(ranges[parameter.tp_dim], layout.tp_size, tp_index)
    if strategy.state_shards > 1 and ranges:
        padded = -(-parameter.shape[0] // layout.tp_size) if parameter.tp_dim == 0 else parameter.shape[0]
        start = ranges[0][0]
        low, high = _share((start, start + padded), strategy.state_shards, dp_index % strategy.state_shards)
        ranges[0] = (min(low, ranges[0][1]), min(high, ranges[0][1]))
    return tuple(ranges)


def overlap(first: Box, second: Box) -> Box | None:
    """The common part of two boxes, or None."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(low >= high for low, high in common) else common


def _share(whole: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    start, stop = whole
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def tp_groups(ranks: Sequence[int], tp_size: int, consecutive: bool) -> tuple[tuple[int, ...], ...]:
    """The tensor-parallel groups of a stage's ranks; together with `dp_groups` they form a grid."""
    layout = Layout(len(ranks), tp_size, consecutive, False)
    return tuple(tuple(ranks[i] for i in layout.holders(d)) for d in range(layout.dp_size))


def dp_groups(ranks: Sequence[int], tp_size: int, consecutive: bool) -> tuple[tuple[int, ...], ...]:
    """The data-parallel groups of a stage's ranks: those of equal tensor-parallel index."""
    return tuple(zip(*tp_groups(ranks, tp_size, consecutive), strict=True))


@lru_cache(maxsize=1024)
def redistribution_plan(source: Layout, target: Layout, samples: int, sequence_length: int) -> tuple[Transfer, ...]:
    """The pieces that change rank, or stay, when a microbatch goes from one layout to another.

    Each element of the target is served exactly once, and no rank gets two pieces from another. Where the source is
    replicated, a rank serves itself if it can, else the replicas are shared out among those who ask. Layouts of unequal
    width are of two pipeline stages, whose ranks have nothing in common: all pieces move, and replicas take turns.
    """
    found = []
    apart = source.stage_size != target.stage_size
    share = samples // source.dp_size
    turns = [cycle(source.holders(dp_index)) for dp_index in range(source.dp_size)]
    for rank in range(target.stage_size):
        wanted = target.activation_shard(rank, samples, sequence_length)
        for dp_index in range(wanted.batch_start // share, -(-wanted.batch_end // share)):
            holders = source.holders(dp_index)
            if not source.sequence_split:
                near = rank if rank in holders else holders[rank % len(holders)]
                holders = (next(turns[dp_index]) if apart else near,)
            for holder in holders:
                piece = source.activation_shard(holder, samples, sequence_length).intersect(wanted)
                if piece is not None:
                    found.append(Transfer(holder, rank, piece))
    return tuple(found)


@lru_cache(maxsize=1024)
def closed_groups(source: Layout, target: Layout, samples: int, sequence_length: int) -> tuple[tuple[int, ...], ...]:
    """The smallest groups of a stage's ranks that exchange pieces only among themselves, in either direction."""
    group_of = {rank: frozenset((rank,)) for rank in range(source.stage_size)}
    there = redistribution_plan(source, target, samples, sequence_length)
    back = redistribution_plan(target, source, samples, sequence_length)
    for transfer in there + back:
        merged = group_of[transfer.source] | group_of[transfer.target]
        group_of.update(dict.fromkeys(merged, merged))
    return tuple(sorted({tuple(sorted(group)) for group in group_of.values()}))


def sent_numel(source: Layout, target: Layout, samples: int, sequence_length: int, features: int) -> tuple[int, ...]:
    """Elements that each rank sends to others when the layout changes, forward; backward is the reverse change."""
    sent = [0] * source.stage_size
    apart = source.stage_size != target.stage_size
    for transfer in redistribution_plan(source, target, samples, sequence_length):
        if apart or transfer.source != transfer.target:
            sent[transfer.source] += transfer.piece.tokens * features
    return tuple(sent)
