"""Every byte that a rank moves in one step of a plan: what the runtime does, in formulas.

`Message.bytes` counts as `hardware_profile.Collective` does, the full tensor on one rank: the input of all_reduce,
reduce_scatter and all_to_all, the output of all_gather. An uneven all_to_all (redistribution, tied parameters) counts
what this rank sends; sends are counted by the sender.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import lcm, prod

from msgspec import UNSET

from shardwright.plan import tied_weights
from shardwright.plan.axes import Axis, Layout, axes_of, layout_of
from shardwright.plan.chunks import (
    chunk_layers,
    gathers_spared,
    incoming_layout,
    needs_gradient,
    sending_cuts,
)
from shardwright.plan.context_messages import context_messages
from shardwright.plan.expert_messages import expert_messages, shares_experts
from shardwright.plan.layout import closed_groups, parameter_box, sent_numel
from shardwright.plan.messages import Cause as Cause
from shardwright.plan.messages import Message as Message
from shardwright.plan.messages import sent_through
from shardwright.plan.parameter_groups import ParameterGroup, parameter_groups
from shardwright.plan.regathers import regathers
from shardwright.plan.schedules.passes import Pass
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import HEAD, LayerType, Model, Parameter
from shardwright.types.plan import ITEMSIZE, GradientReduction, Plan
from shardwright.types.regions import BoundaryTensor, Region
from shardwright.types.strategy import DataParallel, Recompute, Strategy

LOSS_ELEMENTS = 1 << 24
"""Logits that the cross entropy has in float32 at a time."""
_REDUCTIONS = 2
"""Sums of the cross entropy over the ranks for a position: of the exponentials and of the label's logit."""
_NORM_BYTES = 3 * 8
"""Loss, squared gradient norm and the wish to stop, in float64."""


_Crossing = tuple[Collective | None, Collective | None]


def step_messages(plan: Plan, rank: int) -> tuple[Message, ...]:
    """Return the messages that one rank takes part in during one step."""
    stage = plan.stage_of_rank(rank)
    messages: list[Message] = []
    for chunk in range(len(plan.stages[stage].layers)):
        messages += _chunk_messages(plan, rank, stage, chunk)
    messages += _sends(plan, rank, stage)
    messages += _partial_sums(plan, rank, stage)
    messages += _tied_parameter_messages(plan, rank)
    if plan.world_size > 1:
        size = _NORM_BYTES + _assignments_bytes(plan.model)
        messages.append(Message(Cause.NORM, Collective.ALL_REDUCE, plan.world_size, size, None))
    return tuple(messages)


def _assignments_bytes(model: Model) -> int:
    """Return the bytes of the counts of positions for each expert of each layer in a step."""
    return 8 * sum(experts.number for kind in model.layers if (experts := model.types[kind].experts) is not UNSET)


def parameter_messages(
    kind: LayerType,
    strategy: Strategy,
    compute_itemsize: int,
    reduce_itemsize: int,
    microbatches: int,
    reduce_every_microbatch: bool,
) -> Iterator[Message]:
    """Yield the messages of data parallelism for one layer in one step (Rajbhandari et al. 2020).

    ZeRO cuts a dim of every parameter's tensor-parallel share into equal parts, the last ones padded; ZeRO-2
    gathers once a step, ZeRO-3 for every forward and every backward pass (recomputation happens inside the latter; what
    a layer at a chunk's end is spared, `gathers_spared` says).
    If groups of ranks hold replicas of each other's parts (HSDP), each part's gradients are then summed over these.
    Frozen parameters are gathered and have no gradients; if no backward pass goes through the layer, none gathers.
    """
    for group in parameter_groups(kind, strategy):
        yield from _group_messages(group, compute_itemsize, reduce_itemsize, microbatches, reduce_every_microbatch)


