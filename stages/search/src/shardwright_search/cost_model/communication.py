"""Time of redistribution between layouts, of sends between stages, of tied parameters and of the gradient norm."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from shardwright.plan.axes import Layout, common_block, common_samples
from shardwright.plan.layout import closed_groups, redistribution_plan, sent_numel
from shardwright.types import BoundaryTensor
from shardwright.types.hardware_profile import Collective, GroupKind
from shardwright_search.cost_model.collectives import Duration, collective_time, in_turn, longest, send_kind_time
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.topology import StageTopology, kinds_of

Nodes = tuple[int, ...]
"""The node of each rank of a pipeline stage."""


class _AllToAll(NamedTuple):
    """The exchanges of one change of layout that cost the same: the groups' kind, and the most that a rank sends."""

    kind: GroupKind
    numel_per_sample: float
    """Elements of one sample that a rank sends at most, one way."""


def redistribution_time(
    profiles: Profiles,
    topology: StageTopology,
    source: Layout,
    target: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    itemsize: int,
) -> Duration:
    """Return the time to change a micro-batch's tensors from one layout to another, in one direction.

    A pass is one all_to_all per tensor on each closed group. A full all_to_all of n ranks sends (n-1)/n of its bytes
    to others; so a rank that sends x bytes waits as for a message of x n/(n-1) bytes.
    """

    def moved(tensor: BoundaryTensor) -> Duration:
        taken = [Duration(0.0)]
        for kind, per_sample in _all_to_alls(topology, source, target, tensor.sequence_length, tensor.features):
            num_bytes = ceil(per_sample * samples * itemsize * kind.size / (kind.size - 1))
            taken.append(collective_time(profiles, Collective.ALL_TO_ALL, [kind], num_bytes))
        return longest(taken)

    return Duration(0.0) if source == target else in_turn(map(moved, outputs))


def send_time(
    profiles: Profiles,
    consecutive: bool,
    across_nodes: bool,
    layout: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    itemsize: int,
) -> Duration:
    """Return the time to pass a micro-batch to the next stage: a rank sends its activation shard to one other rank."""

    def sent(tensor: BoundaryTensor) -> Duration:
        tokens = layout.activation_shard(0, samples, tensor.sequence_length).tokens
        return send_kind_time(profiles, consecutive, across_nodes, tokens * tensor.features * itemsize)

    return in_turn(map(sent, outputs))


def handover_time(
    profiles: Profiles,
    nodes: tuple[Nodes, ...],
    source: Layout,
    target: Layout,
    samples: int,
    outputs: Sequence[BoundaryTensor],
    itemsize: int,
) -> Duration:
    """Return the time to pass a micro-batch to a stage of another width: the longer of forward and backward.

    Each rank sends pieces to several others at once. The busiest one counts: all that it sends, or gets, as one
    message, which goes across nodes if a part of it does. `nodes` are those of both stages.
    """
    times = samples // common_samples(source, target)

    def sent(tensor: BoundaryTensor) -> Duration:
        busiest = _busiest(nodes, source, target, tensor.sequence_length)
        sizes = ((across, times * tokens * tensor.features * itemsize) for across, tokens in busiest)
        return longest([Duration(0.0), *(send_kind_time(profiles, False, across, size) for across, size in sizes)])

    return in_turn(map(sent, outputs))


@lru_cache(maxsize=8192)
def _busiest(
    nodes: tuple[Nodes, ...], source: Layout, target: Layout, sequence_length: int
) -> tuple[tuple[bool, int], ...]:
    """Return the most positions that a rank sends or receives, forward or backward, inside a node and across nodes.

    They are of as many samples as both layouts can divide; shares are exact, so all scales with the samples.
    """
    samples = common_samples(source, target)
    most: dict[bool, int] = {}
    for senders, receivers, ends in ((source, target, nodes), (target, source, nodes[::-1])):
        moved, far = Counter[tuple[bool, int]](), set[tuple[bool, int]]()
        for transfer in redistribution_plan(senders, receivers, samples, sequence_length):
            for port in ((False, transfer.source), (True, transfer.target)):
                moved[port] += transfer.piece.tokens
                if ends[0][transfer.source] != ends[1][transfer.target]:
                    far.add(port)
        for port, tokens in moved.items():
            most[port in far] = max(most.get(port in far, 0), tokens)
    return tuple(sorted(most.items()))


@lru_cache(maxsize=8192)
def _all_to_alls(
    topology: StageTopology, source: Layout, target: Layout, sequence_length: int, features: int
) -> tuple[_AllToAll, ...]:
    """Return the all_to_alls of a change of layout, for one sample: kinds of groups, and bytes.

    Shares are exact, so all scales with the samples. If the groups of both layouts are neighbours, ranks only
    exchange inside blocks of lcm(tp, tp') of them, all alike.
    """
    block = common_block(source, target)
    inner = source._replace(stage_size=block), target._replace(stage_size=block)
    samples = common_samples(*inner)
    sent = sent_numel(*inner, samples, sequence_length, features)
    most: dict[GroupKind, int] = {}
    for group in closed_groups(*inner, samples, sequence_length):
        largest = max(sent[rank] for rank in group)
        if largest:
            everywhere = [[start + rank for rank in group] for start in range(0, source.stage_size, block)]
            for kind in kinds_of(topology, everywhere):
                most[kind] = max(most.get(kind, 0), largest)
    per_block = samples * source.stage_size // block
    return tuple(_AllToAll(kind, largest / per_block) for kind, largest in sorted(most.items()))
