"""The parts of a plan's step: the costs of each layer range, and the memory of each stage."""

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from itertools import chain, pairwise
from math import prod
from operator import attrgetter, mul
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright.estimate.weight_passes import WeightPass, weight_pass
from shardwright.plan.axes import ParameterAxes, axes_of, effective, layout_of
from shardwright.plan.chunks import gathers_spared
from shardwright.plan.layout import parameter_box
from shardwright.plan.schedules.passes import Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, Model, Parameter, Plan, Strategy
from shardwright.types.hardware_profile import Collective
from shardwright_search.cost_model.collectives import (
    StageTopology,
    collective_time,
    kinds_of,
    largest_slowdowns,
    longest,
    send_kind_time,
    stage_topology,
)
from shardwright_search.cost_model.experts import placed_imbalance
from shardwright_search.cost_model.layer import Cost, CostModel, Gather, LayerCost, Turns, picoseconds
from shardwright_search.simulation.simulator import Overlap, Reduction, StageTimes
from shardwright_search.step.memory import (
    LayerMemory,
    PassCounts,
    Phase,
    StageMemory,
    frees_outputs,
    layer_memory,
    layer_passes,
    no_layers,
    pass_counts,
    phases,
)

_NOTHING = Cost(0, None)
_ESTIMATED = "estimated: the share of backward passes that weight passes take"
Layer = tuple[str, Strategy]
_OfLayer = TypeVar("_OfLayer")


class RangeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One layer range's layers, and the changes of layout between them, in picoseconds and bytes."""

    layers: tuple[LayerCost, ...]
    redistribution_forward_ps: int
    redistribution_backward_ps: int
    send_before_ps: int
    send_after_ps: int
    before_bytes: int
    """Bytes of one microbatch that a rank receives from the range before; it gives back a gradient of this size."""
    after_bytes: int
    last_output_bytes: int
    """Bytes that a rank holds of one microbatch's output of the last layer, or of the layer before the head."""
    gathered_first: tuple[float, float]
    """The share of microbatches for which a forward, or a backward, pass gathers the layer that it begins with."""
    overlap: Overlap | None
    """Slowdowns of reductions and the backward pass when they overlap; None if they were not measured."""
    weight_passes: tuple[WeightPass, ...] = ()
    """What each layer's backward pass leaves to a weight pass; empty if the schedule has none."""
    warnings: tuple[str, ...]

    @property
    def times(self) -> StageTimes:
        """Return the range's times for the simulator, in picoseconds."""
        forward = sum(self._gathered("forward_ps", 1, self.gathered_first[0])) + self.redistribution_forward_ps
        reductions = self._reductions()
        once = forward, sum(reduction.backward_ps for reduction in reductions), self.send_after_ps
        sync, optimizer = self.sum_of("sync_ps"), self.sum_of("optimizer_ps")
        if self.weight_passes:
            # A reduction that overlaps with a whole backward pass overlaps with the weight pass of a split one.
            forward, backward, send = once
            left = self.weight_ps
            return StageTimes(forward, backward - left, send, sync, optimizer, further_ps={Pass.WEIGHT: left})
        if self.overlap is None or not any(layer.reduction_ps for layer in self.layers):
            return StageTimes(*once, sync, optimizer)
        sync -= self.sum_of("overlapped_ps")
        return StageTimes(*once, sync, optimizer, reductions, overlap=self.overlap)

    @property
    def microbatch_ps(self) -> int:
        """Time of forward and backward with the sends at both ends."""
        redistribution = self.redistribution_forward_ps + self.redistribution_backward_ps
        return self.sum_of("microbatch_ps") + redistribution + self.send_before_ps + self.send_after_ps

    @property
    def weight_ps(self) -> int:
        """Time of a weight pass, which is part of the layers' backward passes."""
        passes = zip(self.layers, self.weight_passes, strict=bool(self.weight_passes))
        return sum(round(layer.backward_ps * left.share) for layer, left in passes)

    def split_backward_bytes(self) -> tuple[int, int]:
        """Return the peak bytes of a micro-batch in a split backward pass: in a later one, and in the first one.

        From the last layer on, layers free their activations and keep only what their weight passes need. Layers that
        leave nothing to weight passes make their gradients, which take additional memory in the first pass.
        """
        peaks = []
        for is_first in (False, True):
            held, most = self.before_bytes + self.sum_of("activation_bytes"), 0
            for layer, left in zip(reversed(self.layers), reversed(self.weight_passes), strict=True):
                made = layer.memory.gradients + layer.memory.gradient_sums
                held += is_first * made * (not left.deferred_bytes)
                most = max(most, held + max(layer.workspace_bytes, left.deferred_bytes - layer.activation_bytes))
                held += left.deferred_bytes - layer.activation_bytes
            peaks.append(most)
        later, first = peaks
        return later, first

    def first_weight_bytes(self) -> int:
        """Return the peak bytes of a micro-batch in the first weight pass, which makes gradients layer by layer."""
        held = most = sum(left.deferred_bytes for left in self.weight_passes)
        for layer, left in zip(reversed(self.layers), reversed(self.weight_passes), strict=True):
            if left.deferred_bytes:
                held += layer.memory.gradients + layer.memory.gradient_sums
                most = max(most, held)
                held -= left.deferred_bytes
        return most

    def sum_of(self, field: str) -> int:
        """Return the sum of one number over the layers."""
        return sum(map(attrgetter(field), self.layers))

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of all gradients, and of the sums that are stored in addition."""
        return self.sum_of("memory.gradients") + self.sum_of("memory.gradient_sums")

    def peak_bytes(self, parts: tuple[Phase, ...]) -> int:
        """Return the peak memory, without states, of a stage with only this range in some phases."""
        layers = (
            _memory_without_states(
                parts, o.memory.gradients, o.memory.gradient_sums, o.activation_bytes, o.workspace_bytes
            )
            for o in self.layers
        )
        return int(reduce(StageMemory.then, layers, no_layers(parts, self.before_bytes)).peak.max())

    def pass_bytes(self, last: int, frees: bool) -> list[int]:
        """Return the peak bytes of a micro-batch in a pass that makes no gradients, and in one that makes them.

        While the layer at the negative index `last` works, the memory of its output is free if `frees`, or the memory
        of the gradient in its place. The pass that makes gradients also counts the sums of later passes.
        """
        workspaces = [o.workspace_bytes for o in self.layers]
        if len(workspaces) >= -last:
            workspaces[last] = max(0, workspaces[last] - frees * self.last_output_bytes)
        layers = (
            layer_passes(o.memory.gradients + o.memory.gradient_sums, o.activation_bytes, workspace)
            for o, workspace in zip(self.layers, workspaces, strict=True)
        )
        received = np.full(2, float(self.before_bytes))
        return list(map(int, reduce(StageMemory.then, layers, StageMemory(received, received)).peak))

    def _gathered(self, during: str, way: int, share: float) -> list[int]:
        """Return the layers' times in a pass (`way` 1 or -1), each overlapped with the gather of the next layer.

        The layer that the pass begins with is gathered for a `share` of the microbatches. Its gather overlaps with the
        last layer of the pass before, which is taken to be this pass's last layer, if ZeRO-3 shards that; otherwise
        with nothing.
        """
        layers = self.layers[::way]
        if not any(layer.gather.alone_ps or layer.gather.overhead_ps for layer in layers):
            return [getattr(layer, during) for layer in layers]
        following = (*(layer.gather for layer in layers[1:]), Gather())
        plain = [getattr(layer, during) for layer in layers]
        times = [time + gather.added_ps(time) for time, gather in zip(plain, following, strict=True)]
        overlapped_pass_ps = plain[-1] if layers[-1].gather.alone_ps else 0
        times[0] += round(share * layers[0].gather.added_ps(overlapped_pass_ps))
        return times

    def _reductions(self) -> tuple[Reduction, ...]:
        """Return the layers' backward passes and reductions; redistribution is added to the first, which runs last."""
        times = self._gathered("backward_ps", -1, self.gathered_first[1])[::-1]
        if times:  # else the range has no layers, and redistributes nothing
            times[0] += self.redistribution_backward_ps
        layers = zip(times, self.layers, strict=True)
        return tuple(Reduction(time + layer.sync_every_ps, layer.reduction_ps) for time, layer in layers)


class StageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline stage: its layer ranges, one unless it is interleaved, and its peak memory of activations."""

    ranges: tuple[RangeCosts, ...]
    activation_bytes: int
    """The most bytes of activations held at once."""
    working_bytes: int
    """The most bytes of activations, gradients and workspace together held at once."""
    in_flight: int = 0
    """Microbatches whose activations may be in host memory at once."""

    @property
    def host_bytes(self) -> int:
        """Return the most that a rank holds in host memory."""
        return self.sum_of("memory.host") + self.in_flight * self.sum_of("host_activation_bytes")

    @property
    def microbatch_ps(self) -> int:
        """A': time of forward and backward with the sends at both ends of each range."""
        return sum(each.microbatch_ps for each in self.ranges)

    @property
    def hidden_ps(self) -> int:
        """A - C: what the pipeline hides of a micro-batch's time while it fills and drains (`ClosedForm`)."""
        return min(self.microbatch_ps, 2 * sum(each.weight_ps for each in self.ranges))

    def sum_of(self, field: str) -> int:
        """Return the sum of one number over the layers of all ranges."""
        return sum(each.sum_of(field) for each in self.ranges)


def range_costs(plan: Plan, costs: CostModel) -> list[RangeCosts]:
    """Return the costs of the layer ranges, in the order in which a micro-batch goes through them."""
    ranks = [plan.stages[stage].ranks for stage, _ in plan.way]
    ranges, samples = _layers(plan), plan.microbatch_samples
    # A range without layers hands on what it receives.
    ends = [next(layers[-1] for layers in reversed(ranges[: i + 1]) if layers) for i in range(len(ranges))]
    entered = [layers[0] if layers else ends[i - 1] for i, layers in enumerate(ranges)]
    transfers = [_NO_TRANSFER]
    for i in range(1, len(ranges)):
        transfers.append(_transfer(costs, ends[i - 1], entered[i], ranks[i - 1], ranks[i], samples))
    transfers.append(_NO_TRANSFER)
    turns, single = _turns(plan, costs), plan.num_microbatches == 1
    priced_ranges = []
    for index, layers in enumerate(ranges):
        topology = stage_topology(plan.cluster, ranks[index])
        turned = zip(layers, turns[index], strict=True)
        priced = tuple(costs.layer(name, s, topology, samples, single, each) for (name, s), each in turned)
        before = [ends[index - 1]] if transfers[index].redistributed else []
        forward, backward = _moves(costs, [*before, *layers], topology, samples)
        sent, sends = transfers[index].send, transfers[index + 1].send
        traffic = chain(*zip(forward, backward, strict=True), (sent, sends))
        warnings = [warning for layer in priced for warning in layer.warnings]
        given = samples, plan.precision, plan.attention
        left = tuple(weight_pass(plan.model, name, s, *given) for name, s in layers) if plan.schedule.splits else ()
        warnings += [_ESTIMATED] * plan.schedule.splits
        priced_ranges.append(
            RangeCosts(
                layers=priced,
                redistribution_forward_ps=sum(cost.time_ps for cost in forward),
                redistribution_backward_ps=sum(cost.time_ps for cost in backward),
                send_before_ps=sent.time_ps,
                send_after_ps=sends.time_ps,
                before_bytes=transfers[index].received_bytes,
                after_bytes=transfers[index + 1].output_bytes,
                last_output_bytes=_output_bytes(costs, layers, samples),
                gathered_first=_gathered_first(plan, index, priced),
                overlap=_overlap(priced),
                weight_passes=left,
                warnings=(*warnings, *(cost.warning for cost in traffic if cost.warning is not None)),
            )
        )
    return priced_ranges


