"""What the parameters of a layer cost, whatever the microbatch: their memory, and the messages of data parallelism."""

from typing import NamedTuple

from shardwright_formats.io.table import Source
from shardwright_formats.semantics.communication import Message, parameter_messages, partial_gradient_bytes
from shardwright_formats.semantics.layout import parameter_layout
from shardwright_formats.types.hardware_profile import Collective
from shardwright_formats.types.model import EMBEDDING, Model
from shardwright_formats.types.plan import Precision
from shardwright_formats.types.strategy import DataParallel, Strategy
from shardwright_search.cost_model import memory
from shardwright_search.cost_model.collectives import Duration, Slowdowns, collective_time, slowdowns_of
from shardwright_search.cost_model.compute import states_of
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.topology import GroupKind, StageTopology, dp_group_kinds, tp_group_kinds

__all__ = ["Overlapped", "ParameterCosts", "parameter_costs"]


class Overlapped(NamedTuple):
    """A message of data parallelism that goes on beside a pass."""

    alone: Duration
    slowdowns: Slowdowns | None
    """None where the two do not overlap."""
    measured_s: float | None
    """What it adds to a pass, where the profile tells that of the reduction it measured."""


class ParameterCosts(NamedTuple):
    """Memory in bytes, times in seconds."""

    parameters_bytes: int
    gathered_parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    """Parameters and gradients on their way, held while the layer works."""
    unreduced_bytes: int
    """Gradients that are reduced when the layer's backward pass is over."""
    gather: Overlapped | None
    """Of ZeRO's parameters: ZeRO-3's in every pass, ZeRO-2's once a step."""
    reduction: Overlapped | None
    partial_sum_s: float
    """Once a step: summing gradients of whole parameters over the tensor-parallel group."""
    optimizer_s: float


def parameter_costs(
    profiles: Profiles,
    model: Model,
    precision: Precision,
    every_microbatch: bool,
    type_name: str,
    strategy: Strategy,
    topology: StageTopology,
    one_microbatch: bool,
) -> ParameterCosts:
    """Of one layer of a type on one rank."""
    kind, layout = model.types[type_name], parameter_layout(strategy)
    deferred, again = not (one_microbatch or every_microbatch), every_microbatch and not one_microbatch
    first = type_name == EMBEDDING
    compute, reduce = memory.itemsize(precision.compute), memory.itemsize(precision.reduce)
    count = 1 if one_microbatch else 2
    found = parameter_messages(kind, strategy, compute, reduce, count, every_microbatch)
    messages = {message.collective: message for message in found}
    groups = dp_group_kinds(topology, layout.tp_size, strategy.tp_consecutive)
    gather = messages.get(Collective.ALL_GATHER)
    reduces = messages.get(Collective.ALL_REDUCE) or messages.get(Collective.REDUCE_SCATTER)
    shards = 1 if strategy.data_parallel is DataParallel.DDP else layout.dp_size
    return ParameterCosts(
        memory.parameters_bytes(kind, strategy, precision),
        memory.gathered_parameters_bytes(kind, strategy, precision, first),
        memory.gradients_bytes(kind, strategy, precision, deferred, again, first),
        memory.optimizer_bytes(kind, strategy, precision),
        memory.buffer_bytes(kind, strategy, precision, deferred),
        memory.unreduced_bytes(kind, strategy, precision, deferred),
        None if gather is None else _overlapped(profiles, type_name, layout.tp_size, gather, groups),
        None if reduces is None else _overlapped(profiles, type_name, layout.tp_size, reduces, groups),
        _partial_sum_s(profiles, model, precision, type_name, strategy, topology),
        states_of(profiles, type_name, layout.tp_size).optimizer_s / shards,
    )


def _overlapped(
    profiles: Profiles, type_name: str, tp_size: int, message: Message, groups: tuple[GroupKind, ...]
) -> Overlapped:
    """A profiled all_reduce added more or less to its backward pass than its message takes alone; so do all others.

    What it added more (copies, waiting for the slowest rank) comes on top of another's message, half of it where that
    is a reduce_scatter or an all_gather, which together are an all_reduce. Where it added less, for it overlaps, they
    do in proportion. A gather beside a reduction that was lost in noise counts by itself.
    """
    alone = collective_time(profiles, message.collective, groups, message.bytes)
    slowdowns = slowdowns_of(profiles, message.collective, message.group_size)
    states = states_of(profiles, type_name, tp_size)
    known = states.reduction_source in (Source.MEASURED, Source.DERIVED)
    lost = states.reduction_s == 0 and message.collective is Collective.ALL_GATHER
    if not known or lost or states.reduction_ranks == 1:
        return Overlapped(alone, slowdowns, None)
    probed = GroupKind(states.reduction_ranks, states.tp_size == 1, False)
    profiled = collective_time(profiles, Collective.ALL_REDUCE, [probed], message.bytes)
    more_s = states.reduction_s - profiled.time_s
    if more_s <= 0:
        return Overlapped(alone, slowdowns, states.reduction_s * alone.time_s / profiled.time_s)
    share = 1.0 if message.collective is Collective.ALL_REDUCE else 0.5
    return Overlapped(alone, slowdowns, alone.time_s + share * more_s)


def _partial_sum_s(
    profiles: Profiles, model: Model, precision: Precision, type_name: str, strategy: Strategy, topology: StageTopology
) -> float:
    """One message for all layers alike, shared out among them."""
    stored = memory.itemsize(precision.parameters)
    size = partial_gradient_bytes(model.types[type_name], strategy, 0, stored)
    if not size:
        return 0.0
    layers = max(1, model.layers.count(type_name))
    groups = tp_group_kinds(topology, strategy.tp_size, strategy.tp_consecutive)
    return collective_time(profiles, Collective.ALL_REDUCE, groups, size * layers).time_s / layers
