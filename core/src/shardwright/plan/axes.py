"""The axes along which a strategy splits a layer over its stage's ranks; no other file computes with degrees.

The ranks of a stage, counted from 0, form a grid of dp_size x cp_size x tp_size. Each axis cuts one thing into equal
parts. The number of parts, for each kind of sequence parallelism, with dp, cp and tp for these sizes:

| axis     | what is cut                                       | none    | megatron | ulysses      |
|----------|---------------------------------------------------|---------|----------|--------------|
| samples  | the samples of a microbatch                       | dp      | dp       | dp           |
| context  | the positions of a sample, in attention too       | cp      | cp       | cp           |
| sequence | the positions of a sample, between regions        | cp      | cp x tp  | cp x tp      |
| heads    | attention heads, exchanged for positions          | 1       | 1        | tp           |
| tensor   | parameters at `tp_dim`, matmuls, the vocabulary   | tp      | tp       | 1            |
| states   | what ZeRO shards of a tensor part; DDP copies     | dp x cp | dp x cp  | dp x cp x tp |

If a layer's experts have a separate strategy, the same ranks form a second grid, of dp_size x ep_size x tp_size
(`ExpertGrid`), for the experts only. Its axis `experts` cuts their parameters at `ep_dim` into ep_size parts, tp_size
ranks apart; `tensor` and `states` are as in the column `none`, but ranks along `states` are ep_size x tp_size apart.

Ranks that share a sample are neighbours if `tp_consecutive`, otherwise dp_size apart; among them, ranks that share a
part of its positions are neighbours. Ranks along `states` are those with equal tensor parts; under Ulysses they are all
ranks in their order. `samples` and `sequence` are the layout of activations; `tensor`, `experts` and `states` belong to
a group of parameters: the experts', or all others of the layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import lcm
from typing import NamedTuple, assert_never

from shardwright.types import DataParallel, ExpertGrid, ExpertStrategy, SequenceParallel, Strategy

_KNOWN_FIELDS = {
    *("tp_size", "tp_consecutive", "cp_size", "dp_size", "data_parallel", "shard_size", "sequence_parallel"),
    *("type", "recompute", "context", "offload"),  # these cut nothing
    *("experts", "ep_size"),  # their axes are the ones of `expert_grid`
}


class Axis(NamedTuple):
    """An axis of a pipeline stage's ranks over which something is split: `size` ranks, `stride` apart."""

    size: int
    stride: int = 1

    def part_of(self, rank: int) -> int:
        """Return the index of the part that a rank holds."""
        return rank // self.stride % self.size

    def groups(self, ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of a stage in groups along the axis, each group in the order of its parts."""
        block = self.size * self.stride
        firsts = (place for place in range(len(ranks)) if self.part_of(place) == 0)
        return tuple(tuple(ranks[first : first + block : self.stride]) for first in firsts)


class ActivationShard(NamedTuple):
    """A part of a micro-batch: samples [batch_start, batch_end) x positions [sequence_start, sequence_end)."""

    batch_start: int
    batch_end: int
    sequence_start: int
    sequence_end: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens: positions over all samples."""
        return (self.batch_end - self.batch_start) * (self.sequence_end - self.sequence_start)

    def intersect(self, other: "ActivationShard") -> "ActivationShard | None":
        """Return the intersection of two shards, or None if it is empty."""
        common = ActivationShard(
            max(self.batch_start, other.batch_start),
            min(self.batch_end, other.batch_end),
            max(self.sequence_start, other.sequence_start),
            min(self.sequence_end, other.sequence_end),
        )
        empty = common.batch_start >= common.batch_end or common.sequence_start >= common.sequence_end
        return None if empty else common


class Layout(NamedTuple):
    """How a micro-batch's activations are split over the ranks of a pipeline stage, between layers.

    Ranks are counted inside the stage. Use `layout_of`, which returns equal values for equal layouts.
    """

    stage_size: int
    sample_ranks: int
    """Number of ranks over which each sample is split or replicated."""
    consecutive: bool
    """True if the ranks that share a sample are neighbours; otherwise their distance is the number of parts of the
    samples."""
    sequence_parts: int
    """Number of parts of the sequence. If it is less than `sample_ranks`, neighbours among the ranks that share a
    sample hold the same part."""

    @property
    def samples(self) -> Axis:
        """Return the axis that splits the samples of a micro-batch."""
        return Axis(self.stage_size // self.sample_ranks, self.sample_ranks if self.consecutive else 1)

    @property
    def sharers(self) -> Axis:
        """Return the axis of the ranks that share each sample."""
        return Axis(self.sample_ranks, 1 if self.consecutive else self.samples.size)

    @property
    def sequence(self) -> Axis:
        """Return the axis that splits the sequence; its size is 1 if all ranks hold the whole sequence."""
        if self.sequence_parts == 1:
            return Axis(1)
        return Axis(self.sequence_parts, self.sharers.stride * self.replicas)

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same activations."""
        return self.sample_ranks // self.sequence_parts

    def holders(self, part: int) -> tuple[int, ...]:
        """Return the ranks that share one part of the samples, in the order of the sequence."""
        samples, sharers = self.samples, self.sharers
        first = part * samples.stride
        return tuple(range(first, first + sharers.size * sharers.stride, sharers.stride))

    def replica_groups(self, part: int) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that have one part of the samples, split into groups with equal positions."""
        holders, replicas = self.holders(part), self.replicas
        return tuple(holders[first : first + replicas] for first in range(0, len(holders), replicas))

    def activation_shard(self, rank: int, samples: int, sequence_length: int) -> ActivationShard:
        """Return the part of a micro-batch of `samples` samples that a rank holds."""
        share, length = samples // self.samples.size, sequence_length // self.sequence.size
        first, start = self.samples.part_of(rank) * share, self.sequence.part_of(rank) * length
        return ActivationShard(first, first + share, start, start + length)


class ParameterAxes(NamedTuple):
    """The axes of a group of a layer's parameters, and of their gradients and optimizer states."""

    tensor: Axis
    """Ranks over which tensor parallelism splits each parameter at its `tp_dim`."""
    states: Axis
    """The data-parallel ranks, which hold the same tensor-parallel shards."""
    shards: int
    """Number of neighbours along `states` over which ZeRO shards a tensor-parallel part; 1 if it is replicated."""
    experts: Axis = Axis(1)
    """Ranks over which experts are sharded as a whole: each parameter is split at its `ep_dim`."""

    @property
    def replicas(self) -> int:
        """Return the number of ranks that hold the same shard and sum its gradients."""
        return self.states.size // self.shards

    @property
    def replicates_shards(self) -> bool:
        """Return whether several groups of ranks each hold all shards (HSDP)."""
        return 1 < self.shards < self.states.size

    @property
    def state_axes(self) -> tuple[Axis, ...]:
        """Return the axes of `state_groups` over the ranks of a stage."""
        if not self.replicates_shards:
            return (self.states,)
        stride = self.states.stride
        return Axis(self.shards, stride), Axis(self.replicas, stride * self.shards)

    def state_groups(self, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the groups of ranks that gather states and reduce gradients.

        With HSDP these are the shard groups, then the replica groups.
        """
        for group in self.states.groups(ranks):
            if self.replicates_shards:
                yield from Axis(self.shards).groups(group)
                yield from Axis(self.replicas, self.shards).groups(group)
            else:
                yield group


class Axes(NamedTuple):
    """The axes of one layer over the ranks of its pipeline stage."""

    layout: Layout
    """The layout of the activations that enter and leave the layer."""
    dense: ParameterAxes
    """The axes of the layer's parameters, without experts that have a separate strategy."""
    heads: Axis
    """Ranks that exchange positions for heads around attention (Ulysses)."""
    context: Axis
    """Context-parallel ranks, whose positions attend to each other."""
    gathers_sequence: bool
    """True if a region gathers its input sequence, which is split over ranks (Megatron)."""

    @property
    def shares_context(self) -> bool:
        """Return whether attention runs across ranks that each hold a part of the positions (context parallelism)."""
        return self.context.size > 1

    @property
    def region(self) -> Axis:
        """Return the axis over which a region's matrices are sharded, or positions exchanged for heads (Ulysses)."""
        return self.heads if self.exchanges_heads else self.dense.tensor

    @property
    def exchanges_heads(self) -> bool:
        """Return whether ranks have some heads of all positions in attention, but all heads of some elsewhere."""
        return self.heads.size > 1

    def rank_samples(self, samples: int) -> int:
        """Return the number of a micro-batch's samples on each rank."""
        return samples // self.layout.samples.size


@lru_cache(maxsize=1 << 14)
def axes_of(strategy: Strategy) -> Axes:
    """Return the axes of a layer; raise NotImplementedError if the strategy has fields that are not known here."""
    if strange := set(strategy.__struct_fields__) - _KNOWN_FIELDS:
        raise NotImplementedError(f"no axis is known for {', '.join(sorted(strange))} of a strategy")
    if isinstance(strategy, ExpertGrid):
        return _grid_axes(strategy)
    sharers = strategy.tp_size * strategy.cp_size
    stage_size = sharers * strategy.dp_size
    consecutive = strategy.tp_consecutive or sharers in (1, stage_size)
    whole = Layout(stage_size, sharers, consecutive, strategy.cp_size)
    split, alone = whole._replace(sequence_parts=sharers), Axis(1)
    tensor = Axis(strategy.tp_size, whole.sharers.stride) if strategy.tp_size > 1 else alone
    states = Axis(stage_size // strategy.tp_size, strategy.tp_size if consecutive else 1)
    match strategy.sequence_parallel:
        case SequenceParallel.NONE:
            return Axes(whole, _parameter_axes(strategy, tensor, states), alone, whole.sequence, False)
        case SequenceParallel.MEGATRON:
            dense = _parameter_axes(strategy, tensor, states)
            return Axes(split, dense, alone, whole.sequence, tensor.size > 1)
        case SequenceParallel.ULYSSES:
            return Axes(split, _parameter_axes(strategy, alone, Axis(stage_size)), tensor, whole.sequence, False)
        case unknown:
            assert_never(unknown)


def _grid_axes(grid: ExpertGrid) -> Axes:
    """Return the axes of a layer's experts; ranks that shard the features of experts compute the same positions."""
    together = grid.tp_size * grid.ep_size
    layout = Layout(together * grid.dp_size, grid.tp_size, True, 1)
    dense = _parameter_axes(grid, Axis(grid.tp_size), Axis(grid.dp_size, together))
    alone = Axis(1)
    return Axes(layout, dense._replace(experts=Axis(grid.ep_size, grid.tp_size)), alone, alone, False)


def _parameter_axes(strategy: Strategy, tensor: Axis, states: Axis) -> ParameterAxes:
    match strategy.data_parallel:
        case DataParallel.DDP:
            return ParameterAxes(tensor, states, 1)
        case DataParallel.ZERO2 | DataParallel.ZERO3:
            return ParameterAxes(tensor, states, strategy.shard_size or states.size)
        case unknown:
            assert_never(unknown)


def strategy_on(stage_size: int, tp_size: int, cp_size: int = 1) -> Strategy | None:
    """Return the plain strategy with these degrees on all ranks of a stage; None if they do not divide the ranks."""
    dp_size, left = divmod(stage_size, tp_size * cp_size)
    return None if left else Strategy(tp_size=tp_size, cp_size=cp_size, dp_size=dp_size)


def expert_strategies_on(
    stage_size: int, ep_sizes: Iterable[int], etp_sizes: Iterable[int]
) -> Iterator[ExpertStrategy]:
    """Yield the plain expert strategies whose degrees divide the ranks of a stage."""
    for ep_size, etp_size in product(sorted({*ep_sizes}), sorted({*etp_sizes})):
        if stage_size % (ep_size * etp_size) == 0:
            yield ExpertStrategy(ep_size=ep_size, etp_size=etp_size)


def neighbouring_experts(number: int, experts: ExpertStrategy) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the experts of each group of ranks, if each group holds neighbouring experts."""
    size = number // experts.ep_size
    return tuple(tuple(range(first, first + size)) for first in range(0, number, size))


def layout_of(strategy: Strategy) -> Layout:
    """Return the layout of the activations that enter and leave a layer with this strategy."""
    return axes_of(strategy).layout


def effective(strategy: Strategy) -> Strategy:
    """Return the canonical form of a strategy's effect on a layer, without the layer's type and recomputation.

    Strategies with the same effect become equal: a single rank does not split the sequence and has no neighbours, and
    parameters that only one rank holds are not sharded.
    """
    axes = axes_of(strategy)
    return Strategy(
        tp_size=strategy.tp_size,
        tp_consecutive=axes.layout.consecutive,
        cp_size=strategy.cp_size,
        dp_size=strategy.dp_size,
        data_parallel=strategy.data_parallel if axes.dense.states.size > 1 else DataParallel.DDP,
        shard_size=strategy.shard_size,
        sequence_parallel=strategy.sequence_parallel if strategy.tp_size > 1 else SequenceParallel.NONE,
    )


def common_samples(source: Layout, target: Layout) -> int:
    """Return the smallest number of samples that both layouts split evenly."""
    return lcm(source.samples.size, target.samples.size)


def common_block(source: Layout, target: Layout) -> int:
    """Return the number of neighbouring ranks after which both layouts of a stage repeat."""
    if source.consecutive and target.consecutive:
        return lcm(source.sample_ranks, target.sample_ranks)
    return source.stage_size