def _output_bytes(costs: CostModel, layers: Sequence[Layer], samples: int) -> int:
    """Return the bytes of a rank's output of a range's last layer before the head; 0 for a head by itself."""
    kind, strategy = next((layer for layer in reversed(layers) if layer[0] != HEAD), (HEAD, None))
    return 0 if strategy is None else costs.boundary_bytes(kind, layout_of(strategy), samples)


def _gathered_first(plan: Plan, index: int, layers: Sequence[LayerCost]) -> tuple[float, float]:
    """Return the shares of microbatches whose forward and backward passes gather the layer that they begin with.

    `gathers_spared` counts the others.
    """
    if not (layers and (layers[0].gather.alone_ps or layers[-1].gather.alone_ps)):
        return 1.0, 1.0
    spared = gathers_spared(plan, *plan.way[index])
    both = (sum(n for (_, kind), n in spared.items() if kind is during) for during in (Pass.FORWARD, Pass.BACKWARD))
    forward, backward = (1 - count / plan.num_microbatches for count in both)
    return forward, backward


class _Transfer(NamedTuple):
    """The transfer from one layer range to the next."""

    send: Cost
    output_bytes: int
    """Bytes that a rank holds of one microbatch in the output layout."""
    received_bytes: int
    redistributed: bool
    """Whether it is received in the sender's layout, and then redistributed to the first layer's layout."""


_NO_TRANSFER = _Transfer(_NOTHING, 0, 0, False)


def _transfer(
    costs: CostModel, handed: Layer, entered: Layer, senders: Sequence[int], receivers: Sequence[int], samples: int
) -> _Transfer:
    """Return the cost of passing a micro-batch from the last layer of a range to the first layer of the next."""
    (kind, last), (_, first) = handed, entered
    layout, wanted = layout_of(last), layout_of(first)
    given = costs.boundary_bytes(kind, layout, samples)
    if senders == receivers:  # one stage hands its chunks' outputs to itself
        return _Transfer(_NOTHING, given, given, True)
    if len(senders) == len(receivers):
        return _Transfer(costs.send(kind, layout, costs.link(senders, receivers), samples), given, given, True)
    ends = costs.nodes_of(senders, receivers), costs.node_types_of(senders, receivers)
    send = costs.handover(kind, layout, wanted, *ends, samples)
    return _Transfer(send, given, costs.boundary_bytes(kind, wanted, samples), False)


def stage_costs(plan: Plan, stage: int, ranges: Sequence[RangeCosts]) -> StageCosts:
    """Return a pipeline stage's ranges, and its peak memory without parameters and optimizer states.

    While a microbatch is on its way through a range, that range's own peak comes on top of what the others hold. A
    stage with one range has the phases of the solver; with several, each range's gradients are made by its first
    backward pass.
    """
    mine = tuple(here for here, (at, _) in zip(ranges, plan.way, strict=True) if at == stage)
    kept = [here.sum_of("activation_bytes") + here.before_bytes for here in mine]
    if plan.schedule.splits:
        return _split_stage_costs(plan, stage, mine, ranges[-1])
    if len(mine) == 1:
        count = schedule_of(plan.schedule).in_flight(len(plan.stages), plan.num_microbatches, stage)
        keeps_sums = mine[0].sum_of("memory.gradient_sums") > 0
        peak = mine[0].peak_bytes(phases(count, plan.num_microbatches, keeps_sums)) + mine[0].after_bytes
        return StageCosts(ranges=mine, activation_bytes=count * kept[0], working_bytes=peak, in_flight=count)
    # The gradient that is received, the gradient that is sent, and what is received for the next pass.
    before, after = max(here.before_bytes for here in mine), max(here.after_bytes for here in mine)
    frees, last = frees_outputs(plan.model), mine[-1] is ranges[-1]
    passes = [here.pass_bytes(-2 if last and here is mine[-1] else -1, frees) for here in mine]
    freed, gradients = [frees * here.after_bytes for here in mine], [here.gradient_bytes for here in mine]
    max_activation_bytes = most = 0
    for counts in pass_counts(schedule_of(plan.schedule), len(plan.stages), plan.num_microbatches, stage, len(mine)):
        held = sum(map(mul, counts.in_flight, kept)) - sum(map(mul, counts.freed, freed))
        max_activation_bytes = max(max_activation_bytes, held + kept[counts.chunk])
        most = max(most, held + sum(map(mul, counts.made, gradients)) + passes[counts.chunk][counts.makes])
    most += before + after + max(before, after)
    return StageCosts(ranges=mine, activation_bytes=max_activation_bytes, working_bytes=most)


