"""The process groups that a plan needs, in the order in which all ranks create them, and their buffer memory."""

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from shardwright.optimizers.registry import OPTIMIZERS
from shardwright.plan.axes import Axis, Layout, axes_of, layout_of
from shardwright.plan.chunks import chunk_layers, cuts, incoming_layout, sending_cuts
from shardwright.plan.group_names import ranks_text
from shardwright.plan.layout import closed_groups
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.tied_weights import ranks_of_replicas, tied_parameters
from shardwright.types import LayerStrategy, Plan, Strategy

EDGE_CHANNELS = 4
"""NCCL channels of an edge, an assumption: more than enough for a network of 400 Gbit/s; they occupy 4
multiprocessors."""
_CHANNELS = 24
_BUFFER_BYTES = 10 * 2**20
COMMUNICATOR_BYTES = _CHANNELS * 2 * _BUFFER_BYTES
"""Bytes of the buffers of an NCCL communicator, an assumption: 24 channels, to and from the next rank of a ring.

Each channel has a buffer for each of NCCL's protocols, the largest of 4 MiB (NCCL_BUFFSIZE): together at most 10 MiB.
"""
_EDGE_SHARE = 4
"""Ratio of a communicator's memory to an edge's memory. An edge has `EDGE_CHANNELS` to and from its other rank, created
with the communicator, and as many again in one direction, created with the first message: 4 x 3 buffers instead of 24 x
2."""


class Purpose(StrEnum):
    """Purposes of process groups."""

    WORLD = "all ranks"
    """Loss, gradient norm and stop requests."""
    TENSOR_PARALLEL = "tensor parallelism"
    """Activations that enter and leave matrices that are sharded over the ranks."""
    EXCHANGE = "exchanges of activations"
    """Redistribution between layouts, Ulysses, rows for experts, and matrices that are updated as a whole."""
    CONTEXT = "context parallelism"
    """Keys and values of positions to which other ranks' positions attend."""
    DATA_PARALLEL = "data parallelism"
    """Gathered parameters and summed gradients."""
    TIED_PARAMETERS = "tied parameters"
    """Gradients of parameters that are replicated in several layers."""
    EDGE = "an edge of the pipeline"
    """Messages of one kind of pass, from one rank to another."""
    ONE_RANK = "one rank"
    """Groups of a single rank, along axes over which nothing is split."""


class PlannedGroup(NamedTuple):
    """A process group that a plan needs."""

    purpose: Purpose
    ranks: tuple[int, ...]
    """Ranks of the group; for an edge, the sender, then the receiver."""
    during: Pass | None = None
    """For an edge, the kind of pass whose messages it carries."""
    around: bool = False
    """True for an edge that leads back to an earlier pipeline stage, and for its reverse in the backward pass."""

    @property
    def description(self) -> str:
        """Return the group's description, from which `described_ranks` reads the ranks."""
        way = "" if self.during is None else f", {self.during}" + ", around" * self.around
        return f"{self.purpose}{way}{ranks_text(self.ranks)}"


def process_groups(plan: Plan) -> tuple[PlannedGroup, ...]:
    """Return the groups of a plan except the group of all ranks, each once, in the order of their creation."""
    groups: dict[PlannedGroup, None] = {}
    for stage in range(len(plan.stages)):
        for chunk in range(len(plan.stages[stage].layers)):
            groups |= dict.fromkeys(_of_chunk(plan, stage, chunk))
        if OPTIMIZERS[plan.optimizer].whole_matrices:
            groups[planned_group(Purpose.EXCHANGE, plan.stages[stage].ranks)] = None
    if tied := ranks_of_replicas(tied_parameters(plan)):
        groups[PlannedGroup(Purpose.TIED_PARAMETERS, tied)] = None
    return tuple(groups | dict.fromkeys(_edges(plan)))


def communicators(plan: Plan) -> tuple[Mapping[Purpose, int], ...]:
    """Return, for each rank, its number of NCCL communicators by purpose; groups of one rank need none.

    This is the number of groups of `process_groups`, and the group of all ranks, that contain the rank. Groups along an
    axis are counted without building them: each rank of a stage is in one of them, and no group is along two axes.
    """
    incoming = {cut.target: cut.after for cut in cuts(plan)}
    exchanges, edges, found = [0] * plan.world_size, _num_edges(plan), dict[int, Mapping[Purpose, int]]()
    whole = {Purpose.WORLD: 1} if plan.world_size > 1 else {}
    tied = ranks_of_replicas(tied_parameters(plan))
    replicas = set(tied) if len(tied) > 1 else set[int]()
    for number, stage in enumerate(plan.stages):
        chunks = range(len(stage.layers))
        layers = [one for chunk in chunks for one in _layers(plan, number, chunk, incoming.get((number, chunk)))]
        axes = {axis for strategy, _ in layers for axis in strategy_axes(strategy)}
        if OPTIMIZERS[plan.optimizer].whole_matrices and len(stage.ranks) > 1:
            axes.add((Purpose.EXCHANGE, Axis(len(stage.ranks))))
        if apart := {ranks for _, groups in layers for ranks in groups}:  # these may be along an axis, too
            along = {axis for purpose, axis in axes if purpose is Purpose.EXCHANGE}
            apart.update(*(axis.groups(stage.ranks) for axis in along))
            axes = {(purpose, axis) for purpose, axis in axes if purpose is not Purpose.EXCHANGE}
            for rank in chain.from_iterable(apart):
                exchanges[rank] += 1
        alike = Counter(whole) + Counter(purpose for purpose, _ in axes)
        known = dict[tuple[int, int, int], Mapping[Purpose, int]]()
        for rank in stage.ranks:
            own = exchanges[rank], edges[rank], int(rank in replicas)
            if own not in known:
                further = zip((Purpose.EXCHANGE, Purpose.EDGE, Purpose.TIED_PARAMETERS), own, strict=True)
                known[own] = alike + Counter(dict(further))
            found[rank] = known[own]
    return tuple(found[rank] for rank in range(plan.world_size))


