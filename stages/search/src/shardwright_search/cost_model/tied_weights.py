"""Time to sum the gradients of tied parameters over their replicas, once a step."""

from collections.abc import Sequence
from math import prod

from shardwright.plan.axes import ParameterAxes, axes_of
from shardwright.plan.layout import parameter_box
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, Model, Strategy
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model.collectives import collective_time, longest, send_kind_time
from shardwright_search.cost_model.layer import CostModel, picoseconds
from shardwright_search.cost_model.topology import kinds_of, stage_topology


def tied_cost_ps(
    costs: CostModel, embedding: Strategy, head: Strategy, first: Sequence[int], last: Sequence[int]
) -> int:
    """Return the time to exchange the gradients of each tied parameter: one replica's to the other, and the sum back.

    `first` and `last` are the ranks of their pipeline stages. Every rank of the receiving side gets its own part,
    which the ranks of the other side send in even shares; ranks that hold the same part of both send nothing.
    """
    if first == last and tied_class(embedding) == tied_class(head):
        return 0
    total = 0
    trained = {parameter.name for parameter in costs.model.types[EMBEDDING].trained_parameters}
    for one, other in ((one, other) for one, other in costs.model.tied if one in trained):
        for layer, name, strategy, mine, others in (
            (EMBEDDING, one, embedding, first, last),
            (HEAD, other, head, last, first),
        ):
            # Of the fewer ranks each has more to send than the others get, or to get than they send.
            share = max(1.0, len(mine) / len(others))
            total += _sent_ps(costs, first, last, _part_bytes(costs, layer, name, strategy) * share)
    return total


def shared_cost_ps(costs: CostModel, stages: Sequence[Sequence[int]]) -> int:
    """Return the time of parameters that all layers of a type share, as if one rank sent all layers' parts."""
    total = 0
    for kinds in costs.model.layers_by_base.values():
        replicas = len(kinds) - 1
        shared = sum(prod(p.shape) for p in costs.model.types[kinds[0]].trained_parameters if p.shared)
        if sent := replicas * shared * ITEMSIZE[costs.precision.parameters]:
            total += 2 * _sent_ps(costs, stages[0], stages[-1], sent)
    return total


def types_with_replicas(model: Model) -> frozenset[str]:
    """Return the types of layers whose ranks are in the process group of tied or shared parameters."""
    shared = (
        names
        for names in model.layers_by_base.values()
        if len(names) > 1 and any(parameter.shared for parameter in model.types[names[0]].parameters)
    )
    return frozenset((EMBEDDING, HEAD) if model.tied else ()).union(*shared)


def has_shared(model: Model) -> bool:
    """Return whether several layers hold replicas of a parameter."""
    return any(p.shared for name in set(model.layers) for p in model.types[name].parameters)


def tied_class(strategy: Strategy) -> ParameterAxes:
    """Return how the ranks of a strategy share its parameters: the cost of tied parameters depends on that."""
    return axes_of(strategy).dense


def _sent_ps(costs: CostModel, first: Sequence[int], last: Sequence[int], sent: float) -> int:
    """Return the time to send a number of bytes from each rank, within one stage or between two stages."""
    if first != last:
        consecutive, across, node_types = costs.link(first, last)
        ends = map(costs.profiles_on, node_types)
        return picoseconds(longest(send_kind_time(each, consecutive, across, sent) for each in ends).time_s)
    times = (
        collective_time(costs.profiles_on(on.node_type), Collective.ALL_TO_ALL, kinds_of(on, [range(on.size)]), sent)
        for on in stage_topology(costs.cluster, first).each_type
    )
    return picoseconds(longest(times).time_s)


def _part_bytes(costs: CostModel, layer: str, name: str, strategy: Strategy) -> int:
    """Return the bytes that one rank stores of a parameter."""
    parameter = next(p for p in costs.model.types[layer].parameters if p.name == name)
    box = parameter_box(parameter, strategy, 0)
    return prod(high - low for low, high in box) * ITEMSIZE[costs.precision.parameters]