class _SplitRange:
    """The bytes that a layer range with split backward passes holds in each kind of pass."""

    def __init__(self, here: RangeCosts, passes: Sequence[int]) -> None:
        left = [each.deferred_bytes for each in here.weight_passes]
        made = [layer.memory.gradients + layer.memory.gradient_sums for layer in here.layers]
        self.kept, self.deferred = here.sum_of("activation_bytes") + here.before_bytes, sum(left)
        self.joint = sum(each for each, later in zip(made, left, strict=True) if not later)
        """Bytes of the gradients of layers whose backward passes are whole."""
        self.later = sum(made) - self.joint
        self.forward, self.backward = passes[0], here.split_backward_bytes()
        self.first_weight = here.first_weight_bytes()

    def working(self, counts: PassCounts, weights: bool) -> int:
        """Return the peak bytes of the pass; `weights`: whether the gradients that weight passes make already exist."""
        match counts.kind:
            case Pass.FORWARD:
                return self.forward
            case Pass.BACKWARD:
                return self.backward[counts.makes]
            case _:
                return self.deferred if weights else self.first_weight


def _split_stage_costs(plan: Plan, stage: int, mine: tuple[RangeCosts, ...], last: RangeCosts) -> StageCosts:
    """Return a stage whose backward passes are split; `last`: the range with the head.

    What backward passes leave is held until their weight passes, the first of which makes the gradients of the layers
    that leave something.
    """
    several = len(mine) > 1
    frees = several and frees_outputs(plan.model)
    passes = [here.pass_bytes(-2 if several and here is last else -1, frees) for here in mine]
    held_by = [_SplitRange(*each) for each in zip(mine, passes, strict=True)]
    freed = [frees * here.after_bytes for here in mine]
    weights = [False] * len(mine)
    max_activation_bytes = most = 0
    shape = len(plan.stages), plan.num_microbatches, stage, len(mine)
    for counts in pass_counts(schedule_of(plan.schedule), *shape):
        here = held_by[counts.chunk]
        held = sum(count * each.kept for count, each in zip(counts.in_flight, held_by, strict=True))
        held += sum(count * each.deferred for count, each in zip(counts.deferred, held_by, strict=True))
        held -= sum(map(mul, counts.freed, freed))
        there = sum(made * each.joint for made, each in zip(counts.made, held_by, strict=True))
        there += sum(done * each.later for done, each in zip(weights, held_by, strict=True))
        sent = sum(count * each.before_bytes for count, each in zip(counts.unreceived, mine, strict=True))
        own = here.deferred if counts.kind is Pass.WEIGHT else here.kept
        max_activation_bytes = max(max_activation_bytes, held + own)
        most = max(most, held + there + here.working(counts, weights[counts.chunk]) + sent)
        weights[counts.chunk] |= counts.kind is Pass.WEIGHT
    before, after = max(here.before_bytes for here in mine), max(here.after_bytes for here in mine)
    most += before + after + max(before, after)
    return StageCosts(ranges=mine, activation_bytes=max_activation_bytes, working_bytes=most)


