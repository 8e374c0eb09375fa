"""All costs of one layer of a plan, embedding and head included, under one strategy, as exact integers.

Times are whole picoseconds and memory whole bytes, so that sums do not depend on their order and equal plans are
recognised as equal.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, product
from math import ceil, inf
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright.io import BadInput
from shardwright.key import LayerKey
from shardwright.optimizers.registry import ADAMW, Optimizer, largest_flops
from shardwright.plan.axes import Layout, axes_of, layout_of
from shardwright.plan.communication import region_messages, shares_experts
from shardwright.plan.layout import parameter_groups
from shardwright.plan.schedules.passes import Pass
from shardwright.types import HEAD, Cluster, LayerStrategy, Model, Recompute, Strategy
from shardwright.types.hardware_profile import GroupKind
from shardwright.types.model_profile import StateRow
from shardwright.types.plan import ITEMSIZE, GradientReduction, Precision
from shardwright_search.cost_model.collectives import (
    Duration,
    Nodes,
    StageTopology,
    axis_group_kinds,
    collective_time,
    handover_time,
    in_turn,
    longest,
    redistribution_time,
    send_time,
)
from shardwright_search.cost_model.compute import (
    ComputeCost,
    LossChunks,
    expert_cost,
    probed_tp_size,
    slowest_compute,
    states_of,
    with_experts,
)
from shardwright_search.cost_model.context import SharedContext, context_times, shared_layer_cost
from shardwright_search.cost_model.experts import (
    beside_other_passes,
    even_load,
    exchange_times,
    host_floor,
    imbalance_of,
    is_exchange,
)
from shardwright_search.cost_model.layer_cost import Cost as Cost
from shardwright_search.cost_model.layer_cost import Gather as Gather
from shardwright_search.cost_model.layer_cost import LayerCost as LayerCost
from shardwright_search.cost_model.layer_cost import Parts, all_picoseconds, gather_of, of_parameters, of_passes
from shardwright_search.cost_model.layer_cost import picoseconds as picoseconds
from shardwright_search.cost_model.parameters import (
    AllOverlapped,
    HostRates,
    LayerParameters,
    ParameterCosts,
    joined_parameters,
    parameter_costs,
    s_per_flop,
    slowest_parameters,
)
from shardwright_search.cost_model.profiles import Passes, Profiles, host_rate
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.pareto import Numbers


def _slower(ends: Iterable[Duration]) -> Cost:
    """Return the cost of a message, which takes as long as its slower end."""
    slower = longest(ends)
    return Cost(picoseconds(slower.time_s), slower.warning)


class Link(NamedTuple):
    """How two pipeline stages are placed relative to each other."""

    consecutive: bool
    """Whether their ranks are neighbours."""
    across_nodes: bool
    node_types: tuple[str, ...]
    """Node types of both stages; the slower one determines the time."""


class MovedActivations(NamedTuple):
    """The activations of a layer's micro-batch that go to host memory and come back for the backward pass."""

    bytes: int = 0
    bytes_per_s: float = inf
    overlaps: bool = True
    """Whether copies overlap with computation, as between a GPU and its host."""

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes on the device in the layer's own pass: its own, and as many of a neighbour being copied."""
        return 2 * self.bytes

    @property
    def copied_s(self) -> float:
        """Return the time of copying them one way."""
        return self.bytes / self.bytes_per_s

    def pass_s(self, computed_s: float) -> float:
        """Return the seconds of a pass whose computation takes `computed_s`."""
        return max(computed_s, self.copied_s) if self.overlaps else computed_s + self.copied_s


class Turns(NamedTuple):
    """The features of a plan, besides a layer's strategy, on which the time of the layer's passes depends."""

    alternate: bool = False
    """Whether a rank can compute another micro-batch's passes while a layer exchanges rows."""
    pipelined: bool = False
    """Whether the plan is a pipeline between nodes."""
    ties: bool = False
    """Whether the one stage of the plan has embedding and head, and holds what they tie once."""
    placed: float | None = None
    """Ratio of the fullest rank's rows to the mean rank's, if the layer's experts are placed; None: as for its type."""


def has_other_passes(pp_size: int, num_microbatches: int, num_chunks: int) -> bool:
    """Return whether Megatron-LM can overlap exchanges with another micro-batch: with one stage, or several chunks."""
    return num_microbatches > 1 and (pp_size == 1 or num_chunks > 1)


