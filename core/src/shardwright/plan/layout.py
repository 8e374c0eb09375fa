"""Parts of parameters that ranks hold, and the pieces of a microbatch that move between two layouts."""

from collections.abc import Set
from functools import lru_cache
from itertools import cycle
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.plan.axes import ActivationShard, Layout, axes_of
from shardwright.types import LayerStrategy, LayerType, Parameter, Plan, Strategy


class Transfer(NamedTuple):
    """A block of a tensor that moves between ranks, or stays, when the layout changes; ranks count within a stage."""

    source: int
    target: int
    piece: ActivationShard


Box = tuple[tuple[int, int], ...]
"""A part of a parameter: for each dim the half-open range [start, stop)."""


def parameter_box(parameter: Parameter, strategy: Strategy, rank: int) -> Box:
    """Return the block of a parameter that a rank of its stage stores; the last shard of a dim may be smaller.

    Expert and tensor parallelism split `ep_dim` and `tp_dim` first. ZeRO then splits a dim of this part, `states_dim`
    (usually the first), over `shard_size` neighbouring data-parallel ranks, or over all of them.
    """
    if isinstance(strategy, LayerStrategy) and (grid := strategy.expert_grid) and parameter.ep_dim is not UNSET:
        strategy = grid
    tensor, states, shards, experts = axes_of(strategy).dense
    ranges = [(0, length) for length in parameter.shape]
    for dim, axis in ((parameter.ep_dim, experts), (parameter.tp_dim, tensor)):
        if isinstance(dim, int):
            ranges[dim] = _share(ranges[dim], axis.size, axis.part_of(rank))
    if shards > 1 and ranges and not parameter.is_buffer:
        part = parameter.of_experts(experts.size)
        dim = part.states_dim(tensor.size, shards)
        start, end = ranges[dim]
        padded = (start, start + part.part_length(dim, tensor.size))
        low, high = _share(padded, shards, states.part_of(rank) % shards)
        ranges[dim] = (min(low, end), min(high, end))
    return tuple(ranges)


def overlap(first: Box, second: Box) -> Box | None:
    """Return the common part of two boxes, or None if there is none."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(low >= high for low, high in common) else common


def _share(whole: tuple[int, int], parts: int, index: int) -> tuple[int, int]:
    start, stop = whole
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


@lru_cache(maxsize=1024)
def redistribution_plan(source: Layout, target: Layout, samples: int, sequence_length: int) -> tuple[Transfer, ...]:
    """Return the blocks that move between ranks, or stay, when a micro-batch changes from one layout to another.

    Each element of the target is received exactly once, and no rank receives two pieces from the same rank. If the
    source is replicated, a rank serves itself if it can; otherwise the receivers are divided among the replicas.
    Layouts of different width belong to two pipeline stages, which have no rank in common: all pieces move, and the
    replicas send alternately.
    """
    transfers = []
    apart = source.stage_size != target.stage_size
    share = samples // source.samples.size
    groups = [
        [(held, source.activation_shard(held[0], samples, sequence_length)) for held in source.replica_groups(part)]
        for part in range(source.samples.size)
    ]
    turns = {replicas: cycle(replicas) for in_part in groups for replicas, _ in in_part}
    for rank in range(target.stage_size):
        wanted = target.activation_shard(rank, samples, sequence_length)
        for part in range(wanted.batch_start // share, -(-wanted.batch_end // share)):
            for replicas, held in groups[part]:
                if (piece := held.intersect(wanted)) is not None:
                    near = rank if rank in replicas else replicas[rank % len(replicas)]
                    transfers.append(Transfer(next(turns[replicas]) if apart else near, rank, piece))
    return tuple(transfers)


@lru_cache(maxsize=1024)
def closed_groups(source: Layout, target: Layout, samples: int, sequence_length: int) -> tuple[tuple[int, ...], ...]:
    """Return the smallest groups of a stage's ranks that exchange pieces only among themselves, in either direction."""
    group_of = {rank: [rank] for rank in range(source.stage_size)}
    there = redistribution_plan(source, target, samples, sequence_length)
    back = redistribution_plan(target, source, samples, sequence_length)
    for sender, receiver, _ in there + back:
        larger, other = group_of[sender], group_of[receiver]
        if larger is not other:
            larger, other = (larger, other) if len(larger) >= len(other) else (other, larger)
            larger += other
            group_of.update(dict.fromkeys(other, larger))
    return tuple(sorted({id(group): tuple(sorted(group)) for group in group_of.values()}.values()))


