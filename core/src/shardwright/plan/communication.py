"""Every byte that a rank moves in one step of a plan: the runtime's communication, in formulas.

`Message.bytes` counts the full tensor on one rank, as `hardware_profile.Collective` does: the input of all_reduce,
reduce_scatter and all_to_all, the output of all_gather. An uneven all_to_all (redistribution, tied parameters) counts
what this rank sends; sends are counted by the sender.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import product
from math import lcm, prod
from typing import NamedTuple

from msgspec import UNSET

from shardwright.plan import tied_weights
from shardwright.plan.axes import Axis, Layout, ParameterAxes, axes_of, layout_of
from shardwright.plan.chunks import chunk_layers, gathers_spared, incoming_layout, needs_gradient, sending_cuts
from shardwright.plan.layout import ParameterGroup, closed_groups, parameter_box, parameter_groups, sent_numel
from shardwright.plan.schedules.passes import Pass
from shardwright.types import Experts
from shardwright.types.hardware_profile import Collective
from shardwright.types.model import HEAD, LOW_RANK, BoundaryTensor, Heads, LayerType, Model, Parameter, Region
from shardwright.types.plan import ITEMSIZE, GradientReduction, Plan
from shardwright.types.strategy import ContextParallel, DataParallel, LayerStrategy, Recompute, Strategy

# Regions that gather their input again for the gradients of weights, under Megatron's sequence parallelism.


_FIRST = f"{LOW_RANK}A."


def regathers(kind: LayerType) -> tuple[bool, ...]:
    """Return, for each region of a layer type, whether a matrix that multiplies its input is trained.

    A region ends with a matrix that is split at its input dim, and the parameters are in the order of the modules. If
    the numbers of such matrices and of regions differ, one answer for the whole layer applies to all regions. If
    everything is trained, all regions gather again, however the family arranges its matrices.
    """
    if all(p.trained or p.is_buffer for p in kind.parameters):
        return (True,) * len(kind.regions)
    ends = [i for i, p in enumerate(kind.parameters) if _is_cut_by_inputs(p)]
    if len(ends) != len(kind.regions):
        return (any(map(_keeps_its_input, kind.parameters)),) * len(kind.regions)
    stretches = zip([0, *ends], ends, strict=False)
    return tuple(any(map(_keeps_its_input, kind.parameters[first:end])) for first, end in stretches)


def low_rank_pairs(kind: LayerType) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return the low-rank pairs inside each region of a layer type: the rank, and whether W is split at its input dim.

    Pairs of experts are left out. If regions cannot be distinguished, the first one gets all pairs.
    """
    firsts = [(i, p) for i, p in enumerate(kind.parameters) if _FIRST in p.name and p.ep_dim is UNSET]
    ends = [i for i, p in enumerate(kind.parameters) if _is_cut_by_inputs(p)]
    if len(ends) != len(kind.regions):
        everything = tuple((p.shape[0], p.tp_dim is not None) for _, p in firsts)
        return (everything, *((),) * (len(kind.regions) - 1))
    # The pair of the matrix that ends a region comes after that matrix in the parameters.
    regions = (min(sum(end < i - (p.tp_dim is not None) * 2 for end in ends), len(ends) - 1) for i, p in firsts)
    placed = list(zip(regions, firsts, strict=True))
    return tuple(
        tuple((p.shape[0], p.tp_dim is not None) for region, (_, p) in placed if region == number)
        for number in range(len(ends))
    )


def _is_cut_by_inputs(parameter: Parameter) -> bool:
    """Return whether a parameter is a matrix [outputs, inputs] sharded at dim 1; biases may have two dims, too."""
    is_matrix = len(parameter.shape) == 2 and not parameter.name.endswith(".bias") and not parameter.shared
    return is_matrix and LOW_RANK not in parameter.name and parameter.tp_dim == 1


def _keeps_its_input(parameter: Parameter) -> bool:
    """Return whether the gradient of a parameter needs the input of its region."""
    if not parameter.trained or len(parameter.shape) < 2:
        return False
    is_cut = (parameter.tp_dim is not None or parameter.inside) and not parameter.name.endswith(".bias")
    return is_cut if LOW_RANK not in parameter.name else _FIRST in parameter.name and parameter.inside


# Messages of a step: their cause, collective, size and number.


