"""What the parameters of a layer cost, whatever the microbatch: their memory, and data parallelism's collectives."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shardwright_formats.io.table import Source
from shardwright_formats.semantics.communication import Cause, Message, parameter_messages, partial_gradient_bytes
from shardwright_formats.semantics.layout import parameter_layout
from shardwright_formats.types.hardware_profile import Collective, GroupKind
from shardwright_formats.types.model import EMBEDDING, Model
from shardwright_formats.types.plan import Precision
from shardwright_formats.types.strategy import Strategy
from shardwright_search.cost_model.collectives import (
    Duration,
    Slowdowns,
    collective_time,
    largest_slowdowns,
    overlapped_time,
    slowdowns_of,
)
from shardwright_search.cost_model.compute import states_of
from shardwright_search.cost_model.memory import ParameterMemory, itemsize, parameter_memory
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.topology import (
    DataGroupKinds,
    StageTopology,
    data_group_kinds,
    tp_group_kinds,
)


class Overlapped(NamedTuple):
    """A collective of data parallelism that overlaps with a pass."""

    alone: Duration
    slowdowns: Slowdowns | None = None
    """None where the two do not overlap."""
    measured_s: float | None = None
    """What it adds to a pass, where the profile tells that of the reduction it measured."""

    def added_s(self, compute_s: float) -> float:
        """What it adds to a pass that takes so long."""
        if self.measured_s is None:
            return overlapped_time(compute_s, self.alone, self.slowdowns)
        return self.measured_s

    @property
    def unmeasured_s(self) -> float:
        """What it takes alone, where what it adds was not measured; else 0."""
        return self.alone.time_s if self.measured_s is None else 0.0


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
    single_microbatch: bool,
) -> ParameterCosts:
    """Of one layer of a type on one rank."""
    kind, layout = model.types[type_name], parameter_layout(strategy)
    sizes, count = (itemsize(precision.compute), itemsize(precision.reduce)), 1 if single_microbatch else 2
    groups = data_group_kinds(topology, layout.tp_size, strategy.tp_consecutive, strategy.state_shards)
    messages = list(parameter_messages(kind, strategy, *sizes, count, reduces_every))
    of = profiles, type_name, layout.tp_size, groups
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
        optimizer_s=states_of(profiles, type_name, layout.tp_size).optimizer_s / strategy.state_shards,
    )


def _overlapped(
    profiles: Profiles, type_name: str, tp_size: int, groups: DataGroupKinds, messages: Sequence[Message]
) -> Overlapped:
    """Messages that follow one another: all ranks' share, or a shard group's and then its replicas'.

    A profiled all_reduce added more or less to its backward pass than it takes alone; so do all others.

    What it added more (copies, waiting for the slowest rank) comes on top of another's time, half of it where that
    is a reduce_scatter or an all_gather, which together are an all_reduce. Where it added less, for it overlaps, they
    do in proportion. A gather with a reduction that was lost in noise counts by itself.
    """
    if not messages:
        return Overlapped(Duration(0.0))
    message = messages[0]
    alone, slowdowns = _one_by_one(profiles, groups, messages)
    states = states_of(profiles, type_name, tp_size)
    known = states.reduction_source in (Source.MEASURED, Source.DERIVED)
    lost = states.reduction_s == 0 and message.collective is Collective.ALL_GATHER
    if not known or lost or states.reduction_ranks == 1:
        return Overlapped(alone, slowdowns)
    probed = GroupKind(states.reduction_ranks, states.reduction_ranks, states.tp_size == 1)
    profiled = collective_time(profiles, Collective.ALL_REDUCE, [probed], message.bytes)
    more_s = states.reduction_s - profiled.time_s
    if more_s <= 0:
        return Overlapped(alone, slowdowns, states.reduction_s * alone.time_s / profiled.time_s)
    share = 1.0 if message.collective is Collective.ALL_REDUCE else 0.5
    return Overlapped(alone, slowdowns, alone.time_s + share * more_s)


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
    groups = tp_group_kinds(topology, strategy.tp_size, strategy.tp_consecutive)
    return collective_time(profiles, Collective.ALL_REDUCE, groups, size * layers).time_s / layers