@lru_cache(maxsize=4096)
def _memory_without_states(
    parts: tuple[Phase, ...], gradients: int, sums: int, activation: int, workspace: int
) -> LayerMemory:
    """Return a layer's memory without its states."""
    return layer_memory(parts, 0, gradients, sums, activation, workspace)


def _moves(
    costs: CostModel, chain: Sequence[Layer], topology: StageTopology, samples: int
) -> tuple[list[Cost], list[Cost]]:
    """Return the redistributions between neighbouring layers, forward and backward."""
    pairs = [(name, layout_of(here), layout_of(there)) for (name, here), (_, there) in pairwise(chain)]
    forward = [costs.redistribution(name, here, there, topology, samples) for name, here, there in pairs]
    return forward, [costs.redistribution(name, there, here, topology, samples) for name, here, there in pairs]


def _layers(plan: Plan) -> list[list[Layer]]:
    """Return type and strategy of each range's layers, in order; the embedding and the head are at the ends."""
    embedding, head = (EMBEDDING, _plain(plan.embedding)), (HEAD, _plain(plan.head))
    return _by_range(plan, embedding, [(layer.type, _plain(layer)) for layer in plan.layers], head)


def _turns(plan: Plan, costs: CostModel) -> list[list[Turns]]:
    """Return, for each layer by range, the features besides its strategy on which its time depends."""
    shape = costs.turns(len(plan.stages), plan.num_microbatches, len(plan.stages[0].layers))
    placed = (placed_imbalance(costs.profiles, plan, number) for number in range(len(plan.layers)))
    return _by_range(plan, shape, [shape if each is None else shape._replace(placed=each) for each in placed], shape)


def _by_range(plan: Plan, embedding: _OfLayer, blocks: Sequence[_OfLayer], head: _OfLayer) -> list[list[_OfLayer]]:
    """Return values of the layers by range, in the order in which a micro-batch goes through them."""
    bounds = [plan.stages[stage].layers[chunk] for stage, chunk in plan.way]
    ranges = [list(blocks[low:high]) for low, high in bounds]
    ranges[0].insert(0, embedding)
    ranges[-1].append(head)
    return ranges


def _plain(strategy: Strategy) -> Strategy:
    """Return a strategy without choices that have no effect at its sizes."""
    spelled = effective(strategy)
    return replace(strategy, **{name: getattr(spelled, name) for name in Strategy.__struct_fields__})


def _overlap(layers: Sequence[LayerCost]) -> Overlap | None:
    """Return the largest slowdowns of a range's reductions; None if there are none or one is not known."""
    slowdowns = largest_slowdowns(layer.slowdowns for layer in layers if layer.reduction_ps)
    return None if slowdowns is None else Overlap(*slowdowns)


# Time to sum the gradients of tied parameters over their replicas, once a step.


def tied_cost_ps(
    costs: CostModel, embedding: Strategy, head: Strategy, first: Sequence[int], last: Sequence[int]
) -> int:
    """Return the time to exchange the gradients of each tied parameter: one replica's gradient, and the sum back.

    `first`, `last`: the ranks of the pipeline stages with the embedding and the head. Every rank of the receiving side
    gets its own part, which the ranks of the other side send in even shares; ranks that hold the same part of both send
    nothing.
    """
    if first == last and tied_class(embedding) == tied_class(head):
        return 0
    total = 0
    for parameter in _tied(costs.model):
        for strategy, mine, others in ((embedding, first, last), (head, last, first)):
            # On the side with fewer ranks, each has more to send than a rank of the other receives, and vice versa.
            share = max(1.0, len(mine) / len(others))
            total += _sent_ps(costs, first, last, _part_bytes(costs, parameter, strategy) * share)
    return total


def _tied(model: Model) -> Iterator[Parameter]:
    """Yield the embedding's trained parameters that the head or a block shares, once for each copy.

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
    """Return how a strategy splits parameters over ranks: the cost of tied parameters depends on that."""
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
