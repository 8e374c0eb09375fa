"""Experts that ranks share out: their load on one rank, and the time of the messages that bring rows to them."""

from shardwright_formats.key import ExpertKey
from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.semantics.communication import Cause, Message, region_messages, tensors_of
from shardwright_formats.semantics.expert_messages import rank_positions
from shardwright_formats.semantics.schedules.passes import Pass
from shardwright_formats.types import LayerStrategy, Model, Recompute
from shardwright_formats.types.hardware_profile import Collective
from shardwright_search.cost_model.collectives import Duration, collective_time, in_turn
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.topology import StageTopology, axis_group_kinds


def imbalance_of(profiles: Profiles, model: Model, type_name: str, strategy: LayerStrategy) -> float:
    """Return the rows of the fullest rank over those at even load, for which all ranks of its group wait."""
    grid = strategy.expert_grid
    if profiles.load is None or grid is None:
        return 1.0
    return profiles.load.imbalance(model, type_name, axes_of(grid).dense.experts.size)


def even_load(model: Model, type_name: str, strategy: LayerStrategy, samples: int) -> tuple[ExpertKey, float]:
    """Return the key of a rank's experts, and the rows that it has of a microbatch of `samples` at even load."""
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


def replays_experts(strategy: LayerStrategy) -> bool:
    """Return whether the backward pass computes experts again, and beside them what of the layer comes before them."""
    return strategy.recompute in (Recompute.FULL, Recompute.SELECTIVE, Recompute.MLP)


def is_exchange(message: Message) -> bool:
    """Return whether a message takes rows to the ranks of their experts or back; a sum is one of counts."""
    return message.cause is Cause.EXPERTS and message.collective is not Collective.ALL_REDUCE


def exchange_times(
    profiles: Profiles,
    model: Model,
    type_name: str,
    strategy: LayerStrategy,
    topology: StageTopology,
    samples: int,
    itemsize: int,
) -> tuple[Duration, Duration]:
    """Return the time in which rows go to the ranks of their experts and back, forward and backward.

    The fullest rank gets more than others send, and they wait for it.
    """
    grid, fullest = strategy.expert_grid, imbalance_of(profiles, model, type_name, strategy)
    assert grid is not None
    axes = axes_of(grid).dense
    sent = [m for m in region_messages(model, type_name, strategy, samples, itemsize, 1) if is_exchange(m)]

    def taken(message: Message) -> Duration:
        among = axes.experts if message.collective is Collective.ALL_TO_ALL else axes.tensor
        groups = axis_group_kinds(topology, among)
        time_s, warning = collective_time(profiles, message.collective, groups, fullest * message.bytes)
        return Duration(time_s * message.times, warning)

    forward, backward = (in_turn(taken(m) for m in sent if m.during is during) for during in Pass)
    return forward, backward
