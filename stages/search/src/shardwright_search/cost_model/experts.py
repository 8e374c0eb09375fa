"""Experts under expert parallelism: their load on one rank, and the time of the messages that exchange rows."""

from collections.abc import Sequence
from functools import cache

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.key import ExpertKey, HostKey
from shardwright.plan.axes import axes_of
from shardwright.plan.communication import Cause, Message, rank_positions, region_messages, tensors_of
from shardwright.plan.schedules.passes import Pass
from shardwright.types import LayerStrategy, Model, Plan, Recompute, Strategy
from shardwright.types.hardware_profile import Collective, GroupKind
from shardwright.types.model_profile import LayerFigures
from shardwright.types.strategy import Dispatcher
from shardwright_search.cost_model.collectives import (
    Duration,
    StageTopology,
    axis_group_kinds,
    collective_time,
    in_turn,
    longest,
    overlapped_time,
    slowdowns_of,
)
from shardwright_search.cost_model.profiles import Passes, Profiles


def imbalance_of(profiles: Profiles, model: Model, type_name: str, strategy: LayerStrategy) -> float:
    """Return the ratio of the fullest rank's rows to an even load; all ranks of its group wait for that rank."""
    grid = strategy.expert_grid
    if profiles.load is None or grid is None:
        return 1.0
    return profiles.load.imbalance(model, type_name, axes_of(grid).dense.experts.size)


def placed_imbalance(profiles: Profiles, plan: Plan, number: int) -> float | None:
    """Return that ratio for a layer whose experts the plan places; None if it does not, or no load is known."""
    groups = plan.expert_placement[number] if plan.expert_placement else ()
    if not groups or profiles.load is None:
        return None
    return profiles.load.placed_imbalance(number, groups)


def even_load(model: Model, type_name: str, strategy: LayerStrategy, samples: int) -> tuple[ExpertKey, float]:
    """Return the key of a rank's experts, and its rows of a micro-batch of `samples` under an even load."""
    kind, grid = model.types[type_name], strategy.expert_grid
    assert kind.experts and grid
    axes = axes_of(grid).dense
    rows = rank_positions(kind, strategy, samples, tensors_of(model, kind)) * kind.experts.top_k
    key = ExpertKey(
        type=type_name,
        experts=kind.experts.number // axes.experts.size,
        etp_size=axes.tensor.size,
        recompute=strategy.recompute,
    )
    return key, rows * axes.tensor.size


def is_exchange(message: Message) -> bool:
    """Return whether a message takes rows to the ranks of their experts or back; an all-reduce only sums counts."""
    return message.cause is Cause.EXPERTS and message.collective is not Collective.ALL_REDUCE


def exchange_times(
    profiles: Profiles,
    model: Model,
    type_name: str,
    strategy: LayerStrategy,
    topology: StageTopology,
    samples: int,
    itemsize: int,
    fullest: float,
) -> tuple[Duration, ...]:
    """Return the time in which rows are sent to their experts' ranks and back, in each kind of pass.

    The fullest rank receives `fullest` times the rows of an even load, and the others wait for it.
    """
    grid, experts = strategy.expert_grid, model.types[type_name].experts
    assert grid is not None and experts is not UNSET
    axes = axes_of(grid).dense
    sent = [m for m in region_messages(model, type_name, strategy, samples, itemsize, 1) if is_exchange(m)]
    rows_bytes = max((m.bytes for m in sent if m.collective is Collective.ALL_TO_ALL), default=0)
    per_node = profiles.exchange is not None and profiles.exchange.dispatcher is Dispatcher.PER_NODE

    @cache  # both passes send the same
    def taken(collective: Collective, num_bytes: int) -> Duration:
        to_experts = collective is Collective.ALL_TO_ALL
        groups = axis_group_kinds(topology, axes.experts if to_experts else axes.tensor)
        if to_experts and per_node and num_bytes == rows_bytes:
            return _once_a_node(profiles, groups, fullest * num_bytes, experts.top_k)
        return collective_time(profiles, collective, groups, fullest * num_bytes)

    times: dict[Pass | None, list[Duration]] = {during: [] for during in Pass}
    for message in sent:
        one = taken(message.collective, message.bytes)
        times[message.during].append(one._replace(time_s=one.time_s * message.times))
    return tuple(in_turn(times[during]) for during in Pass)


def _once_a_node(profiles: Profiles, groups: Sequence[GroupKind], num_bytes: float, top_k: int) -> Duration:
    """Return the time of exchanges that send each position to a node once, and from there to each of its ranks once.

    k choices among n places are n (1 - (1 - 1/n)^k) different places on average. Messages between nodes and messages
    inside nodes are sent at once: the longer of both counts (DeepEP's and HybridEP's kernels).
    """
    position_bytes, worst = num_bytes / top_k, Duration(0.0)
    for group in groups:
        here = group.ranks_per_node
        nodes, near = -(-group.size // here), position_bytes * _different(group.size, top_k)
        durations = [collective_time(profiles, Collective.ALL_TO_ALL, [GroupKind(here, here, True)], near)]
        if nodes > 1:
            # An all-to-all of b bytes sends b (n - 1) / n out of its node.
            far = position_bytes * _different(nodes, top_k)
            durations.append(collective_time(profiles, Collective.ALL_TO_ALL, [group], far))
        worst = longest([worst, *durations])
    return worst


def _different(places: int, choices: int) -> float:
    """Return the expected number of places that are chosen at least once."""
    return places * (1 - (1 - 1 / places) ** choices)


def beside_other_passes(
    profiles: Profiles, exchanges: Sequence[Duration], figures: LayerFigures[float]
) -> tuple[Duration, ...]:
    """Return the time that exchanges add to each kind of pass if they overlap with another micro-batch's computation.

    Forward and backward pass together hide as much as their computation is long enough for, slowed down as by other
    collectives; without known slowdowns nothing overlaps.
    """
    alone = in_turn(exchanges)
    slowdowns = slowdowns_of(profiles, Collective.ALL_TO_ALL, (GroupKind(2, 2, True),), 0)
    added_s = overlapped_time(figures.forward_s + figures.backward_s, alone, slowdowns)
    share = added_s / alone.time_s if alone.time_s else 1.0
    return tuple(each._replace(time_s=each.time_s * share) for each in exchanges)


def host_floor(profiles: Profiles, type_name: str, strategy: Strategy, experts: int, pipelined: bool) -> Passes:
    """Return the least seconds that the host needs for each pass of a layer; `experts`: the number on the rank."""
    recompute = strategy.recompute if isinstance(strategy, LayerStrategy) else Recompute.NONE
    plain, none = HostKey(type=type_name, recompute=recompute), (0.0, 0.0)
    started = [profiles.host.get(key, none) for key in (plain, replace(plain, experts=experts)) if experts]
    least = profiles.host.get(replace(plain, tp_size=strategy.tp_size, pipelined=True), none) if pipelined else none
    forward_s, backward_s = (max(least[way], sum(each[way] for each in started)) for way in (0, 1))
    return forward_s, backward_s