class Cause(StrEnum):
    """Causes of messages."""

    PARAMETERS = "parameters"
    """ZeRO gathers parameters."""
    GRADIENTS = "gradients"
    """Data-parallel ranks sum gradients, or reduce and scatter them."""
    PARTIAL_GRADIENTS = "partial_gradients"
    """Tensor-parallel ranks sum the gradients of replicated parameters that each rank applied to a different part."""
    TENSOR_PARALLEL = "tensor_parallel"
    """Activations enter and leave matrices that are sharded over ranks."""
    ULYSSES = "ulysses"
    """Positions are exchanged for heads."""
    CONTEXT = "context"
    """Keys and values are sent to the ranks whose positions attend to them, and their gradients are sent back."""
    EXPERTS = "experts"
    """Positions are sent to the ranks of their experts and back; ranks that split a sequence sum the counts of routed
    positions."""
    LOSS = "loss"
    """Ranks over which the vocabulary is sharded sum their parts of the cross entropy."""
    REDISTRIBUTION = "redistribution"
    """Activations are moved because two successive layers split them differently over the ranks."""
    PIPELINE = "pipeline"
    """Sends between pipeline stages."""
    TIED_PARAMETERS = "tied_parameters"
    """Gradients of parameters that are replicated in several layers are exchanged."""
    NORM = "norm"
    """Loss, gradient norm and stop requests are summed over all ranks."""


class Message(NamedTuple):
    """A collective or a send in which a rank takes part `times` times."""

    cause: Cause
    collective: Collective
    group_size: int
    bytes: int
    during: Pass | None
    """The pass to which the message belongs; None for the end of a step."""
    times: int = 1


def sent_through(kind: LayerType, messages: Iterable[Message]) -> Iterator[Message]:
    """Yield the messages that are sent; a layer without a backward pass has none that make gradients."""
    return (m for m in messages if kind.has_backward or m.during is None or not m.during.makes_gradients)


# Messages of expert parallelism: positions sent to their experts' ranks and back, and routing counts.
#
# The formulas assume an even load, in which each rank sends the same number of bytes to every rank; real routers may
# differ.


_COUNT_BYTES = 4
"""Bytes of the number that counts how often an expert was chosen."""
_WEIGHT_BYTES = 4
"""Bytes of the weight of an expert's result; more if elements are larger."""


def shares_experts(strategy: Strategy) -> bool:
    """Return whether experts have a separate grid of ranks."""
    return isinstance(strategy, LayerStrategy) and strategy.experts is not UNSET


def expert_messages(
    kind: LayerType,
    strategy: Strategy,
    samples: int,
    tensors: Mapping[str, BoundaryTensor],
    itemsize: int,
    microbatches: int,
) -> Iterator[Message]:
    """Yield the messages of one layer's experts in one step of micro-batches of `samples` samples.

    If ranks have parts of a sequence, the balance loss needs the counts of the whole sequence. Recomputation of the
    feed-forward part, and selective recomputation, repeat the messages of the forward pass.
    """
    if kind.experts is UNSET:
        return
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    replays = recompute.replays_experts
    passes = (Pass.FORWARD, Pass.BACKWARD) if replays else (Pass.FORWARD,)
    axes = axes_of(strategy)
    here = axes.rank_samples(samples)
    apart = axes.exchanges_heads or (shares_experts(strategy) and axes.gathers_sequence)
    inside = axes.layout.sample_ranks // axes.context.size if apart else 1
    for ranks in (inside, axes.context.size):
        size = here * kind.experts.number * _COUNT_BYTES
        for during in passes if ranks > 1 else ():
            yield Message(Cause.EXPERTS, Collective.ALL_REDUCE, ranks, size, during, microbatches)
    grid = strategy.expert_grid if isinstance(strategy, LayerStrategy) else None
    if grid is not None:
        positions = rank_positions(kind, strategy, samples, tensors)
        sizes = _row_bytes(kind.experts, positions, _stream(kind, tensors).features, itemsize)
        for message in _grid_messages(axes_of(grid).dense, sizes, replays):
            yield message._replace(times=message.times * microbatches)


def rank_positions(kind: LayerType, strategy: Strategy, samples: int, tensors: Mapping[str, BoundaryTensor]) -> int:
    """Return the number of positions of a micro-batch of `samples` samples that each rank sends to experts."""
    axes = axes_of(strategy)
    return axes.rank_samples(samples) * _stream(kind, tensors).sequence_length // axes.layout.sequence.size