def _group_messages(
    group: ParameterGroup,
    compute_itemsize: int,
    reduce_itemsize: int,
    microbatches: int,
    reduce_every_microbatch: bool,
) -> Iterator[Message]:
    kind, strategy = group
    dense = axes_of(strategy).dense
    ranks, replicas = dense.shards, dense.replicas
    if ranks == replicas == 1:
        return
    parts, trained = dense.tensor.size, kind.trained_parameters
    reductions = microbatches if reduce_every_microbatch else 1
    if strategy.data_parallel is DataParallel.DDP:
        if size := sum(p.numel(parts) for p in trained) * reduce_itemsize:
            yield Message(Cause.GRADIENTS, Collective.ALL_REDUCE, replicas, size, Pass.BACKWARD, reductions)
        return
    size = _padded([p for p in kind.parameters if not p.is_buffer], parts, ranks) * compute_itemsize
    if strategy.data_parallel is DataParallel.ZERO3:
        yield Message(Cause.PARAMETERS, Collective.ALL_GATHER, ranks, size, Pass.FORWARD, microbatches)
        if kind.has_backward:
            yield Message(Cause.PARAMETERS, Collective.ALL_GATHER, ranks, size, Pass.BACKWARD, microbatches)
    else:
        yield Message(Cause.PARAMETERS, Collective.ALL_GATHER, ranks, size, Pass.FORWARD)
    if not trained:
        return
    size = _padded(trained, parts, ranks) * reduce_itemsize
    yield Message(Cause.GRADIENTS, Collective.REDUCE_SCATTER, ranks, size, Pass.BACKWARD, reductions)
    if replicas > 1:
        yield Message(Cause.GRADIENTS, Collective.ALL_REDUCE, replicas, size // ranks, Pass.BACKWARD, reductions)


def partial_gradient_bytes(kind: LayerType, strategy: Strategy, rank: int, parameter_itemsize: int) -> int:
    """Return the bytes of replicated parameters' gradients that a rank's tensor-parallel group sums once a step.

    Those used inside a region are parts of a sum on every rank, the others where Megatron splits the sequence. The type
    is that of one parameter group, its experts not cut yet (`ParameterGroup.uncut`).
    """
    axes = axes_of(strategy)
    if axes.dense.tensor.size == 1:
        return 0
    parts = (p for p in kind.trained_parameters if p.tp_dim is None and (p.inside or axes.gathers_sequence))
    boxes = (parameter_box(parameter, strategy, rank) for parameter in parts)
    return sum(prod(high - low for low, high in box) for box in boxes) * parameter_itemsize


def region_messages(
    model: Model, type_name: str, strategy: Strategy, samples: int, itemsize: int, microbatches: int
) -> Iterator[Message]:
    """Yield the messages of tensor and sequence parallelism for one layer in one step of microbatches of `samples`.

    They are of the positions that its ranks have under context parallelism.
    Without sequence parallelism a region sums its output forward and the gradient of its inputs backward (Shoeybi et
    al. 2019); Megatron's gathers and scatters the sequence instead of both, and gathers a region's inputs again in the
    backward pass instead of keeping them (Korthikanti et al. 2022), if `regathers`; Ulysses exchanges queries, keys,
    values and the result, and their gradients (Jacobs et al. 2023), key and value heads repeated until the degree
    divides their number. Recomputation repeats in the backward pass what the forward pass did, but stops when it has
    all it needs: the last sum of what is recomputed is left out, unless `replays_sum` names the kind. Selective
    recomputation keeps the sums and repeats none. Without a backward pass there are those of the forward pass alone.
    """
    axes = axes_of(strategy)
    kind, ranks, context = model.types[type_name], axes.region.size, axes.context.size
    experts = expert_messages(kind, strategy, samples, tensors_of(model, kind), itemsize, microbatches)
    yield from sent_through(kind, experts)
    if ranks == 1:
        return
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    positions = axes.rank_samples(samples) * itemsize
    # Levels of a pyramid hand on other sizes than the embedding does: a layer's messages are of its own outputs.
    tensors = tensors_of(model, kind)
    for index, (region, regathered) in enumerate(zip(kind.regions, regathers(kind), strict=True)):
        alone = recompute.half == region.name
        replays = recompute.replays(region.name)
        ends = (alone or index == len(kind.regions) - 1) and (
            recompute.half or recompute
        ).value not in region.replays_sum
        if axes.exchanges_heads:
            sizes = {name: positions * tensor.sequence_length // context for name, tensor in tensors.items()}
            yield from sent_through(kind, _ulysses_messages(region, ranks, sizes, replays, microbatches))
            continue
        if region.name == "mlp" and shares_experts(strategy) and not _has_shared_experts(kind):
            continue  # each rank's positions go to experts, not to all of its group
        entering, leaving = _GATHERED_SEQUENCE if axes.gathers_sequence else _WHOLE_SEQUENCE
        # What is gathered in a replay stays gathered until the backward pass behind it.
        crossings = [(name, *entering, replays or (axes.gathers_sequence and regathered)) for name in region.enters]
        if region.leaves is not None:
            crossings.append((region.leaves, *leaving, replays and not ends and recompute is not Recompute.SELECTIVE))
        for name, forward, backward, replayed in crossings:
            length = tensors[name].sequence_length
            # Of whole sequences only the positions with labels enter the head's matrix: that of an image's class.
            length = min(length, kind.labels) if kind.labels and not axes.gathers_sequence else length
            size = positions * length // context * tensors[name].features
            collectives = [(Pass.FORWARD, forward), (Pass.BACKWARD, backward)]
            for during, collective in [*collectives, (Pass.BACKWARD, forward)] if replayed else collectives:
                if collective is not None and (kind.has_backward or not during.makes_gradients):
                    yield Message(Cause.TENSOR_PARALLEL, collective, ranks, size, during, microbatches)


def _has_shared_experts(kind: LayerType) -> bool:
    """Return whether some experts compute every position, with their features split over tensor-parallel ranks."""
    return kind.experts is not UNSET and kind.experts.shared_features is not UNSET


def tensors_of(model: Model, kind: LayerType) -> dict[str, BoundaryTensor]:
    """Return the tensors that the regions of a layer type take in and give, by name."""
    return {tensor.name: tensor for tensor in kind.outputs or model.received_by(HEAD)}


_WHOLE_SEQUENCE: tuple[_Crossing, _Crossing] = ((None, Collective.ALL_REDUCE), (Collective.ALL_REDUCE, None))
"""Collectives at the entry and exit of a region, forward and backward, if ranks hold whole sequences."""
_GATHERED_SEQUENCE: tuple[_Crossing, _Crossing] = (
    (Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
)
"""Collectives of a region if ranks hold parts of the sequence, which it gathers and scatters again."""


def _ulysses_messages(
    region: Region, ranks: int, sizes: Mapping[str, int], replays: bool, microbatches: int
) -> Iterator[Message]:
    """Yield messages of queries and result, keys and values; `sizes`: bytes of one feature of each boundary tensor."""
    heads = region.attention
    if heads is None:
        return
    of_queries = sizes[heads.queries] * heads.heads // ranks
    of_keys = sizes[heads.keys] * lcm(heads.kv_heads, ranks) // ranks
    widths = dict.fromkeys((heads.head_features, heads.features_of_values))
    for one_feature, width in product((of_queries, of_keys), widths):
        for during, times in ((Pass.FORWARD, 1), (Pass.BACKWARD, 2 if replays else 1)):
            times *= 2 // len(widths)
            yield Message(
                Cause.ULYSSES, Collective.ALL_TO_ALL, ranks, one_feature * width, during, times * microbatches
            )


def loss_messages(
    kind: LayerType, strategy: Strategy, samples: int, itemsize: int, microbatches: int
) -> Iterator[Message]:
    """Yield the messages of the cross entropy over a sharded vocabulary: a maximum and two sums for each position.

    They are computed in float32 at least.
    """
    axes = axes_of(strategy)
    ranks, labels = axes.dense.tensor.size, axes.rank_samples(samples) * kind.labels // axes.context.size
    positions = labels * max(4, itemsize)
    if ranks > 1 and positions:
        for size in (positions, _REDUCTIONS * positions):
            yield Message(Cause.LOSS, Collective.ALL_REDUCE, ranks, size, Pass.FORWARD, microbatches)


def redistribution_messages(
    tensors: Sequence[BoundaryTensor],
    source: Layout,
    target: Layout,
    rank: int,
    samples: int,
    itemsize: int,
    microbatches: int,
    backward: bool = True,
) -> Iterator[Message]:
    """Yield a rank's messages in a step when tensors change layout: an uneven all_to_all each, and one back.

    If they have no gradient (`backward` is False) there is none back. A rank that keeps all it has takes part in
    none. Recomputation does not repeat it: the layer's input is kept as it arrived.
    """
    if source == target:
        return
    for tensor in tensors:
        length = tensor.sequence_length
        members = next(group for group in closed_groups(source, target, samples, length) if rank in group)
        if len(members) > 1:
            ways = ((Pass.FORWARD, source, target), (Pass.BACKWARD, target, source))
            for during, before, after in ways if backward else ways[:1]:
                size = sent_numel(before, after, samples, length, tensor.features)[rank] * itemsize
                yield Message(Cause.REDISTRIBUTION, Collective.ALL_TO_ALL, len(members), size, during, microbatches)


def _chunk_messages(plan: Plan, rank: int, stage: int, chunk: int) -> Iterator[Message]:
    me = plan.stages[stage].ranks.index(rank)
    model, samples, microbatches = plan.model, plan.microbatch_samples, plan.num_microbatches
    compute, reduce = ITEMSIZE[plan.precision.compute], ITEMSIZE[plan.precision.reduce]
    each_microbatch = plan.gradient_reduction is GradientReduction.EVERY_MICROBATCH
    current = incoming_layout(plan, stage, chunk)
    spared, gradient = gathers_spared(plan, stage, chunk), needs_gradient(plan, stage, chunk)
    for name, type_name, strategy in chunk_layers(plan, stage, chunk):
        kind, wanted = model.types[type_name], layout_of(strategy)
        if current is not None:
            moved = current, wanted, me, samples, compute, microbatches
            yield from redistribution_messages(model.received_by(name), *moved, gradient)
        current, gradient = wanted, kind.has_backward
        for group in parameter_groups(kind, strategy):
            stays = group.strategy.data_parallel is DataParallel.ZERO3
            for message in _group_messages(group, compute, reduce, microbatches, each_microbatch):
                times = message.times - stays * spared[name, message.cause is Cause.PARAMETERS and message.during]
                if times:
                    yield message._replace(times=times)
        yield from region_messages(model, type_name, strategy, samples, compute, microbatches)
        yield from context_messages(kind, strategy, samples, tensors_of(model, kind), compute, reduce, microbatches)
        if name == HEAD:
            yield from loss_messages(kind, strategy, samples, compute, microbatches)


def _sends(plan: Plan, rank: int, stage: int) -> Iterator[Message]:
    """Yield a message to each rank of a neighbouring pipeline stage that wants a piece of a tensor."""
    me, itemsize = plan.stages[stage].ranks.index(rank), ITEMSIZE[plan.precision.compute]
    for cut in sending_cuts(plan):
        for during, (sender, _), _ in cut.ways(needs_gradient(plan, *cut.target)):
            for tensor in cut.tensors if sender == stage else ():
                for transfer in cut.transfers(during, plan.microbatch_samples, tensor.sequence_length):
                    if transfer.source == me:
                        size = transfer.piece.tokens * tensor.features * itemsize
                        yield Message(Cause.PIPELINE, Collective.P2P, 2, size, during, plan.num_microbatches)


def _partial_sums(plan: Plan, rank: int, stage: int) -> Iterator[Message]:
    """Yield a message for each tensor axis of the pipeline stage's layers."""
    me, itemsize = plan.stages[stage].ranks.index(rank), ITEMSIZE[plan.precision.parameters]
    sizes: Counter[Axis] = Counter()
    for chunk in range(len(plan.stages[stage].layers)):
        for _, type_name, strategy in chunk_layers(plan, stage, chunk):
            for group in parameter_groups(kind := plan.model.types[type_name], strategy):
                size = partial_gradient_bytes(group.uncut(kind), group.strategy, me, itemsize)
                sizes[axes_of(group.strategy).dense.tensor] += size
    for axis, size in sizes.items():
        if size:
            yield Message(Cause.PARTIAL_GRADIENTS, Collective.ALL_REDUCE, axis.size, size, None)


def _tied_parameter_messages(plan: Plan, rank: int) -> Iterator[Message]:
    tied = tied_weights.tied_parameters(plan)
    members, trained = tied_weights.ranks_of_replicas(tied), tied_weights.trained_ones(tied)
    if rank in members and trained:
        for pieces in (tied_weights.pieces_to_owners(trained), tied_weights.pieces_from_owners(trained)):
            size = sum(p.numel for p in pieces if p.source == rank != p.target) * ITEMSIZE[plan.precision.parameters]
            yield Message(Cause.TIED_PARAMETERS, Collective.ALL_TO_ALL, len(members), size, None)


def _padded(parameters: Sequence[Parameter], parts: int, ranks: int) -> int:
    """Return the number of elements of tensor-parallel parts that are padded to equal shards."""
    return ranks * sum(parameter.shard_numel(parts, ranks) for parameter in parameters)
