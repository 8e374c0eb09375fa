"""Costs of a layer's parameters, independent of the micro-batch: memory, and data parallelism's collectives.

Memory is counted as this project's runtime holds it, mostly by FSDP2, or as another runtime does (`Held`).

P: parameters of a rank's share of a layer before ZeRO (under Ulysses the whole layer); for gradients, optimizer states
and reductions, only the trained ones. w: the number of ranks over which data parallelism shards them (a shard group).
s, c, r: bytes of a number as stored, computed with and reduced. P/w is rounded up to FSDP2's shards.
"""

from collections.abc import Sequence
from math import ceil, nan
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from shardwright.estimate.held import OURS, Held
from shardwright.io import BadInput
from shardwright.io.table import Source
from shardwright.optimizers.registry import ADAMW, Optimizer, returned_bytes, shards_of, update_flops, workspace_bytes
from shardwright.plan.axes import Axis, ParameterAxes, axes_of
from shardwright.plan.communication import (
    Cause,
    Message,
    copied_bucket_bytes,
    parameter_messages,
    partial_gradient_bytes,
)
from shardwright.plan.layout import ParameterGroup
from shardwright.plan.offload import copied_bytes
from shardwright.types.hardware_profile import Collective, GroupKind
from shardwright.types.model import EMBEDDING, HEAD, LayerType, Model, Parameter
from shardwright.types.model_profile import StateRow
from shardwright.types.plan import BASE_BITS, FP8, ITEMSIZE, NARROW_BITS, Precision
from shardwright.types.strategy import DataParallel, ExpertGrid, Strategy
from shardwright_search.cost_model.collectives import (
    DataGroupKinds,
    Duration,
    Slowdowns,
    StageTopology,
    axis_group_kinds,
    collective_time,
    data_group_kinds,
    in_turn,
    largest_slowdowns,
    longest,
    overlapped_time,
    slowdowns_of,
)
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.step.pareto import Numbers

_ORDERS = 2
"""Copies of a matrix in FP8 or NVFP4: one as the forward pass's matrix products read it, one for the backward pass."""


class HostRates(NamedTuple):
    """Rates of a device's host, while it works for all devices of its node."""

    bytes_per_s: float
    """Bytes copied per second, one way."""
    overlaps: bool
    """Whether copies of states overlap with computation, as between a GPU and its host."""
    updates_per_s: float | None = None
    """Parameters that the host updates per second; None: the device updates them."""


class ParameterMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer's parameters on one rank."""

    parameters: int
    """Parameters as stored: sP under DDP, sP/w when sharded."""
    gathered_parameters: int
    """Compute copies that stay for the whole step: cP under ZeRO-2 and DDP, unless the stored ones are used directly.

    Copies in FP8 or NVFP4 come on top if the runtime keeps them in addition to the parameters.

    Under ZeRO-3 only the model's first layer has any: its gather buffer, which FSDP2 keeps until the next gather.
    """
    gradients: int
    """Gradients of a backward pass: rP under DDP and while several microbatches are summed up; sP/w when sharded.

    In the last backward pass reduced gradients take the place of unreduced ones layer by layer. If every microbatch is
    reduced, the reduction's buffer of a sharded first layer, rP, is kept until the next microbatch's first reduction.
    Replicas of shards keep what they have summed, rP/w, until the backward pass is over; if both formats are the same,
    that is the gradient itself.
    """
    gradient_buffer: int = 0
    """Gradients of runtimes that hold all of them, unsharded, for the whole step: rP, and cP in addition to a wider r.

    Then there are no `gradients`, `gradient_sums`, buffers of reductions and `unreduced_gradients`.
    """
    gradient_sums: int
    """Accumulated gradients of earlier microbatches on replicas that reduce every microbatch: sP.

    The gradients that the last microbatch made are being reduced until the next backward pass of the stage begins.
    """
    optimizer: int
    """The optimizer's states of the shard."""
    host: int = 0
    """The optimizer's states in host memory, if the layer is offloaded, and parameters that the host updates."""
    buffers: int
    """FSDP2's buffers for a layer's collectives while the layer runs: 2cP for gathers under ZeRO-3, rP for reductions.

    If an update of whole matrices, or copies of offloaded states, take more memory after the passes, that counts.

    There are two gather buffers because the parameters of the next layer are gathered while a layer runs; experts that
    are sharded over ranks are gathered one layer at a time: cP. The reduction buffer of the layer before, here taken to
    be as large, is kept until the layer's own is ready. If the reduction is deferred, the buffer takes the place of
    gradients that are already counted, and only the result, sP/w, comes on top.
    """
    unreduced_gradients: int
    """rP that a sharded layer makes in its backward pass and reduces after it, unless the reduction is deferred.

    They grow while the workspace of the pass shrinks: the larger of both counts. For a replicated layer, the largest
    bucket that its gradients are copied to.
    """

    @property
    def all_step_bytes(self) -> int:
        """Return the bytes allocated all step long; other gradients are allocated by the first backward pass."""
        return self.parameters + self.gathered_parameters + self.optimizer + self.gradient_buffer


