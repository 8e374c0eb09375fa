"""Cost of layers under context parallelism: computation, messages and buffers.

With n ranks, time and kept bytes are constant + linear b s/n + quadratic b s^2/n, with the coefficients of the curve
over lengths. Such figures are derived; if a probe ran with the keys of n ranks on one device, the ratio of its times to
the derived ones corrects them.
"""

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

import msgspec

from shardwright.estimate.curves import of_other_shares, on_joint_curve
from shardwright.io import BadInput
from shardwright.key import LayerKey
from shardwright.plan.axes import axes_of
from shardwright.plan.communication import KeysAndValues, Message, context_messages, keys_and_values, tensors_of
from shardwright.plan.schedules.passes import Pass
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, Model, Precision
from shardwright.types.hardware_profile import Collective, GroupKind
from shardwright.types.model_profile import FitMode, FitRow, LayerFigures, Quantity
from shardwright.types.strategy import ContextParallel, LayerStrategy, Recompute, Strategy
from shardwright_search.cost_model.collectives import (
    Duration,
    StageTopology,
    axis_group_kinds,
    collective_time,
    exchange_time,
    in_turn,
    overlapped_time,
    slowdowns_of,
)
from shardwright_search.cost_model.compute import ComputeCost, layer_cost
from shardwright_search.cost_model.profiles import Passes, Profiles
from shardwright_search.cost_model.time_model import TimeModel

_ACCUMULATED_BYTES = 4
"""Bytes per element of attention's merged output, and of the gradient of queries, while blocks add to it."""


