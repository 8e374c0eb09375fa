"""What the parameters of a layer cost, whatever the microbatch: their memory, and data parallelism's collectives."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shardwright_formats.io.table import Source
from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.semantics.communication import Cause, Message, parameter_messages, partial_gradient_bytes
from shardwright_formats.types import EMBEDDING, Model, Precision, Strategy
from shardwright_formats.types.hardware_profile import Collective, GroupKind
from shardwright_formats.types.model_profile import StateRow
from shardwright_search.cost_model.collectives import (
    Duration,
    Slowdowns,
    collective_time,
    largest_slowdowns,
    longest,
    overlapped_time,
    slowdowns_of,
)
from shardwright_search.cost_model.memory import ParameterMemory, itemsize, parameter_memory
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.topology import (
    DataGroupKinds,
    StageTopology,
    axis_group_kinds,
    data_group_kinds,
)


class Overlapped(NamedTuple):
    """A collective of data parallelism that overlaps with a pass."""

    alone: Duration
    slowdowns: Slowdowns | None = None
    """None where the two do not overlap."""
    overhead_s: float = 0.0
    """What it took more in a probe than its messages alone, such as copies and waiting; it overlaps with nothing."""

    def beside_s(self, compute_s: float) -> float:
        """What its messages add to a pass that takes so long."""
        return overlapped_time(compute_s, self.alone, self.slowdowns)

    def added_s(self, compute_s: float) -> float:
        """What it adds to a pass that takes so long, overhead included."""
        return self.beside_s(compute_s) + self.overhead_s


class ParameterCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer on one rank; times in seconds."""

    memory: ParameterMemory
    gather: Overlapped
    """Of ZeRO's parameters: ZeRO-3's in every pass, ZeRO-2's once a step."""
    reduction: Overlapped
    partial_sum_s: float
    """Once a step: summing gradients of replicated parameters over the tensor-parallel group."""
    optimizer_s: float


def parameter_costs(
    profiles: Profiles,
    model: Model,
    precision: Precision,
    reduces_every: bool,
    type_name: str,
    strategy: Strategy,
    topology: StageTopology,
    states: StateRow,
    single_microbatch: bool,
) -> ParameterCosts:
    """Of one layer of a type on one rank; `states` are those of its parameters that were profiled."""
    kind, axes = model.types[type_name], axes_of(strategy).dense
    sizes, count = (itemsize(precision.compute), itemsize(precision.reduce)), 1 if single_microbatch else 2
    groups = data_group_kinds(topology, axes)
    messages = list(parameter_messages(kind, strategy, *sizes, count, reduces_every))
    of = profiles, states, axes.shards, groups
    # One gather stands for those of all passes.
    gather = _overlapped(*of, [m for m in messages if m.cause is Cause.PARAMETERS][:1])
    reduction = _overlapped(*of, [m for m in messages if m.cause is Cause.GRADIENTS])
    return ParameterCosts(
        memory=parameter_memory(
            kind,
            strategy,
            precision,
            deferred=not (single_microbatch or reduces_every),
            reduce_every_microbatch=reduces_every and not single_microbatch,
            is_first_layer=type_name == EMBEDDING,
        ),
        gather=gather,
        reduction=reduction,
        partial_sum_s=_partial_sum_s(profiles, model, precision, type_name, strategy, topology),
        optimizer_s=states.optimizer_s / axes.shards,
    )


def slowest_parameters(found: Sequence[ParameterCosts]) -> ParameterCosts:
    """Of ranks of several node types that all do the same, and hold the same: the most of each."""
    if len(found) == 1:
        return found[0]
    return ParameterCosts(
        memory=found[0].memory,
        gather=_slowest([own.gather for own in found]),
        reduction=_slowest([own.reduction for own in found]),
        partial_sum_s=max(own.partial_sum_s for own in found),
        optimizer_s=max(own.optimizer_s for own in found),
    )


def _slowest(found: Sequence[Overlapped]) -> Overlapped:
    slowdowns = largest_slowdowns(own.slowdowns for own in found)
    return Overlapped(longest(own.alone for own in found), slowdowns, max(own.overhead_s for own in found))


def _overlapped(
    profiles: Profiles, states: StateRow, shards: int, groups: DataGroupKinds, messages: Sequence[Message]
) -> Overlapped:
    """Messages that follow one another: all ranks' share, or a shard group's and then its replicas'.

    Their time is the hardware profile's. What a probe's took more comes on top.
    """
    if not messages:
        return Overlapped(Duration(0.0))
    alone, slowdowns = _one_by_one(profiles, groups, messages)
    return Overlapped(alone, slowdowns, sum(_overhead_s(profiles, states, shards, message) for message in messages))


def _overhead_s(profiles: Profiles, states: StateRow, shards: int, message: Message) -> float:
    """What a probe's collective of this kind took more than its message alone, in the same format; 0 if not probed.

    Replicas of shards sum a part of what the probe summed, and have that part of its overhead.
    """
    sums = message.collective is Collective.ALL_REDUCE
    ranks, source = (
        (states.reduction_ranks, states.reduction_source) if sums else (states.zero_ranks, states.zero_source)
    )
    if ranks == 1 or source not in (Source.MEASURED, Source.DERIVED):
        return 0.0
    probed_s = {
        Collective.ALL_REDUCE: states.reduction_s,
        Collective.REDUCE_SCATTER: states.scatter_s,
        Collective.ALL_GATHER: states.gather_s,
    }
    parts = shards if sums else 1
    # The widest of data parallelism is probed under ZeRO: neighbours.
    kinds = [GroupKind(ranks, ranks, not sums or states.tp_size == 1)]
    alone = collective_time(profiles, message.collective, kinds, message.bytes * parts)
    return max(0.0, probed_s[message.collective] - alone.time_s) / parts


def _one_by_one(
    profiles: Profiles, groups: DataGroupKinds, messages: Sequence[Message]
) -> tuple[Duration, Slowdowns | None]:
    """What they take without a computation, and of several slowdowns the largest; None where one does not overlap."""
    taken, slowdowns = [], []
    for message in messages:
        kinds = groups.replicas if message.collective is Collective.ALL_REDUCE else groups.shards
        taken.append(collective_time(profiles, message.collective, kinds, message.bytes))
        slowdowns.append(slowdowns_of(profiles, message.collective, kinds, message.bytes))
    alone = Duration(sum(own.time_s for own in taken), next((own.warning for own in taken if own.warning), None))
    return alone, largest_slowdowns(slowdowns)


def _partial_sum_s(
    profiles: Profiles, model: Model, precision: Precision, type_name: str, strategy: Strategy, topology: StageTopology
) -> float:
    """One collective for all layers alike, shared out among them."""
    stored = itemsize(precision.parameters)
    size = partial_gradient_bytes(model.types[type_name], strategy, 0, stored)
    if not size:
        return 0.0
    layers = max(1, model.layers.count(type_name))
    groups = axis_group_kinds(topology, axes_of(strategy).dense.tensor)
    return collective_time(profiles, Collective.ALL_REDUCE, groups, size * layers).time_s / layers
