"""Time of adding up the gradients of tied parameters, and of bringing them back, once a step."""

from collections.abc import Sequence
from math import prod

from shardwright_formats.semantics.layout import parameter_box, parameter_layout
from shardwright_formats.types.hardware_profile import Collective
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.strategy import DataParallel, Strategy
from shardwright_search.cost_model.collectives import collective_time, send_kind_time
from shardwright_search.cost_model.layer import CostModel, picoseconds
from shardwright_search.cost_model.memory import itemsize
from shardwright_search.cost_model.topology import GroupKind, stage_topology

__all__ = ["shared_cost_ps", "tie_class", "tie_cost_ps"]


def tie_cost_ps(
    costs: CostModel, embedding: Strategy, head: Strategy, first: Sequence[int], last: Sequence[int]
) -> int:
    """The embedding's and the head's copies of each tied parameter: one's gradient to the other, the sum back.

    `first` and `last` are the ranks of their pipeline stages. Every rank of the receiving side gets its own part,
    which the ranks of the other side send in even shares; ranks that hold the same part of both send nothing.
    """
    total = 0
    for one, other in costs.model.tied:
        boxes = _part_bytes(costs, EMBEDDING, one, embedding), _part_bytes(costs, HEAD, other, head)
        if first == last and tie_class(embedding) == tie_class(head):
            continue
        for received, senders, receivers in ((boxes[0], last, first), (boxes[1], first, last)):
            sent = received * len(receivers) / len(senders)
            if first == last:
                topology = stage_topology(costs.cluster, first)
                kind = GroupKind(topology.size, True, len(topology.on_each_node) > 1)
                taken = collective_time(costs.profiles, Collective.ALL_TO_ALL, [kind], sent)
            else:
                link = costs.link(first, last)
                taken = send_kind_time(costs.profiles, *link, sent)
            total += picoseconds(taken.time_s)
    return total


def shared_cost_ps(costs: CostModel, stages: Sequence[Sequence[int]]) -> int:
    """Parameters that all layers of a type hold copies of: at most what one rank that owns them all would send."""
    total = 0
    for name in dict.fromkeys(costs.model.layers):
        copies = costs.model.layers.count(name) - 1
        shared = sum(prod(p.shape) for p in costs.model.types[name].parameters if p.shared)
        sent = copies * shared * itemsize(costs.precision.parameters)
        if not sent:
            continue
        if len(stages) > 1:
            taken = send_kind_time(costs.profiles, *costs.link(stages[0], stages[-1]), sent)
        else:
            topology = stage_topology(costs.cluster, stages[0])
            kind = GroupKind(topology.size, True, len(topology.on_each_node) > 1)
            taken = collective_time(costs.profiles, Collective.ALL_TO_ALL, [kind], sent)
        total += 2 * picoseconds(taken.time_s)
    return total


def tie_class(strategy: Strategy) -> tuple[object, ...]:
    """What a strategy's tie costs depend on: how the ranks share its parameters."""
    return parameter_layout(strategy), strategy.data_parallel is DataParallel.DDP


def _part_bytes(costs: CostModel, element: str, name: str, strategy: Strategy) -> int:
    """What one rank stores of a parameter."""
    parameter = next(p for p in costs.model.types[element].parameters if p.name == name)
    box = parameter_box(parameter, strategy, 0)
    return prod(high - low for low, high in box) * itemsize(costs.precision.parameters)
