"""All costs of one element of a plan (embedding, layer or head) under one strategy, as exact integers.

Times are whole picoseconds and memory whole bytes, so that sums do not depend on their order and equal plans are
recognised as equal.
"""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from shardwright_formats.cluster import Cluster
from shardwright_formats.hardware_profile import Collective
from shardwright_formats.model import Model
from shardwright_formats.placement import Layout, dp_groups
from shardwright_formats.plan import Precision
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute, Strategy
from shardwright_search.costs import memory
from shardwright_search.costs.compute import layer_cost, optimizer_time_s, states_of
from shardwright_search.costs.traffic import Duration, collective_time, redistribution_time, send_time
from shardwright_search.profiles import LayerKey, Profiles

__all__ = ["Cost", "ElementCost", "Setting", "element_cost", "picoseconds", "redistribution_cost", "send_cost"]


class Setting(NamedTuple):
    """What is the same for every element of a plan."""

    model: Model
    cluster: Cluster
    profiles: Profiles
    precision: Precision
    microbatch_samples: int
    num_microbatches: int


class Cost(NamedTuple):
    """A time in picoseconds, one way, and what is doubtful about it."""

    time_ps: int
    warning: str | None


class ElementCost(NamedTuple):
    """Costs of one element on one rank; times in picoseconds."""

    forward_ps: int
    """One microbatch, tensor and sequence parallel traffic included; so is backward."""
    backward_ps: int
    gather_ps: int
    """One ZeRO-3 gather; there is one in forward and one in backward of each microbatch."""
    gradient_sync_ps: int
    """Once a step: reduction of the gradients, and ZeRO-2's gather of the parameters."""
    optimizer_ps: int
    parameters_bytes: int
    gathered_parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Of one microbatch in flight."""
    transient_bytes: int
    warnings: tuple[str, ...]

    @property
    def microbatch_ps(self) -> int:
        """Forward and backward of one microbatch with their gathers."""
        return self.forward_ps + self.backward_ps + 2 * self.gather_ps

    @property
    def state_bytes(self) -> int:
        """What is held from step to step or all step long."""
        return self.parameters_bytes + self.gathered_parameters_bytes + self.gradients_bytes + self.optimizer_bytes


def picoseconds(time_s: float) -> int:
    """Seconds as whole picoseconds."""
    return round(time_s * 1e12)


def element_cost(setting: Setting, type_name: str, strategy: Strategy, ranks: Sequence[int]) -> ElementCost:
    """Every cost of an element of that type on the ranks of a pipeline stage.

    Raises BadInput when a profile lacks a point.
    """
    profiles, precision, kind = setting.profiles, setting.precision, setting.model.types[type_name]
    recompute = strategy.recompute if isinstance(strategy, LayerStrategy) else Recompute.NONE
    key = LayerKey(type_name, strategy.tp_size, strategy.sequence_parallel, recompute, setting.model.sequence_length)
    layer = layer_cost(profiles, key, setting.microbatch_samples // strategy.dp_size)
    gather, sync = _data_parallel_traffic(setting, type_name, strategy, ranks)
    shards = 1 if strategy.data_parallel is DataParallel.DDP else strategy.dp_size
    transient = memory.transient_gather_bytes(kind, strategy, precision) + memory.transient_gradients_bytes(
        kind, strategy, precision, setting.num_microbatches
    )
    return ElementCost(
        forward_ps=picoseconds(layer.forward_s),
        backward_ps=picoseconds(layer.backward_s),
        gather_ps=picoseconds(gather.time_s),
        gradient_sync_ps=picoseconds(sync.time_s),
        optimizer_ps=picoseconds(optimizer_time_s(profiles, type_name, strategy.tp_size, shards)),
        parameters_bytes=memory.parameters_bytes(kind, strategy, precision),
        gathered_parameters_bytes=memory.gathered_parameters_bytes(kind, strategy, precision),
        gradients_bytes=memory.gradients_bytes(kind, strategy, precision, setting.num_microbatches),
        optimizer_bytes=memory.optimizer_bytes(kind, strategy, precision),
        activation_bytes=ceil(layer.activation_bytes),
        transient_bytes=ceil(layer.transient_bytes) + transient,
        warnings=tuple(w for w in (layer.warning, gather.warning, sync.warning) if w is not None),
    )


def redistribution_cost(setting: Setting, type_name: str, source: Layout, target: Layout, ranks: Sequence[int]) -> Cost:
    """Bringing the outputs of an element of that type from one layout to another, one way.

    Forward goes from the element's layout to the next one's, backward the other way round.
    """
    if source == target:
        return Cost(0, None)
    taken = redistribution_time(
        setting.profiles,
        ranks,
        setting.cluster.node_of_rank,
        source,
        target,
        setting.microbatch_samples,
        setting.model.types[type_name].outputs,
        memory.element_bytes(setting.precision.compute),
    )
    return Cost(picoseconds(taken.time_s), taken.warning)


def send_cost(
    setting: Setting, type_name: str, layout: Layout, senders: Sequence[int], receivers: Sequence[int]
) -> Cost:
    """Handing the outputs of an element of that type to the next pipeline stage, one way."""
    taken = send_time(
        setting.profiles,
        senders,
        receivers,
        setting.cluster.node_of_rank,
        layout,
        setting.microbatch_samples,
        setting.model.types[type_name].outputs,
        memory.element_bytes(setting.precision.compute),
    )
    return Cost(picoseconds(taken.time_s), taken.warning)


def _data_parallel_traffic(
    setting: Setting, type_name: str, strategy: Strategy, ranks: Sequence[int]
) -> tuple[Duration, Duration]:
    """One ZeRO-3 gather, and what comes once a step.

    DDP reduces rP with one all_reduce; ZeRO-2 and ZeRO-3 with one reduce_scatter, and ZeRO-2 gathers cP once. What the
    profiled reduction took beyond its own all_reduce (copies, and ranks that wait for one another) comes on top.
    """
    count = setting.model.types[type_name].parameter_count(strategy.tp_size)
    reduced = memory.element_bytes(setting.precision.reduce) * count
    gathered = memory.element_bytes(setting.precision.compute) * count
    groups = dp_groups(ranks, strategy.tp_size, strategy.tp_consecutive)

    def taken(collective: Collective, message_bytes: int) -> Duration:
        return collective_time(setting.profiles, collective, groups, setting.cluster.node_of_rank, message_bytes)

    beyond_s = _reduction_beyond_its_message_s(setting, type_name, strategy, reduced)
    if strategy.data_parallel is DataParallel.DDP:
        reduce = taken(Collective.ALL_REDUCE, reduced)
        return Duration(0.0), Duration(reduce.time_s + beyond_s, reduce.warning)
    scatter, gather = taken(Collective.REDUCE_SCATTER, reduced), taken(Collective.ALL_GATHER, gathered)
    if strategy.data_parallel is DataParallel.ZERO3:
        return gather, Duration(scatter.time_s + beyond_s, scatter.warning)
    return Duration(0.0), Duration(scatter.time_s + gather.time_s + beyond_s, scatter.warning or gather.warning)


def _reduction_beyond_its_message_s(setting: Setting, type_name: str, strategy: Strategy, reduced_bytes: int) -> float:
    """What a profiled reduction took that its all_reduce alone does not, which another reduction will take too.

    A single rank waits for none: it has this time only where it was profiled with one.
    """
    states = states_of(setting.profiles, type_name, strategy.tp_size)
    if strategy.dp_size == 1 < states.reduction_ranks:
        return 0.0
    probed = range(states.reduction_ranks * strategy.tp_size)
    groups = dp_groups(probed, strategy.tp_size, consecutive=True)
    message = collective_time(setting.profiles, Collective.ALL_REDUCE, groups, [0] * len(probed), reduced_bytes)
    return max(0.0, states.reduction_s - message.time_s)