def _stream(kind: LayerType, tensors: Mapping[str, BoundaryTensor]) -> BoundaryTensor:
    """Return the tensor that is the input and output of experts."""
    return next(tensors[region.leaves] for region in kind.regions if region.name == "mlp" and region.leaves)


class _Sizes(NamedTuple):
    """Bytes of each kind of message for one rank's positions: counts of routed rows, rows, and weights of experts."""

    counts: int
    rows: int
    weights: int


def _row_bytes(experts: Experts, positions: int, features: int, itemsize: int) -> _Sizes:
    rows = positions * experts.top_k
    return _Sizes(experts.number * _COUNT_BYTES, rows * features * itemsize, rows * max(itemsize, _WEIGHT_BYTES))


def _grid_messages(axes: ParameterAxes, sizes: _Sizes, replays: bool) -> Iterator[Message]:
    """Yield the messages of a micro-batch: rows are sent to their experts' ranks, which may be tensor-parallel groups.

    Such a group gathers the rows that all of its ranks received, and reduces and scatters the results.
    """
    if (ranks := axes.experts.size) > 1:
        for size, there, back in ((sizes.counts, 1, 0), (sizes.rows, 2, 2), (sizes.weights, 1, 1)):
            yield from _passes(Collective.ALL_TO_ALL, ranks, size, there, back + there * replays)
    if (ranks := axes.tensor.size) > 1:
        for size, back in ((sizes.counts, 0), (sizes.rows, 1), (sizes.weights, 0)):
            yield from _passes(Collective.ALL_GATHER, ranks, ranks * size, 1, back + replays)
        for size, there in ((sizes.rows, 1), (sizes.weights, 0)):
            yield from _passes(Collective.REDUCE_SCATTER, ranks, ranks * size, there, 1 + there * replays)


def _passes(collective: Collective, ranks: int, size: int, forward: int, backward: int) -> Iterator[Message]:
    """Yield messages of one size; `forward` and `backward`: their number in each pass."""
    for during, times in ((Pass.FORWARD, forward), (Pass.BACKWARD, backward)):
        if times:
            yield Message(Cause.EXPERTS, collective, ranks, size, during, times)


# Messages of context parallelism: keys and values of other ranks, and their gradients.
#
# Sources: gather, Grattafiori et al. 2024; ring, Liu et al. 2023, whose gradients follow keys and values.


class KeysAndValues(NamedTuple):
    """The sizes of keys, values and queries of one attention, for all samples of a rank under context parallelism."""

    numel: int
    """Number of elements of keys and values, for the positions of all ranks and the heads of one rank."""
    queries: int
    """Number of elements of the queries of one rank, or of the attention's result if it is larger."""
    ranks: int


def keys_and_values(
    kind: LayerType, strategy: Strategy, samples: int, tensors: Mapping[str, BoundaryTensor]
) -> tuple[KeysAndValues, ...]:
    """Return the keys and values of each attention of a layer, for micro-batches of `samples` samples.

    Empty without context parallelism. Each tensor-parallel rank has its part of the heads; Ulysses repeats key and
    value heads until its degree divides their number.
    """
    axes = axes_of(strategy)
    if not axes.shares_context:
        return ()

    def of_region(heads: Heads) -> KeysAndValues:
        ranks = axes.region.size
        count = lcm(heads.kv_heads, ranks) if axes.exchanges_heads else heads.kv_heads
        widths, parts = (heads.head_features, heads.features_of_values), axes.context.size
        of_keys, of_queries = (
            axes.rank_samples(samples) * tensors[name].sequence_length for name in (heads.keys, heads.queries)
        )
        both = of_keys * count * sum(widths) // ranks
        queries = of_queries * heads.heads * max(widths) // ranks // parts
        return KeysAndValues(both, queries, parts)

    return tuple(of_region(region.attention) for region in kind.regions if region.attention is not None)