def parameter_memory(
    kind: LayerType,
    strategy: Strategy,
    precision: Precision,
    optimizer: Optimizer = ADAMW,
    *,
    deferred: bool,
    reduce_every_microbatch: bool = False,
    is_first_layer: bool = False,
    held: Held = OURS,
    offloaded: bool = False,
    streams: bool = False,
) -> ParameterMemory:
    """Return the memory of one layer's parameters on one rank.

    `deferred`: several microbatches are summed up before the reduction; `reduce_every_microbatch`: they are reduced one
    by one. With a single microbatch neither is true. `offloaded`: the optimizer states are in host memory; `streams`:
    and are copied to the device for the update.
    """
    axes, ddp = axes_of(strategy).dense, strategy.data_parallel is DataParallel.DDP
    computed = _computed_bytes(kind, precision, axes)
    trained_count = kind.trained_count(axes.tensor.size)
    full_bytes = ITEMSIZE[precision.reduce] * trained_count
    trained = _shard_numel(kind.trained_parameters, axes)
    shard_bytes = ITEMSIZE[precision.parameters] * trained
    copies = 1 if isinstance(strategy, ExpertGrid) else 2
    one_format = precision.parameters == precision.compute == precision.reduce
    without_fsdp = (ddp or axes.states.size == 1) and one_format
    replicated = ddp and axes.states.size > 1
    zero3, fsdp = strategy.data_parallel is DataParallel.ZERO3, not (replicated or without_fsdp)
    summed = (
        ITEMSIZE[precision.reduce] * trained * bool(axes.replicates_shards and precision.reduce != precision.parameters)
    )
    gradients = shard_bytes + summed + full_bytes * (reduce_every_microbatch and is_first_layer)
    if replicated or deferred or without_fsdp:
        gradients = full_bytes
    shards = shards_of(kind, axes.tensor.size, axes.shards)
    states = optimizer.held_bytes(shards, precision.parameters)
    memory = ParameterMemory(
        parameters=_stored_bytes(kind, precision, axes),
        gathered_parameters=0 if without_fsdp or (zero3 and not is_first_layer) else computed,
        gradients=gradients,
        gradient_buffer=0,
        gradient_sums=shard_bytes * (replicated and reduce_every_microbatch),
        optimizer=0 if offloaded else states,
        host=(states + shard_bytes * (not streams)) if offloaded else 0,
        buffers=fsdp * (copies * computed * zero3 + (shard_bytes if deferred else full_bytes)),
        unreduced_gradients=_bucket_bytes(kind, axes.tensor.size, precision)
        if replicated
        else full_bytes * (fsdp and not deferred),
    )
    whole = workspace_bytes(kind.parameters, axes.replicas) if optimizer.whole_matrices else 0
    if streams:
        whole = copied_bytes(optimizer.held_bytes([each], precision.parameters) for each in shards)
    memory = msgspec.structs.replace(memory, buffers=max(memory.buffers, whole))
    if quantized := _quantized(kind, precision):
        largest = max(p.numel(axes.tensor.size) for p in quantized)
        memory = msgspec.structs.replace(memory, buffers=memory.buffers + ITEMSIZE[precision.compute] * largest)
    if held.narrow_parameters and precision.compute in NARROW_BITS and replicated:
        matrices = sum(p.numel(axes.tensor.size) for p in _products(kind))
        copies = _ORDERS * ceil(matrices * NARROW_BITS[precision.compute] / 8)
        memory = msgspec.structs.replace(memory, gathered_parameters=memory.gathered_parameters + copies)
    if not held.whole_gradients or zero3:
        return memory
    copies = held.compute_gradients and axes.states.size > 1
    copied = ITEMSIZE[precision.compute] * trained_count if copies and precision.reduce != precision.compute else 0
    none = dict.fromkeys(("gradients", "gradient_sums", "unreduced_gradients"), 0)
    return msgspec.structs.replace(memory, gradient_buffer=full_bytes + copied, buffers=whole, **none)