def shared_layer_cost(
    profiles: Profiles, key: LayerKey, micro_batch_size: int, parts: int, time_model: TimeModel
) -> ComputeCost:
    """Return the cost, without messages, of a layer on one of `parts` ranks that split its positions.

    Points measured at the shard's length give all costs except attention to other shards; without such points, the
    curve over lengths does. Raises BadInput if the profile has no such curve.
    """
    if parts == 1:
        return layer_cost(profiles, key, micro_batch_size, time_model)
    alone = msgspec.structs.replace(key, sequence_length=key.sequence_length // parts)
    lacks = alone not in profiles.layers
    curves = _curves(profiles, key, parts) if lacks or key.type not in (EMBEDDING, HEAD) else {}
    cost = layer_cost(profiles, alone, micro_batch_size, TimeModel.SEQUENCE if lacks else time_model)
    figures, source = cost.figures, f"points of sequence_length {alone.sequence_length}"
    if lacks:
        figures, source = _on_joint_curves(profiles, alone, micro_batch_size, figures, curves), "the curve over lengths"
    shares = micro_batch_size, alone.sequence_length, parts
    others = LayerFigures(*(of_other_shares(curves.get(name), *shares) for name in LayerFigures._fields))
    shared = LayerFigures(*(here + there for here, there in zip(figures, others, strict=True)))
    attention = others.forward_s * parts / (parts - 1), others.backward_s * parts / (parts - 1)
    warning = f"derived: {key.type} of cp_size {parts}: from {source}"
    return _corrected(profiles, key.type, parts, ComputeCost(shared, warning, attention))


def _corrected(profiles: Profiles, type_name: str, parts: int, cost: ComputeCost) -> ComputeCost:
    """Return a derived cost, times the ratio of measured to derived time that a probe of the nearest cp_size has."""
    probed = [row for row in profiles.context if row.type == type_name]
    if not probed:
        return cost
    nearest = min(probed, key=lambda row: (abs(log(row.cp_size / parts)), row.cp_size))
    forward, backward = nearest.corrections
    figures, attention = cost.figures, cost.attention
    return ComputeCost(
        figures._replace(forward_s=forward * figures.forward_s, backward_s=backward * figures.backward_s),
        f"{cost.warning}, times {forward:.3g} forward and {backward:.3g} backward as probed at {nearest.cp_size}",
        (forward * attention[0], backward * attention[1]),
    )


def _curves(profiles: Profiles, key: LayerKey, parts: int) -> dict[str, FitRow]:
    """Return a layer's curves over micro-batch sizes and lengths, by quantity; quantities that are 0 have none."""
    rows = profiles.fits.get(strategy := key.without("sequence_length"), ())
    curves = {str(row.quantity): row for row in rows if row.mode is FitMode.JOINT}
    if Quantity.FORWARD_S not in curves:
        problem = f"no curve over lengths of {strategy}, by which a cp_size of {parts} is priced"
        remedy = "profile the model at two sequence_lengths and micro_batch_sizes, in its settings"
        raise BadInput(profiles.model_file, problem, remedy)
    return curves


def _on_joint_curves(
    profiles: Profiles, key: LayerKey, size: int, figures: LayerFigures[float], curves: Mapping[str, FitRow]
) -> LayerFigures[float]:
    """Return figures, each replaced by the value of its curve over micro-batch sizes and lengths if it has one.

    `size`: the micro-batch size. Raises BadInput if a value is negative.
    """
    joint = {name: on_joint_curve(row, size, key.sequence_length) for name, row in curves.items()}
    if min(joint.values()) < 0:
        problem = f"{key}: the joint curve is negative at micro_batch_size {size}"
        raise BadInput(profiles.model_file, problem, "profile the model at that length, too")
    return figures._replace(**joint)


class SharedContext(NamedTuple):
    """A layer under context parallelism, with the samples of a microbatch and the number formats."""

    model: Model
    type_name: str
    strategy: Strategy
    samples: int
    precision: Precision

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return the messages of this layer's context parallelism for one micro-batch, forward and backward."""
        kind = self.model.types[self.type_name]
        given = kind, self.strategy, self.samples, tensors_of(self.model, kind)
        return tuple(context_messages(*given, *self.itemsizes, 1))

    @property
    def is_ring(self) -> bool:
        """Return whether keys and values are passed around a ring of ranks."""
        return isinstance(self.strategy, LayerStrategy) and self.strategy.context is ContextParallel.RING

    @property
    def attentions(self) -> tuple[KeysAndValues, ...]:
        """Return the keys and values of each attention; none without context parallelism."""
        kind = self.model.types[self.type_name]
        return keys_and_values(kind, self.strategy, self.samples, tensors_of(self.model, kind))

    @property
    def itemsizes(self) -> tuple[int, int]:
        """Return the bytes of a number that is computed with, and of one that is reduced."""
        return ITEMSIZE[self.precision.compute], ITEMSIZE[self.precision.reduce]

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of keys, values and gradients in transit, and of sums over blocks.

        If keys and values are gathered: these, and their gradients three times, while they are laid out and scattered.
        In a ring: the block that is here and the one arriving, and the gradients here, arriving and being sent.
        """
        compute, reduce = self.itemsizes
        moved = (each.numel // each.ranks * (2 * compute + 3 * reduce) for each in self.attentions)
        gathered = (each.numel * (compute + 3 * reduce) for each in self.attentions)
        summed = (each.queries * _ACCUMULATED_BYTES for each in self.attentions)
        return max(moved if self.is_ring else gathered, default=0) + max(summed, default=0)


def context_times(
    profiles: Profiles, layer: SharedContext, topology: StageTopology, attention: Passes
) -> tuple[Duration, ...]:
    """Return the time that the messages of context parallelism add to each kind of pass of a micro-batch.

    `attention`: the seconds of attention in each pass. A gather comes before it; a ring's sends overlap with it.
    """
    if not (attentions := layer.attentions):
        return (Duration(0.0),) * len(Pass)
    kinds = axis_group_kinds(topology, axes_of(layer.strategy).context)
    if not layer.is_ring:
        return _gather_times(profiles, layer, kinds)
    each = attention[0] / len(attentions), attention[1] / len(attentions)
    passes = [_ring_times(profiles, layer, one, topology, kinds, each) for one in attentions]
    return tuple(map(in_turn, zip(*passes, strict=True)))


def _gather_times(profiles: Profiles, layer: SharedContext, kinds: Sequence[GroupKind]) -> tuple[Duration, ...]:
    def taken(message: Message) -> Duration:
        time_s, warning = collective_time(profiles, message.collective, kinds, message.bytes)
        return Duration(time_s * message.times, warning)

    return tuple(in_turn(taken(m) for m in layer.messages if m.during is during) for during in Pass)


def _ring_times(
    profiles: Profiles,
    layer: SharedContext,
    both: KeysAndValues,
    topology: StageTopology,
    kinds: Sequence[GroupKind],
    attention: Passes,
) -> tuple[Duration, ...]:
    """Return the time that a ring adds to each kind of pass.

    Each send overlaps with the attention to a block, except for the last send of gradients.
    """
    across = any(kind.across_nodes for kind in kinds)
    # Ranks of a node that lie in other rings send over the same network.
    alone = all(kind.ranks_per_node == max(topology.on_each_node) for kind in kinds)
    link = GroupKind(2, 1 if across else 2, alone)

    def step(block_s: float, num_bytes: int) -> Duration:
        send = exchange_time(profiles, alone, across, num_bytes)
        slowdowns = slowdowns_of(profiles, Collective.P2P, (link,), num_bytes)
        return Duration(overlapped_time(block_s, send, slowdowns) * (both.ranks - 1), send.warning)

    recompute = getattr(layer.strategy, "recompute", Recompute.NONE)
    again = recompute.replays("attention") and recompute is not Recompute.SELECTIVE
    sent, gradients = (both.numel // both.ranks * itemsize for itemsize in layer.itemsizes)
    forward_s, backward_s = (each / both.ranks for each in (attention[0], attention[1] - again * attention[0]))
    forward, home = step(forward_s, sent), exchange_time(profiles, alone, across, gradients)
    backward = in_turn([step(max(0.0, backward_s), sent + gradients), home, *([forward] if again else [])])
    # A weight pass computes no attention.
    added = {Pass.FORWARD: forward, Pass.BACKWARD: backward}
    return tuple(added.get(during, Duration(0.0)) for during in Pass)
