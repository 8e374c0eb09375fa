"""Time to sum the gradients of tied parameters over their replicas, once a step."""

from collections.abc import Iterator, Sequence
from math import prod

from shardwright.plan.axes import ParameterAxes, axes_of
from shardwright.plan.layout import parameter_box
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, Model, Parameter, Strategy
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
    for parameter in _tied(costs.model):
        for strategy, mine, others in ((embedding, first, last), (head, last, first)):
            # Of the fewer ranks each has more to send than the others get, or to get than they send.
            share = max(1.0, len(mine) / len(others))
            total += _sent_ps(costs, first, last, _part_bytes(costs, parameter, strategy) * share)
    return total


def _tied(model: Model) -> Iterator[Parameter]:
    """Yield the embedding's trained parameters that the head shares, or a block, once for each copy.

    Blocks with copies, which predict further tokens, are priced as if they were sharded like the head, next to it.
    """
    trained = {parameter.name: parameter for parameter in model.types[EMBEDDING].trained_parameters}
    yield from (trained[name] for name, _ in model.tied if name in trained)
    for layer in model.layers:
        yield from (trained[str(p.copy_of)] for p in model.types[layer].copies if p.copy_of in trained)


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
    copies = (name for name in dict.fromkeys(model.layers) if model.types[name].copies)
    return frozenset((EMBEDDING, HEAD, *copies) if model.has_copies else ()).union(*shared)


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


def _part_bytes(costs: CostModel, parameter: Parameter, strategy: Strategy) -> int:
    """Return the bytes that one rank stores of a parameter."""
    box = parameter_box(parameter, strategy, 0)
    return prod(high - low for low, high in box) * ITEMSIZE[costs.precision.parameters]