def _products(kind: LayerType) -> list[Parameter]:
    """Return the matrices of a block that are rounded for matrix products in FP8 or NVFP4."""
    return [p for p in kind.parameters if len(p.shape) > 1 and not p.is_buffer]


def _narrowed(message: Message, kind: LayerType, parts: int, bits: float) -> Message:
    """Return a gather of parameters with its matrices sent in `bits` bits per element, instead of 16."""
    products, whole = sum(p.numel(parts) for p in _products(kind)), kind.parameter_count(parts)
    # Whole numbers, in half bits: products with this many bytes are no longer exact as floats.
    spared = message.bytes * products * int(2 * (16 - bits)) // (32 * whole)
    return message._replace(bytes=message.bytes - spared)


def _quantized(kind: LayerType, precision: Precision) -> list[Parameter]:
    """Return the frozen matrices of a layer that are quantized, if the plan quantizes them."""
    frozen = (p for p in kind.parameters if not p.trained and len(p.shape) > 1)
    return [] if precision.base is UNSET else list(frozen)


def _stored_bytes(kind: LayerType, precision: Precision, axes: ParameterAxes) -> int:
    few = _quantized(kind, precision)
    numel = _shard_numel([p for p in kind.parameters if p not in few], axes)
    return ITEMSIZE[precision.parameters] * numel + _few_bits(_shard_numel(few, axes), precision)


def _computed_bytes(kind: LayerType, precision: Precision, axes: ParameterAxes) -> int:
    """Return the bytes of a layer's parameters as they are computed with; quantized ones as they are stored."""
    few = sum(p.numel(axes.tensor.size) for p in _quantized(kind, precision))
    return ITEMSIZE[precision.compute] * (kind.parameter_count(axes.tensor.size) - few) + _few_bits(few, precision)


def _few_bits(numel: int, precision: Precision) -> int:
    return 0 if precision.base is UNSET else ceil(numel * BASE_BITS[precision.base] / 8)


def _bucket_bytes(kind: LayerType, parts: int, precision: Precision) -> int:
    return copied_bucket_bytes([ITEMSIZE[precision.reduce] * p.numel(parts) for p in kind.trained_parameters])


def _shard_numel(parameters: Sequence[Parameter], axes: ParameterAxes) -> int:
    """Return the numbers in parameters' largest shard: FSDP2 cuts a dim of each evenly, rounded up."""
    return sum(parameter.shard_numel(axes.tensor.size, axes.shards) for parameter in parameters)


class Overlapped(NamedTuple):
    """A collective of data parallelism that overlaps with a pass."""

    alone: Duration
    slowdowns: Slowdowns | None = None
    """Slowdowns of the pass and the collective; None if they do not overlap."""
    overhead_s: float = 0.0
    """Time of a probe beyond the time of its messages, such as copies and waiting; it overlaps with nothing."""

    def overlapped_s(self, compute_s: float) -> float:
        """Return the time that the messages add to a pass of this duration."""
        return overlapped_time(compute_s, self.alone, self.slowdowns)

    def added_s(self, compute_s: float) -> float:
        """Return the time added to a pass of this duration, including overhead."""
        return self.overlapped_s(compute_s) + self.overhead_s

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        """Return this collective's numbers, in the order of `AllOverlapped`'s fields."""
        return self.alone.time_s, *(self.slowdowns or (nan, nan)), self.overhead_s


class AllOverlapped(NamedTuple):
    """Arrays of many `Overlapped` collectives; NaN slowdowns: no overlap."""

    alone_s: Numbers
    slow_compute: Numbers
    slow_collective: Numbers
    overhead_s: Numbers

    def added_s(self, compute_s: Numbers) -> Numbers:
        """Return the time that each adds to its pass, including overhead; vectorized `overlapped_time`."""
        alone_s, slow_compute, slow_collective, overhead_s = self
        hidden_s = alone_s * slow_collective * (1 - 1 / slow_compute)
        longer_s = compute_s * slow_compute + alone_s - compute_s * slow_compute / slow_collective - compute_s
        both_s = np.where(alone_s * slow_collective <= compute_s * slow_compute, hidden_s, longer_s)
        return np.asarray(np.where(np.isnan(slow_compute) | (alone_s == 0), alone_s, both_s) + overhead_s)


class ParameterCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the parameters of one layer on one rank; times in seconds."""

    memory: ParameterMemory
    gather: Overlapped
    """Gather of ZeRO's parameters: ZeRO-3's in each pass, ZeRO-2's once a step."""
    reduction: Overlapped
    partial_sum_s: float
    """Once a step: summing gradients of replicated parameters over the tensor-parallel group."""
    optimizer_s: float
    copies_s: float
    """Copies for the update that overlap with a forward pass."""


def parameter_costs(
    profiles: Profiles,
    model: Model,
    precision: Precision,
    optimizer: Optimizer,
    reduces_every: bool,
    type_name: str,
    group: ParameterGroup,
    topology: StageTopology,
    states: StateRow,
    single_microbatch: bool,
    host: HostRates | None = None,
) -> ParameterCosts:
    """Return the costs on one rank of a group of a layer's parameters.

    `states`: the profiled times of all parameters of the layer. `host`: rates of the host in whose memory the optimizer
    states are; None: they stay on the device. If the device updates, states are copied to it and then back, overlapped
    with a forward pass before the layer's next one. If the host updates, gradients are copied to it and then parameters
    back, overlapped with nothing.
    """
    kind, strategy = group
    axes, states = axes_of(strategy).dense, _share_of_states(states, model.types[type_name], group)
    optimizer = optimizer.at_ends if type_name in (EMBEDDING, HEAD) else optimizer
    sizes, count = (ITEMSIZE[precision.compute], ITEMSIZE[precision.reduce]), 1 if single_microbatch else 2
    groups, zero3 = data_group_kinds(topology, axes), strategy.data_parallel is DataParallel.ZERO3
    messages = list(parameter_messages(kind, strategy, *sizes, count, reduces_every))
    given = profiles, states, axes.shards, groups
    # One gather stands for the gathers of all passes.
    gathers = [m for m in messages if m.cause is Cause.PARAMETERS][:1]
    held = profiles.held
    if type_name in (EMBEDDING, HEAD):
        # Their matrix products are in the compute format's 16 bits.
        held = msgspec.structs.replace(held, narrow_parameters=False)
    bits = NARROW_BITS.get(precision.compute) if held.narrow_parameters else None
    if bits is not None and (zero3 or precision.compute != FP8 or not profiles.in_mxfp8):
        # Both orders of MXFP8 are needed for a step, and are made of 16 bits then; ZeRO-3 gathers one for each pass.
        gathers = [_narrowed(m, kind, axes.tensor.size, bits) for m in gathers]
    gather = _overlapped(*given, gathers)
    if profiles.gathers_alone and not zero3:
        gather = gather._replace(slowdowns=None)
    reduction = _overlapped(*given, [m for m in messages if m.cause is Cause.GRADIENTS])
    share = optimizer.share_of_adamw(shards_of(kind, axes.tensor.size), precision)
    agreed = filter(None, map(optimizer.agreed_bytes, shards_of(kind, axes.tensor.size, axes.shards)))
    sharing = axis_group_kinds(topology, axes.tensor)
    agreed_s = sum(collective_time(profiles, Collective.ALL_REDUCE, sharing, size).time_s for size in agreed)
    whole_s = _whole_matrices_s(profiles, model, type_name, group, topology) if optimizer.whole_matrices else 0.0
    memory = parameter_memory(
        kind,
        strategy,
        # No layer at the ends of a model is in few bits.
        msgspec.structs.replace(precision, base=UNSET) if type_name in (EMBEDDING, HEAD) else precision,
        optimizer,
        deferred=not (single_microbatch or reduces_every),
        reduce_every_microbatch=reduces_every and not single_microbatch,
        is_first_layer=type_name == EMBEDDING,
        held=held,
        offloaded=host is not None,
        streams=host is not None and host.updates_per_s is None,
    )
    update_s, copied_s, copies_s = states.optimizer_s / axes.shards * share, 0.0, 0.0
    if host is not None and host.updates_per_s is not None:
        count = _shard_numel(kind.trained_parameters, axes)
        update_s = count / host.updates_per_s
        copied_s = count * (ITEMSIZE[precision.reduce] + 2 * ITEMSIZE[precision.parameters]) / host.bytes_per_s
    elif host is not None:
        both_ways_s = 2 * memory.host / host.bytes_per_s
        copied_s, copies_s = (0.0, both_ways_s) if host.overlaps else (both_ways_s, 0.0)
    return ParameterCosts(
        memory=memory,
        gather=gather,
        reduction=reduction,
        partial_sum_s=_partial_sum_s(profiles, model, precision, type_name, group, topology),
        optimizer_s=update_s + agreed_s + whole_s + copied_s,
        copies_s=copies_s,
    )