def sent_numel(source: Layout, target: Layout, samples: int, sequence_length: int, features: int) -> tuple[int, ...]:
    """Return the number of elements that each rank sends forward when the layout changes; backward is the reverse."""
    sent = [0] * source.stage_size
    apart = source.stage_size != target.stage_size
    for transfer in redistribution_plan(source, target, samples, sequence_length):
        if apart or transfer.source != transfer.target:
            sent[transfer.source] += transfer.piece.tokens * features
    return tuple(sent)


# The order in which a plan lays out the positions of a sample, so that causal attention is the same work on every rank.


def position_order(plan: Plan, causal: bool) -> tuple[int, ...] | None:
    """Return the positions of a sample in the order in which a plan's ranks hold them; None if it is unchanged.

    The order is unchanged if no rank attends to positions of other ranks, and if attention is not causal.
    """
    parts = max(strategy.cp_size for strategy in (plan.embedding, *plan.layers, plan.head))
    return zigzag(plan.model.sequence_length, parts) if causal and parts > 1 else None


def zigzag(length: int, parts: int) -> tuple[int, ...]:
    """Return the positions of a sample in 2 x parts equal chunks: first, last, second, last but one, and so on.

    Under a causal mask every pair of chunks is the same work (Grattafiori et al. 2024). Hence contiguous shares of
    whole pairs are the same work, too, for every number of ranks that divides `parts`.
    """
    size = length // (2 * parts)
    chunks = (chunk for pair in range(parts) for chunk in (pair, 2 * parts - 1 - pair))
    return tuple(position for chunk in chunks for position in range(chunk * size, (chunk + 1) * size))


# Groups of a layer's parameters that are sharded in the same way: experts, and all others.


class ParameterGroup(NamedTuple):
    """The parameters of a layer type that are sharded by one strategy."""

    kind: LayerType
    """The layer type with only these parameters; for experts, with the parameters of one group of experts."""
    strategy: Strategy

    def without(self, names: Set[str]) -> "ParameterGroup":
        """Return the group without the parameters that have these names."""
        kept = tuple(p for p in self.kind.parameters if p.name not in names)
        return self._replace(kind=replace(self.kind, parameters=kept))

    def uncut(self, kind: LayerType) -> LayerType:
        """Return the layer's type with only the group's parameters, unsharded."""
        names = {p.name for p in self.kind.parameters}
        return replace(kind, parameters=tuple(p for p in kind.parameters if p.name in names))


def parameter_groups(kind: LayerType, strategy: Strategy) -> tuple[ParameterGroup, ...]:
    """Return the groups of a layer's parameters: experts are the last group if they have a separate strategy."""
    if not isinstance(strategy, LayerStrategy) or strategy.experts is UNSET:
        return (ParameterGroup(kind, strategy),)
    return _with_experts(kind, strategy)


def _with_experts(kind: LayerType, strategy: LayerStrategy) -> tuple[ParameterGroup, ...]:
    grid = strategy.expert_grid
    assert grid is not None
    experts = tuple(p.of_experts(grid.ep_size) for p in kind.parameters if p.ep_dim is not UNSET)
    others = tuple(p for p in kind.parameters if p.ep_dim is UNSET)
    return (
        ParameterGroup(replace(kind, parameters=others), replace(strategy, experts=UNSET)),
        ParameterGroup(replace(kind, parameters=experts), grid),
    )