def _num_edges(plan: Plan) -> list[int]:
    """Return each rank's number of edges to ranks of other stages, in both directions and for each kind of pass."""
    edges, known = [0] * plan.world_size, dict[object, set[tuple[int, int]]]()
    for cut in sending_cuts(plan):
        for kind, (source, _), (target, _) in cut.ways():
            of_kind = known.setdefault((source, target, kind, cut.around), set())
            for tensor in cut.tensors:
                transfers = cut.transfers(kind, plan.microbatch_samples, tensor.sequence_length)
                new = {(each.source, each.target) for each in transfers} - of_kind
                of_kind |= new
                for sender, receiver in new:
                    edges[plan.stages[source].ranks[sender]] += 1
                    edges[plan.stages[target].ranks[receiver]] += 1
    return edges


def communicator_bytes(counted: Mapping[Purpose, int], of_each: int = COMMUNICATOR_BYTES) -> int:
    """Return the device memory of a rank's communicators: `of_each` for each, less for edges between stages."""
    edges = counted.get(Purpose.EDGE, 0)
    return of_each * (sum(counted.values()) - edges) + edges * of_each // _EDGE_SHARE


def strategy_groups(strategy: Strategy, ranks: tuple[int, ...]) -> Iterator[PlannedGroup]:
    """Yield the groups along the axes of a layer's parameters, and along the axes over which attention communicates."""
    axes = axes_of(strategy)
    for purpose, axis in ((Purpose.TENSOR_PARALLEL, axes.dense.tensor), (Purpose.EXCHANGE, axes.dense.experts)):
        for group in axis.groups(ranks):
            yield planned_group(purpose, group)
    for group in axes.dense.state_groups(ranks):
        yield planned_group(Purpose.DATA_PARALLEL, group)
    for purpose, axis in ((Purpose.EXCHANGE, axes.heads), (Purpose.CONTEXT, axes.context)):
        for group in axis.groups(ranks):
            yield planned_group(purpose, group)
    if isinstance(strategy, LayerStrategy) and (grid := strategy.expert_grid) is not None:
        yield from strategy_groups(grid, ranks)


@lru_cache(maxsize=1 << 14)
def strategy_axes(strategy: Strategy) -> frozenset[tuple[Purpose, Axis]]:
    """Return the axes of `strategy_groups` with more than one rank; each rank of a stage is in one group along each."""
    axes = axes_of(strategy)
    kinds = [(Purpose.TENSOR_PARALLEL, axes.dense.tensor), (Purpose.EXCHANGE, axes.dense.experts)]
    kinds += [(Purpose.DATA_PARALLEL, axis) for axis in axes.dense.state_axes]
    kinds += [(Purpose.EXCHANGE, axes.heads), (Purpose.CONTEXT, axes.context)]
    own = frozenset((purpose, axis) for purpose, axis in kinds if axis.size > 1)
    grid = strategy.expert_grid if isinstance(strategy, LayerStrategy) else None
    return own if grid is None else own | strategy_axes(grid)


def planned_group(purpose: Purpose, ranks: tuple[int, ...]) -> PlannedGroup:
    """Return the group of ranks along an axis; for a single rank it is the same for all purposes."""
    return PlannedGroup(purpose if len(ranks) > 1 else Purpose.ONE_RANK, ranks)


def _of_chunk(plan: Plan, stage: int, chunk: int) -> Iterator[PlannedGroup]:
    known = set[Strategy]()
    for strategy, exchanges in _layers(plan, stage, chunk, incoming_layout(plan, stage, chunk)):
        if strategy not in known:
            known.add(strategy)
            yield from strategy_groups(strategy, plan.stages[stage].ranks)
        yield from (PlannedGroup(Purpose.EXCHANGE, ranks) for ranks in exchanges)


def _layers(
    plan: Plan, stage: int, chunk: int, current: Layout | None
) -> Iterator[tuple[Strategy, tuple[tuple[int, ...], ...]]]:
    """Yield the strategy of each layer of a chunk, and the groups of ranks that exchange activations for its layout.

    `current`: the layout in which the chunk receives its input.
    """
    ranks = plan.stages[stage].ranks
    for name, _, strategy in chunk_layers(plan, stage, chunk):
        wanted, groups = layout_of(strategy), list[tuple[int, ...]]()
        if current is not None and current != wanted:
            for tensor in plan.model.received_by(name):
                groups += closed_groups(current, wanted, plan.microbatch_samples, tensor.sequence_length)
        yield strategy, tuple(tuple(ranks[member] for member in members) for members in groups if len(members) > 1)
        current = wanted


def _edges(plan: Plan) -> Iterator[PlannedGroup]:
    """Yield the process groups for messages between pipeline stages."""
    for cut in sending_cuts(plan):
        for kind, (source, _), (target, _) in cut.ways():
            senders, receivers = plan.stages[source].ranks, plan.stages[target].ranks
            for tensor in cut.tensors:
                for transfer in cut.transfers(kind, plan.microbatch_samples, tensor.sequence_length):
                    pair = senders[transfer.source], receivers[transfer.target]
                    yield PlannedGroup(Purpose.EDGE, pair, kind, cut.around)