def _whole_matrices_s(
    profiles: Profiles, model: Model, type_name: str, group: ParameterGroup, topology: StageTopology
) -> float:
    """Return the time of an update of whole matrices, which are shared evenly by the ranks that hold parts of them.

    Its matrix products are taken to take as long per operation as the fastest of the layer's profiled forward passes.
    One of the ranks that hold a part sends it to its matrix's home, and all of them receive it back.
    """
    axes, parameters = axes_of(group.strategy).dense, group.kind.parameters
    all_ranks = axis_group_kinds(topology, Axis(topology.size))
    held = returned_bytes(parameters, axes.tensor.size, axes.shards)
    sent_s = sum(
        collective_time(profiles, Collective.ALL_TO_ALL, all_ranks, size).time_s
        for size in (held / axes.replicas, held)
    )
    homes = axes.tensor.size * axes.states.size
    return update_flops(parameters) / homes * s_per_flop(profiles, model, type_name) + sent_s


def s_per_flop(profiles: Profiles, model: Model, type_name: str) -> float:
    """Return the least seconds per operation in a profiled forward pass of a layer type, at any length of samples.

    Raises BadInput if no such pass was timed.
    """
    flops = model.types[type_name].forward_flops_per_sample / model.sequence_length
    timed = (
        (key, samples * key.sequence_length, forward_s)
        for key, points in profiles.layers.items()
        if key.type == type_name
        for samples, forward_s in zip(points.micro_batch_sizes, points.values[:, 0], strict=True)
    )
    found = [key.tp_size * forward_s / (flops * tokens) for key, tokens, forward_s in timed if flops and forward_s]
    if not found:
        problem = f"no forward pass of {type_name} is timed, by which products of whole matrices are priced"
        raise BadInput(profiles.model_file, problem, "take another optimizer")
    return float(min(found))


def _share_of_states(states: StateRow, whole: LayerType, group: ParameterGroup) -> StateRow:
    """Return the times of a group of parameters as a share of the times profiled for the whole layer."""
    if group.kind.parameters == whole.parameters:
        return states
    profiled = whole.parameter_count(states.tp_size)
    share = group.kind.parameter_count(axes_of(group.strategy).dense.tensor.size) / profiled
    times = ("optimizer_s", "reduction_s", "scatter_s", "gather_s")
    return msgspec.structs.replace(states, **{name: getattr(states, name) * share for name in times})


class LayerParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of all parameters of one layer on one rank, summed over groups of parameters; times in seconds."""

    memory: ParameterMemory
    gather_each: Overlapped
    """Gathers of ZeRO-3, in each pass of a microbatch."""
    gather_once: Overlapped
    """Gathers of ZeRO-2, once a step."""
    reduction: Overlapped
    partial_sum_s: float
    optimizer_s: float
    copies_s: float

    def update_s(self, forward_s: float) -> float:
        """Return the seconds of the update, with those of its copies that a forward pass does not hide."""
        return self.optimizer_s + max(0.0, self.copies_s - forward_s)


def joined_parameters(groups: Sequence[tuple[Strategy, ParameterCosts]]) -> LayerParameters:
    """Return the total costs of a layer's groups of parameters, whose messages are sent one after another."""
    costs = [each for _, each in groups]
    memory = {name: sum(getattr(c.memory, name) for c in costs) for name in ParameterMemory.__struct_fields__}
    zero3, others = (
        [each.gather for strategy, each in groups if (strategy.data_parallel is DataParallel.ZERO3) is is_zero3]
        for is_zero3 in (True, False)
    )
    return LayerParameters(
        memory=ParameterMemory(**memory),
        gather_each=_in_turn(zero3),
        gather_once=_in_turn(others),
        reduction=_in_turn([each.reduction for each in costs]),
        partial_sum_s=sum(each.partial_sum_s for each in costs),
        optimizer_s=sum(each.optimizer_s for each in costs),
        copies_s=sum(each.copies_s for each in costs),
    )