_LONG_PS = 10**18
"""Longer than any gather."""
PLAIN_TURNS = Turns()
"""The turns of a plan whose shape does not change the costs of its layers."""


class CostModel(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The prices of a plan's layers and messages, with all that was priced so far."""

    model: Model
    cluster: Cluster
    profiles: Profiles
    precision: Precision
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    time_model: TimeModel = TimeModel.INTERPOLATE
    optimizer: Optimizer = ADAMW
    loss_chunks: int = 1

    def on(self, cluster: Cluster) -> "CostModel":
        """Return the cost model on a subset of the nodes; prices of layers are reused."""
        other = msgspec.structs.replace(self, cluster=cluster)
        vars(other)["layer"] = self.layer
        return other

    @cached_method
    def redistribution(
        self, type_name: str, source: Layout, target: Layout, topology: StageTopology, samples: int
    ) -> Cost:
        """Return the cost of changing the outputs of a layer of a type from one layout to another, in one direction.

        The forward pass changes the layer's layout to the next layer's, the backward pass the other way round.
        """
        if source == target:
            return Cost(0, None)
        moved = source, target, samples, self.model.types[type_name].outputs, self.compute_bytes
        return _slower(redistribution_time(self.profiles_on(on.node_type), on, *moved) for on in topology.each_type)

    @cached_method
    def link(self, senders: Sequence[int], receivers: Sequence[int]) -> Link:
        """Return how two pipeline stages are placed: neighbouring ranks or not, across nodes if any pair is.

        Ranks of stages of equal width form pairs in their order; otherwise each rank is paired with each. A single rank
        that sends across nodes counts as a neighbour, because no other rank shares its node's network. A stage that
        spans node types sends across nodes, all ranks of a node at once.
        """
        nodes, types = self.cluster.domain_of_rank, self.node_types_of(senders, receivers)
        if len(types) > 1 and any(len(self.node_types_of(ranks)) > 1 for ranks in (senders, receivers)):
            return Link(False, True, types)
        alike = len(senders) == len(receivers)
        pairs = zip(senders, receivers, strict=True) if alike else product(senders, receivers)
        across = any(nodes[a] != nodes[b] for a, b in pairs)
        consecutive = receivers[0] == senders[0] + 1 or (across and len(senders) == 1)
        return Link(consecutive, across, types)

    def nodes_of(self, *stages: Sequence[int]) -> tuple[Nodes, ...]:
        """Return the nodes of several pipeline stages' ranks, numbered from the first rank's node."""
        nodes = self.cluster.domain_of_rank
        return tuple(tuple(nodes[rank] - nodes[stages[0][0]] for rank in ranks) for ranks in stages)

    def node_types_of(self, *stages: Sequence[int]) -> tuple[str, ...]:
        """Return the node types of several pipeline stages, each once, sorted by name."""
        types = self.cluster.node_type_of_rank
        return tuple(sorted({types[rank] for ranks in stages for rank in ranks}))

    def profiles_on(self, node_type: str) -> Profiles:
        """Return the profiles that a node type's layers and messages are priced with."""
        return self._profiles_by_type[node_type]

    @cached_property
    def _profiles_by_type(self) -> dict[str, Profiles]:
        names = dict.fromkeys(group.node_type for group in self.cluster.nodes)
        return {name: self.profiles.of_device(self.cluster.node_types[name].device) for name in names}

    def turns(self, pp_size: int, num_microbatches: int, num_chunks: int) -> Turns:
        """Return the properties of a plan's shape that change the costs of layers, under these profiles.

        An exchange overlaps with another micro-batch if there is one stage, or several chunks in each stage.
        """
        overlaps, floors, ties = self._shape_counts
        return Turns(
            alternate=overlaps and has_other_passes(pp_size, num_microbatches, num_chunks),
            pipelined=floors and pp_size > 1 and self.cluster.num_nodes > 1,
            ties=ties and pp_size == 1,
        )

    @cached_property
    def _shape_counts(self) -> tuple[bool, bool, bool]:
        """Return whether any profile overlaps exchanges, any has least times of pipelines, and all hold ties once.

        These are the properties of profiles that make costs depend on a plan's shape.
        """
        each = self._profiles_by_type.values()
        overlaps = any(one.exchange is not None and one.exchange.overlapped for one in each)
        ties = self.model.has_copies and all(one.held.ties for one in each)
        return overlaps, any(key.pipelined for one in each for key in one.host), ties

    @property
    def step_overhead_s(self) -> float:
        """Seconds outside the layers once a step, on the ranks where they are most, and the excess of uneven homes."""
        return max(profiles.step_overhead_s for profiles in self._profiles_by_type.values()) + self._uneven_homes_s

    @cached_property
    def _uneven_homes_s(self) -> float:
        """The seconds of the longest update of a matrix: the fullest home may exceed the mean update time by these.

        Layers are priced by the mean. This is Graham's bound of 1969 on a greedy assignment of matrices to ranks, and
        it also covers a stage with fewer matrices than ranks. For stages of one rank it is too much.
        """
        if not self.optimizer.whole_matrices or self.cluster.num_devices == 1:
            return 0.0
        longest = {name: largest_flops(self.model.types[name].parameters) for name in set(self.model.layers)}
        each = self._profiles_by_type.values()
        times = (size * s_per_flop(on, self.model, name) for name, size in longest.items() if size for on in each)
        return max(times, default=0.0)

    @cached_method
    def send(self, type_name: str, layout: Layout, link: Link, samples: int) -> Cost:
        """Return the cost of sending the outputs of a layer of a type to the next pipeline stage, in one direction."""
        outputs, shape = self.model.types[type_name].outputs, (link.consecutive, link.across_nodes)
        ends = map(self.profiles_on, link.node_types)
        return _slower(send_time(profiles, *shape, layout, samples, outputs, self.compute_bytes) for profiles in ends)

    @cached_method
    def handover(
        self,
        type_name: str,
        source: Layout,
        target: Layout,
        nodes: tuple[Nodes, ...],
        node_types: tuple[str, ...],
        samples: int,
    ) -> Cost:
        """Return the cost of sending a layer type's outputs to a pipeline stage of another width, in one direction.

        `nodes`: the nodes of both stages' ranks, as `nodes_of` returns them; `node_types`: both stages' node types.
        """
        outputs, ends = self.model.types[type_name].outputs, map(self.profiles_on, node_types)
        layouts = source, target, samples
        return _slower(handover_time(profiles, nodes, *layouts, outputs, self.compute_bytes) for profiles in ends)

    @cached_method
    def boundary_bytes(self, type_name: str, layout: Layout, samples: int) -> int:
        """Return the bytes that one rank holds of the outputs of a layer of that type for one microbatch."""
        outputs = self.model.types[type_name].outputs
        tokens = (layout.activation_shard(0, samples, t.sequence_length).tokens * t.features for t in outputs)
        return sum(tokens) * self.compute_bytes

    @property
    def compute_bytes(self) -> int:
        """Return the bytes of one number in the compute format."""
        return ITEMSIZE[self.precision.compute]

    @cached_method
    def layer(
        self,
        type_name: str,
        strategy: Strategy,
        topology: StageTopology,
        samples: int,
        single_microbatch: bool,
        turns: Turns = PLAIN_TURNS,
    ) -> LayerCost:
        """Return all costs of a layer of a type on a pipeline stage, for `samples` in a micro-batch.

        Raises BadInput if a profile has no such point.
        """
        reduces_every = self.gradient_reduction is GradientReduction.EVERY_MICROBATCH
        compute, further, least = self._passes(type_name, of_passes(strategy), topology, samples, turns)
        figures = compute.figures
        moved = self._moved(strategy, topology, figures.activation_bytes)
        forward_s = moved.pass_s(max(figures.forward_s + further[0].time_s, least[0]))
        backward_s = moved.pass_s(max(figures.backward_s + further[1].time_s, least[1]))
        tied = turns.ties and type_name == HEAD
        costs = self._all_parameters(type_name, of_parameters(strategy), topology, single_microbatch, tied)
        added = picoseconds(costs.reduction.added_s(backward_s))
        once, alone, overlapped = added, costs.reduction.alone.time_s, costs.reduction.overlapped_s(backward_s)
        if reduces_every:
            once, alone, overlapped = 0, 0.0, 0.0
        context = SharedContext(self.model, type_name, strategy, samples, self.precision)
        workspace = ceil(figures.workspace_bytes) + context.workspace_bytes + moved.workspace_bytes
        collectives = (costs.gather_each, costs.gather_once, costs.reduction)
        warnings = [compute.warning, *(d.warning for d in (*further, *(each.alone for each in collectives)))]
        return LayerCost(
            forward_ps=picoseconds(forward_s),
            backward_ps=picoseconds(backward_s),
            gather_forward_ps=picoseconds(costs.gather_each.added_s(forward_s)),
            gather_backward_ps=picoseconds(costs.gather_each.added_s(backward_s)),
            gather=gather_of(costs.gather_each),
            sync_every_ps=added - once,
            reduction_ps=picoseconds(alone),
            slowdowns=costs.reduction.slowdowns,
            overlapped_ps=picoseconds(overlapped),
            sync_ps=picoseconds(costs.partial_sum_s) + picoseconds(costs.gather_once.added_s(forward_s)) + once,
            optimizer_ps=picoseconds(costs.update_s(forward_s - moved.copied_s)),
            memory=costs.memory,
            activation_bytes=ceil(figures.activation_bytes) - moved.bytes,
            host_activation_bytes=moved.bytes,
            workspace_bytes=max(workspace, costs.memory.unreduced_gradients) + costs.memory.buffers,
            warnings=tuple(dict.fromkeys(warning for warning in warnings if warning is not None)),
        )

    def layers(
        self,
        type_name: str,
        parts: Parts,
        topology: StageTopology,
        samples: int,
        single_microbatch: bool,
        turns: Turns = PLAIN_TURNS,
    ) -> Numbers:
        """Return the solver's numbers for layers of a type under many strategies at once [9, strategies].

        In the order of the solver's `Options`, these are the numbers of `layer`: time of a microbatch, time once a
        step, state, gradients and their sums, activations, workspace, and host memory, all step long and of a
        micro-batch.
        """
        passes = self._all_passes(type_name, parts, topology, samples, turns)
        tied = turns.ties and type_name == HEAD
        own = [self._parameter_numbers(type_name, each, topology, single_microbatch, tied) for each in parts.parameters]
        forward_s, backward_s, free_s, activation, workspace, moved = passes
        columns = np.array(own).T[:, parts.parameters_of]
        each, once, reduction = (AllOverlapped(*columns[first : first + 4]) for first in (0, 4, 8))
        partial_sum_s, optimizer_s, copies_s, state, gradients, sums, unreduced, buffers, host = columns[12:]
        reduced = all_picoseconds(reduction.added_s(backward_s))
        nothing = np.zeros_like(reduced)
        reduces_every = self.gradient_reduction is GradientReduction.EVERY_MICROBATCH
        every, at_end = (reduced, nothing) if reduces_every else (nothing, reduced)
        times = forward_s, backward_s, each.added_s(forward_s), each.added_s(backward_s)
        ends = partial_sum_s, once.added_s(forward_s), optimizer_s + np.maximum(0.0, copies_s - free_s)
        return np.array(
            [
                sum(map(all_picoseconds, times)) + every,
                sum(map(all_picoseconds, ends)) + at_end,
                *(state, gradients, sums, activation),
                np.maximum(workspace, unreduced) + buffers,
                *(host, moved),
            ]
        )

    def computed_ps(
        self, type_name: str, parts: Parts, topology: StageTopology, samples: int, turns: Turns = PLAIN_TURNS
    ) -> Numbers:
        """Return the times of both passes of a micro-batch without gathers of parameters [2, strategies]."""
        return all_picoseconds(self._all_passes(type_name, parts, topology, samples, turns)[:2])

    def least_gather_ps(
        self, type_name: str, parts: Parts, topology: StageTopology, single_microbatch: bool
    ) -> Numbers:
        """Return the least picoseconds that a gather adds to one pass, whatever it overlaps with [strategies]."""
        given = topology, single_microbatch, False
        costs = (self._all_parameters(type_name, each, *given).gather_each for each in parts.parameters)
        # Linear in the computation until all of the gather is hidden, so least at either end, except for rounding.
        least = [max(0, min(map(gather_of(each).added_ps, (0, _LONG_PS))) - 1) for each in costs]
        return np.array(least, float)[parts.parameters_of]

    def _all_passes(self, type_name: str, parts: Parts, topology: StageTopology, samples: int, turns: Turns) -> Numbers:
        """Return `_pass_numbers` of many strategies [6, strategies]."""
        passes = [self._pass_numbers(type_name, each, topology, samples, turns) for each in parts.passes]
        return np.asarray(np.array(passes).T[:, parts.passes_of])

    def _pass_numbers(
        self, type_name: str, strategy: Strategy, topology: StageTopology, samples: int, turns: Turns
    ) -> tuple[float, float, float, int, int, int]:
        """Return seconds: forward pass, backward pass, and the part of the forward pass with a free link to the host.

        Then bytes: activations, workspace, and activations on the host.
        """
        compute, further, least = self._passes(type_name, strategy, topology, samples, turns)
        figures, context = compute.figures, SharedContext(self.model, type_name, strategy, samples, self.precision)
        moved = self._moved(strategy, topology, figures.activation_bytes)
        forward_s = moved.pass_s(max(figures.forward_s + further[0].time_s, least[0]))
        return (
            forward_s,
            moved.pass_s(max(figures.backward_s + further[1].time_s, least[1])),
            forward_s - moved.copied_s,
            ceil(figures.activation_bytes) - moved.bytes,
            ceil(figures.workspace_bytes) + context.workspace_bytes + moved.workspace_bytes,
            moved.bytes,
        )

    def _moved(self, strategy: Strategy, topology: StageTopology, activation_bytes: float) -> MovedActivations:
        """Return the activations of a micro-batch that a layer moves to the host and back; the slowest link counts."""
        if not (isinstance(strategy, LayerStrategy) and strategy.offloads_activations):
            return MovedActivations()
        rate = min(self._host_rate(name, "host_bytes_per_s") for name in topology.type_names)
        on_cpu = any(self.cluster.node_types[name].on_cpu for name in topology.type_names)
        return MovedActivations(ceil(activation_bytes), rate, overlaps=not on_cpu)

    def _parameter_numbers(
        self, type_name: str, strategy: Strategy, topology: StageTopology, single_microbatch: bool, tied: bool
    ) -> tuple[float, ...]:
        """Return the numbers of each collective, times once a step, and bytes."""
        costs = self._all_parameters(type_name, strategy, topology, single_microbatch, tied)
        collectives = costs.gather_each, costs.gather_once, costs.reduction
        memory = costs.memory
        return (
            *chain.from_iterable(each.numbers for each in collectives),
            *(costs.partial_sum_s, costs.optimizer_s, costs.copies_s, memory.all_step_bytes),
            *(memory.gradients, memory.gradient_sums, memory.unreduced_gradients, memory.buffers, memory.host),
        )

    @cached_method
    def _passes(
        self, type_name: str, strategy: Strategy, topology: StageTopology, samples: int, turns: Turns
    ) -> tuple[ComputeCost, list[Duration], Passes]:
        """Return the costs of a micro-batch's passes: computation, further messages, and the host's least time."""
        views, rank_samples = topology.each_type, axes_of(strategy).rank_samples(samples)
        compute = slowest_compute([self._compute(type_name, strategy, on, rank_samples, turns) for on in views])
        if type_name == HEAD and self.loss_chunks > 1:
            chunks = LossChunks(self.loss_chunks, self.model, self.precision)
            states = max((self._states(type_name, strategy, on) for on in views), key=lambda each: each.optimizer_s)
            compute = compute._replace(figures=chunks.figures(compute.figures, strategy, samples, states))
        sent = [self._traffic(type_name, strategy, on, samples, compute, turns) for on in views]
        floors = [self._host_floor(type_name, strategy, on, turns) for on in views]
        forward_s, backward_s = map(max, zip(*floors, strict=True))
        return compute, [longest(during) for during in zip(*sent, strict=True)], (forward_s, backward_s)

    def _host_floor(self, type_name: str, strategy: Strategy, topology: StageTopology, turns: Turns) -> Passes:
        profiles, experts = self.profiles_on(topology.node_type), 0
        if isinstance(strategy, LayerStrategy) and shares_experts(strategy) and strategy.expert_grid is not None:
            experts = even_load(self.model, type_name, strategy, 1)[0].experts
        return host_floor(profiles, type_name, strategy, experts, turns.pipelined)

    @cached_method
    def _all_parameters(
        self, type_name: str, strategy: Strategy, topology: StageTopology, single_microbatch: bool, tied: bool
    ) -> LayerParameters:
        """Return the costs of a layer's parameters, including experts that are sharded over ranks.

        `tied`: without the parameters that the embedding holds for the layer.
        """
        groups = []
        for number, group in enumerate(parameter_groups(self.model.types[type_name], strategy)):
            given = type_name, number, strategy
            priced = [self._parameters(*given, on, single_microbatch, tied) for on in topology.each_type]
            groups.append((group.strategy, slowest_parameters(priced)))
        return joined_parameters(groups)

    @cached_method
    def _parameters(
        self,
        type_name: str,
        number: int,
        strategy: Strategy,
        topology: StageTopology,
        single_microbatch: bool,
        tied: bool,
    ) -> ParameterCosts:
        """Return the costs of a group of a layer's parameters; they do not depend on recomputation."""
        reduces_every = self.gradient_reduction is GradientReduction.EVERY_MICROBATCH
        profiles, states = self.profiles_on(topology.node_type), self._states(type_name, strategy, topology)
        given = profiles, self.model, self.precision, self.optimizer, reduces_every
        group = parameter_groups(self.model.types[type_name], strategy)[number]
        if tied:
            copies = {p.name for p in self.model.types[type_name].copies}
            group = group.without({name for _, name in self.model.tied} | copies)
        host = None
        if isinstance(strategy, LayerStrategy) and strategy.offloads_optimizer:
            updates = self._host_rate(topology.node_type, "host_updates_per_s") if strategy.updates_on_host else None
            overlaps = not self.cluster.node_types[topology.node_type].on_cpu
            host = HostRates(self._host_rate(topology.node_type, "host_bytes_per_s"), overlaps, updates)
        return parameter_costs(*given, type_name, group, topology, states, single_microbatch, host)

    def _host_rate(self, node_type: str, name: str) -> float:
        """Return a rate of a node type's host as given, else as measured; BadInput if it is neither."""
        kind = self.cluster.node_types[node_type]
        if (rate := host_rate(kind, self.profiles_on(node_type), name)) is None:
            problem = f"node type {node_type} has no {name}, by which offload is priced"
            raise BadInput(f"cluster {self.cluster.name}", problem, "add it to the cluster file")
        return rate

    def _states(self, type_name: str, strategy: Strategy, topology: StageTopology) -> StateRow:
        """Return the profiled states of a layer's parameters, at the profiled degree that `_probed` selects."""
        tp_size = self._probed(type_name, axes_of(strategy).dense.tensor.size, topology)
        return states_of(self.profiles_on(topology.node_type), type_name, tp_size)

    def _compute(
        self, type_name: str, strategy: Strategy, topology: StageTopology, micro_batch_size: int, turns: Turns
    ) -> ComputeCost:
        """Return the cost of the layer as measured, or rounded up to a measured degree with a warning."""
        ranks, length = axes_of(strategy).region.size, self.model.sequence_length
        probed = self._probed(type_name, ranks, topology)
        key = LayerKey.from_strategy(type_name, strategy, tp_size=probed, sequence_length=length)
        if isinstance(strategy, LayerStrategy) and shares_experts(strategy):
            samples = micro_batch_size * layout_of(strategy).samples.size
            cost = self._beside_experts(topology.node_type, key, micro_batch_size, strategy, samples, turns)
        else:
            cost = self._measured(topology.node_type, key, micro_batch_size, axes_of(strategy).context.size)
        if probed == ranks:
            return cost
        rounded = f"rounded up: {type_name} tp_size {ranks}: as profiled with tp_size {probed}"
        return cost._replace(warning=f"{rounded}; {cost.warning}" if cost.warning else rounded)

    @cached_method
    def _probed(self, type_name: str, tp_size: int, topology: StageTopology) -> int:
        """Return the profiled tensor-parallel degree whose numbers are used for a degree."""
        profiled = (key.tp_size for key in self.profiles_on(topology.node_type).states if key.type == type_name)
        return probed_tp_size(profiled, tp_size, self._node_devices(topology))

    def _node_devices(self, topology: StageTopology) -> int:
        return self.cluster.domain_size(topology.node_type)

    @cached_method
    def _measured(self, node_type: str, key: LayerKey, micro_batch_size: int, parts: int) -> ComputeCost:
        return shared_layer_cost(self.profiles_on(node_type), key, micro_batch_size, parts, self.time_model)

    def _fullest(self, profiles: Profiles, type_name: str, strategy: LayerStrategy, turns: Turns) -> float:
        """Return the ratio of the fullest rank's rows to the mean rank's."""
        return imbalance_of(profiles, self.model, type_name, strategy) if turns.placed is None else turns.placed

    def _beside_experts(
        self,
        node_type: str,
        key: LayerKey,
        micro_batch_size: int,
        strategy: LayerStrategy,
        samples: int,
        turns: Turns,
    ) -> ComputeCost:
        """Return the cost of a layer with expert parallelism: the sum of its experts' cost and the remainder's."""
        profiles = self.profiles_on(node_type)
        expert_key, rows = even_load(self.model, key.type, strategy, samples)
        experts = expert_cost(profiles, expert_key, rows * self._fullest(profiles, key.type, strategy, turns))
        keys = (key, msgspec.structs.replace(key, recompute=Recompute.NONE))
        shared = micro_batch_size, axes_of(strategy).context.size, self.time_model
        rest, kept = (shared_layer_cost(profiles.beside_experts, each, *shared) for each in keys)
        replayed = kept.figures.activation_bytes - rest.figures.activation_bytes
        return with_experts(rest, replayed if strategy.recompute.replays_experts else 0.0, experts)

    def _traffic(
        self,
        type_name: str,
        strategy: Strategy,
        topology: StageTopology,
        samples: int,
        compute: ComputeCost,
        turns: Turns,
    ) -> tuple[Duration, ...]:
        """Return the time of messages that the layer's measured times do not include, in each kind of pass."""
        profiles, times = self.profiles_on(topology.node_type), []
        times.append(self._further_traffic(type_name, strategy, topology, samples))
        context = SharedContext(self.model, type_name, strategy, samples, self.precision)
        times.append(context_times(profiles, context, topology, compute.attention))
        if isinstance(strategy, LayerStrategy) and shares_experts(strategy):
            shared = strategy, topology, samples, self.compute_bytes
            fullest = self._fullest(profiles, type_name, strategy, turns)
            exchanges = exchange_times(profiles, self.model, type_name, *shared, fullest)
            overlapped = profiles.exchange is not None and profiles.exchange.overlapped
            if overlapped and turns.alternate and not strategy.recompute.replays_experts:
                exchanges = beside_other_passes(profiles, exchanges, compute.figures)
            times.append(exchanges)
        return tuple(map(in_turn, zip(*times, strict=True)))

    def _further_traffic(
        self, type_name: str, strategy: Strategy, topology: StageTopology, samples: int
    ) -> tuple[Duration, ...]:
        """Return the time by which messages of tensor and sequence parallelism exceed the profiled time, by pass.

        The layer's times include these messages as profiled: among neighbours inside one node. If there are more ranks
        than a node has, which is only possible in an estimate, a whole node's ranks were profiled in their place.
        """
        sharers = axes_of(strategy).region
        groups = axis_group_kinds(topology, sharers)
        inside = min(self._probed(type_name, sharers.size, topology), self._node_devices(topology))
        profiled = (GroupKind(inside, inside, True),)
        if sharers.size == 1 or groups == profiled:
            return (Duration(0.0),) * len(Pass)
        if not self.model.types[type_name].regions:
            absent = f"absent: what {type_name} sends among ranks that lie apart: counted as among neighbours"
            return (Duration(0.0, absent),) * len(Pass)
        longer_s: dict[Pass | None, float] = dict.fromkeys(Pass, 0.0)
        profiles = self.profiles_on(topology.node_type)
        warning = None
        for message in region_messages(self.model, type_name, strategy, samples, self.compute_bytes, 1):
            if is_exchange(message):
                continue
            here = collective_time(profiles, message.collective, groups, message.bytes)
            there = collective_time(profiles, message.collective, profiled, message.bytes)
            longer_s[message.during] += max(0.0, here.time_s - there.time_s) * message.times
            warning = warning or here.warning
        return tuple(Duration(longer_s[during], warning) for during in Pass)