def context_messages(
    kind: LayerType,
    strategy: Strategy,
    samples: int,
    tensors: Mapping[str, BoundaryTensor],
    compute_itemsize: int,
    reduce_itemsize: int,
    microbatches: int,
) -> Iterator[Message]:
    """Yield the messages of one layer's context parallelism in one step of micro-batches of `samples` samples.

    `gather`: keys and values are gathered again in the backward pass, or by the replay right before it, and their
    gradients are scattered. `ring` of n ranks: keys and values take n-1 steps in the forward pass and as many in the
    backward pass, plus n-1 more if attention is recomputed (not in selective recomputation, which keeps attention's
    result); their gradients take n steps.
    """
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    is_ring = isinstance(strategy, LayerStrategy) and strategy.context is ContextParallel.RING
    for numel, _, ranks in keys_and_values(kind, strategy, samples, tensors):
        size, reduced = numel * compute_itemsize, numel * reduce_itemsize
        if is_ring:
            again = 1 + (recompute.replays("attention") and recompute is not Recompute.SELECTIVE)
            steps = (
                (Pass.FORWARD, size, ranks - 1),
                (Pass.BACKWARD, size, again * (ranks - 1)),
                (Pass.BACKWARD, reduced, ranks),
            )
            sent = [
                Message(Cause.CONTEXT, Collective.P2P, 2, each // ranks, during, times * microbatches)
                for during, each, times in steps
            ]
        else:
            sent = [
                Message(Cause.CONTEXT, Collective.ALL_GATHER, ranks, size, Pass.FORWARD, microbatches),
                Message(Cause.CONTEXT, Collective.ALL_GATHER, ranks, size, Pass.BACKWARD, microbatches),
                Message(Cause.CONTEXT, Collective.REDUCE_SCATTER, ranks, reduced, Pass.BACKWARD, microbatches),
            ]
        yield from sent_through(kind, sent)


LOSS_ELEMENTS = 1 << 24
"""Number of logits that the cross entropy converts to float32 at a time."""
_REDUCTIONS = 2
"""Number of sums of the cross entropy over the ranks for each position: of the exponentials, and of the label's
logit."""
_NORM_BYTES = 3 * 8
"""Bytes of the loss, the squared gradient norm and the stop request, in float64."""


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
    """Return the bytes of the counters of positions for each expert of each layer in a step."""
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

    ZeRO cuts a dim of every parameter's tensor-parallel part into equal shards, the last ones padded. ZeRO-2 gathers
    once a step, ZeRO-3 for every forward and every backward pass (recomputation happens inside the backward pass; for
    gathers that are not needed at a chunk's ends, see `gathers_spared`). If groups of ranks hold replicas of each
    other's shards (HSDP), each shard's gradients are then summed over these replicas. Frozen parameters are gathered
    and have no gradients; if no backward pass goes through the layer, they are gathered only in the forward pass.
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

    Gradients of parameters inside a region are partial sums on every rank; the others are only if Megatron splits the
    sequence. `kind`: the parameters of one group, with all experts (`ParameterGroup.uncut`).
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
    """Yield the messages of tensor and sequence parallelism for one layer in one step.

    `samples`: of one micro-batch; under context parallelism, its ranks have only some of the positions.

    Without sequence parallelism, a region sums its output in the forward pass and the gradient of its inputs in the
    backward pass (Shoeybi et al. 2019). Megatron's gathers and scatters the sequence instead of both sums, and in the
    backward pass gathers a region's inputs again instead of keeping them (Korthikanti et al. 2022), if `regathers`.
    Ulysses exchanges queries, keys, values and the result, and their gradients (Jacobs et al. 2023); key and value
    heads are repeated until the degree divides their number.

    Recomputation repeats the forward pass's messages in the backward pass, but stops when it has all it needs: the last
    sum of what is recomputed is left out, unless `replays_sum` contains the kind. Selective recomputation keeps the
    sums and repeats none. Without a backward pass there are only the forward pass's messages.
    """
    axes = axes_of(strategy)
    kind, ranks, context = model.types[type_name], axes.region.size, axes.context.size
    experts = expert_messages(kind, strategy, samples, tensors_of(model, kind), itemsize, microbatches)
    yield from sent_through(kind, experts)
    if ranks == 1:
        return
    recompute = getattr(strategy, "recompute", Recompute.NONE)
    positions = axes.rank_samples(samples) * itemsize
    # Levels of a pyramid pass on other sizes than the embedding does: a layer's messages have the sizes of its outputs.
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
        # What is gathered in a replay stays gathered until the backward pass after it.
        crossings = [(name, *entering, replays or (axes.gathers_sequence and regathered)) for name in region.enters]
        if region.leaves is not None:
            crossings.append((region.leaves, *leaving, replays and not ends and recompute is not Recompute.SELECTIVE))
        for name, forward, backward, replayed in crossings:
            length = tensors[name].sequence_length
            # If sequences are whole, only the positions with labels enter the head's matrix, such as an image's class
            # token.
            length = min(length, kind.labels) if kind.labels and not axes.gathers_sequence else length
            size = positions * length // context * tensors[name].features
            collectives = [(Pass.FORWARD, forward), (Pass.BACKWARD, backward)]
            for during, collective in [*collectives, (Pass.BACKWARD, forward)] if replayed else collectives:
                if collective is not None and (kind.has_backward or not during.makes_gradients):
                    yield Message(Cause.TENSOR_PARALLEL, collective, ranks, size, during, microbatches)


def _has_shared_experts(kind: LayerType) -> bool:
    """Return whether some experts compute every position, with features split over tensor-parallel ranks."""
    return kind.experts is not UNSET and kind.experts.shared_features is not UNSET


def tensors_of(model: Model, kind: LayerType) -> dict[str, BoundaryTensor]:
    """Return the tensors that regions of a layer type take as input and return, by name."""
    return {tensor.name: tensor for tensor in kind.outputs or model.received_by(HEAD)}


_WHOLE_SEQUENCE: tuple[_Crossing, _Crossing] = ((None, Collective.ALL_REDUCE), (Collective.ALL_REDUCE, None))
"""Collectives (forward, backward) at the entry and at the exit of a region, if ranks hold whole sequences."""
_GATHERED_SEQUENCE: tuple[_Crossing, _Crossing] = (
    (Collective.ALL_GATHER, Collective.REDUCE_SCATTER),
    (Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
)
"""Collectives (forward, backward) at the entry and at the exit, if ranks hold parts of the sequence."""


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

    They are sent in float32, or a wider compute format.
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
    """Yield a rank's messages in a step when tensors change layout: an uneven all_to_all for each, and one back.

    If the tensors have no gradient (`backward` is False), there is none back. A rank that exchanges nothing with others
    takes part in none. Recomputation does not repeat these messages: the layer's input is kept as it arrived.
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
    """Yield a message to each rank of a neighbouring pipeline stage that needs a piece of a tensor."""
    me, itemsize = plan.stages[stage].ranks.index(rank), ITEMSIZE[plan.precision.compute]
    for cut in sending_cuts(plan):
        for during, (sender, _), _ in cut.ways(needs_gradient(plan, *cut.target)):
            for tensor in cut.tensors if sender == stage else ():
                for transfer in cut.transfers(during, plan.microbatch_samples, tensor.sequence_length):
                    if transfer.source == me:
                        size = transfer.piece.tokens * tensor.features * itemsize
                        yield Message(Cause.PIPELINE, Collective.P2P, 2, size, during, plan.num_microbatches)


def _partial_sums(plan: Plan, rank: int, stage: int) -> Iterator[Message]:
    """Yield the sums of replicated parameters' gradients, a message for each tensor axis of the stage's layers."""
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
    """Return the number of elements of tensor-parallel parts after padding to `ranks` equal shards."""
    return ranks * sum(parameter.shard_numel(parts, ranks) for parameter in parameters)


# Buckets of gradients of a replicated layer that are summed in one message.


GRADIENT_BUCKET_BYTES = 25 * 2**20
"""Size limit of gradients that are reduced in one message, the same as in PyTorch's DistributedDataParallel (Li et al.
2020).

Large enough for full bandwidth, and not larger, because the gradients of a bucket are copied together.
"""


def gradient_buckets(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the range of gradients in each bucket, in order; `sizes`: bytes of each gradient.

    A gradient of at least a bucket's size gets a bucket of its own.
    """
    start = held = 0
    for number, size in enumerate(sizes):
        if number > start and held + size > GRADIENT_BUCKET_BYTES:
            yield range(start, number)
            start, held = number, 0
        held += size
    if start < len(sizes):
        yield range(start, len(sizes))


def copied_bucket_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of the largest copy that filling buckets needs; a gradient alone in its bucket is not copied."""
    copied = (sum(sizes[i] for i in bucket) for bucket in gradient_buckets(sizes) if len(bucket) > 1)
    return max(copied, default=0)