def _in_turn(collectives: Sequence[Overlapped]) -> Overlapped:
    """Return the total of consecutive collectives; those without messages do not affect slowdowns."""
    used = [each for each in collectives if each.alone.time_s or each.overhead_s]
    alone, slowdowns = in_turn(each.alone for each in used), largest_slowdowns(each.slowdowns for each in used)
    return Overlapped(alone, slowdowns, sum(each.overhead_s for each in used))


def slowest_parameters(costs: Sequence[ParameterCosts]) -> ParameterCosts:
    """Return the largest of each cost over ranks of several node types that do and hold the same."""
    if len(costs) == 1:
        return costs[0]
    return ParameterCosts(
        memory=costs[0].memory,
        gather=_slowest([each.gather for each in costs]),
        reduction=_slowest([each.reduction for each in costs]),
        partial_sum_s=max(each.partial_sum_s for each in costs),
        optimizer_s=max(each.optimizer_s for each in costs),
        copies_s=max(each.copies_s for each in costs),
    )


def _slowest(overlapped: Sequence[Overlapped]) -> Overlapped:
    alone, slowdowns, overheads_s = zip(*overlapped, strict=True)
    return Overlapped(longest(alone), largest_slowdowns(slowdowns), max(overheads_s))


def _overlapped(
    profiles: Profiles, states: StateRow, shards: int, groups: DataGroupKinds, messages: Sequence[Message]
) -> Overlapped:
    """Return the total of consecutive messages: over all ranks, or over a shard group and then its replicas.

    Their time comes from the hardware profile; the overhead that a probe measured beyond it is added.
    """
    sent = [
        (m.collective, groups.replicas if m.collective is Collective.ALL_REDUCE else groups.shards, m.bytes)
        for m in messages
    ]
    return Overlapped(
        in_turn(collective_time(profiles, *each) for each in sent),
        largest_slowdowns(slowdowns_of(profiles, *each) for each in sent),
        sum(_overhead_s(profiles, states, shards, message) for message in messages),
    )


def _overhead_s(profiles: Profiles, states: StateRow, shards: int, message: Message) -> float:
    """Return the time that a probe's collective of this kind took in excess of its message; 0 if not probed.

    Both are in the same format. Replicas of shards sum a part of what the probe summed, and take that part of its
    overhead.
    """
    sums = message.collective is Collective.ALL_REDUCE
    ranks, source = (
        (states.reduction_ranks, states.reduction_source) if sums else (states.zero_ranks, states.zero_source)
    )
    if ranks == 1 or source not in (Source.MEASURED, Source.DERIVED):
        return 0.0
    probed_s = {
        Collective.ALL_REDUCE: states.reduction_s,
        Collective.REDUCE_SCATTER: states.scatter_s,
        Collective.ALL_GATHER: states.gather_s,
    }
    parts = shards if sums else 1
    # Under ZeRO the widest data-parallel group is probed: neighbours.
    kinds = [GroupKind(ranks, ranks, not sums or states.tp_size == 1)]
    alone = collective_time(profiles, message.collective, kinds, message.bytes * parts)
    return max(0.0, probed_s[message.collective] - alone.time_s) / parts


def _partial_sum_s(
    profiles: Profiles,
    model: Model,
    precision: Precision,
    type_name: str,
    group: ParameterGroup,
    topology: StageTopology,
) -> float:
    """Return a layer's share of the time of one collective that sums partial gradients of all layers of its type."""
    kind, strategy = group
    if not (size := partial_gradient_bytes(kind, strategy, 0, ITEMSIZE[precision.parameters])):
        return 0.0
    layers = max(1, model.layers.count(type_name))
    groups = axis_group_kinds(topology, axes_of(strategy).dense.tensor)
    return collective_time(profiles, Collective.ALL_REDUCE, groups, size * layers).time_s / layers
