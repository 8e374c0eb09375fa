"""The solver's numbers of pipeline stages, by the placement of their ranks on nodes.

They include the cost of tied parameters, and of parameters that layers share, by how first and last stage hold them.
"""

from functools import cache, cached_property
from itertools import product, zip_longest
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright.estimate.weight_passes import weight_pass
from shardwright.plan.axes import Axis, layout_of
from shardwright.plan.process_groups import Purpose, communicator_bytes, strategy_axes
from shardwright.types import EMBEDDING, HEAD, Strategy
from shardwright_search.cost_model.collectives import Nodes, StageTopology
from shardwright_search.cost_model.layer import CostModel, Link
from shardwright_search.cost_model.layer_cost import parts_of
from shardwright_search.cost_model.stage_costs import (
    has_shared,
    shared_cost_ps,
    tied_class,
    tied_cost_ps,
    types_with_replicas,
)
from shardwright_search.solver.configuration_bounds import CostsOf
from shardwright_search.solver.problem import DeviceGroup, Options
from shardwright_search.solver.quick_bounds import Counted, Relaxed, lean
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.space.choices import Choice, Handover, LayerChoices, Shardings
from shardwright_search.space.placements import NodeTypes, pools_of
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.pareto import Ints, Numbers


class _End(NamedTuple):
    """The node types of the first or last stage, and a strategy of its embedding or head."""

    node_types: NodeTypes
    strategy: Strategy

    @property
    def width(self) -> int:
        return layout_of(self.strategy).stage_size


class TiedParameters(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Tied parameters on a cluster; embeddings and heads form classes with equal costs of tying."""

    costs: CostModel
    stage_types: tuple[NodeTypes, ...]
    """The combinations of node types that a stage may be on, including types that the cluster does not have."""

    @cached_method
    def costs_ps(self, shardings: Shardings, pp_size: int, types: tuple[NodeTypes, NodeTypes] | None = None) -> Numbers:
        """Return the costs [classes of the embedding, of the head], including shared parameters; infinity: no plan.

        `types`: the node types of the first and the last stage, if these are given.
        """
        if not self.costs.model.has_copies and not has_shared(self.costs.model):
            return np.zeros((1, 1))
        first, last = (list(self._classes(shardings, name).values()) for name in (EMBEDDING, HEAD))
        costs_ps, there = np.full((len(first), len(last)), np.inf), {*self.costs.cluster.node_type_of_rank}
        for (i, before), (j, behind) in product(enumerate(first), enumerate(last)):
            if not there.issuperset(before.node_types + behind.node_types):
                continue
            if types is not None and types != (before.node_types, behind.node_types):
                continue
            ranks = self._ranks(before.node_types, before.width), self._ranks(behind.node_types, behind.width, True)
            if pp_size == 1 or _apart(before, behind, *ranks):
                costs_ps[i, j] = tied_cost_ps(self.costs, before.strategy, behind.strategy, *ranks)
                costs_ps[i, j] += self._shared_ps(*ranks)
        return costs_ps

    @cached_method
    def numbers(self, shardings: Shardings, name: str) -> dict[object, int]:
        """Return the number of each class of the embedding or the head."""
        return {each: number for number, each in enumerate(self._classes(shardings, name))}

    def class_of(self, node_types: NodeTypes, strategy: Strategy) -> object:
        """Return the class of a strategy: node types, and the sharding of tied parameters; None if all cost the same.

        For parameters that layers share, which the first stage sends to the last, the width counts instead.
        """
        if self.costs.model.has_copies:
            return node_types, tied_class(strategy)
        return (node_types, layout_of(strategy).stage_size) if has_shared(self.costs.model) else None

    @cached_method
    def _classes(self, shardings: Shardings, name: str) -> dict[object, _End]:
        return {
            self.class_of(types, strategy): _End(types, strategy)
            for types in self.stage_types
            for of_type in shardings.strategies.values()
            for strategy in of_type[name]
        }

    @cached_method
    def _shared_ps(self, first: tuple[int, ...], last: tuple[int, ...]) -> int:
        return shared_cost_ps(self.costs, (first, last))

    @cached_method
    def _ranks(self, node_types: NodeTypes, width: int, last: bool = False) -> tuple[int, ...]:
        """Return the ranks of a first or last stage; over several types any possible set, as all cost the same."""
        types = self.costs.cluster.node_type_of_rank
        pools = [pool[::-1] if last else pool for pool in pools_of(self.costs.cluster) if types[pool[0]] in node_types]
        in_turn = [rank for turn in zip_longest(*pools) for rank in turn if rank is not None]
        return tuple(sorted(in_turn[:width]))


def _apart(before: _End, behind: _End, first: tuple[int, ...], last: tuple[int, ...]) -> bool:
    """Return whether first and last stage can be two stages; if they span types, their exact ranks are not known."""
    if len(before.node_types) == len(behind.node_types) == 1:
        return not set(first) & set(last)
    return first != last


class SplitPasses(NamedTuple):
    """The times of the split passes of a micro-batch [strategies], without ZeRO-3's gathers."""

    forward_ps: Numbers
    backward_ps: Numbers
    weight_ps: Numbers
    gather_ps: Numbers
    """The least that a gather adds to one pass of a block, whatever it overlaps with."""
    deferred_bytes: Numbers
    """Bytes that the weight pass keeps."""


class Bounds(NamedTuple):
    """The bounds of pipelines, with their caches."""

    costs_of: CostsOf
    relaxed: Relaxed
    counted: Counted


class StagePrices(msgspec.Struct, frozen=True, dict=True, eq=False):
    """All prices computed so far on some of the node types, for any cluster of these."""

    costs: CostModel
    layers: LayerChoices
    budgets: dict[str, int]
    """Bytes of a rank by node type, without the process's own memory."""
    tied_parameters: TiedParameters

    @cached_property
    def bounds(self) -> Bounds:
        """Return the bounds that all pipelines use."""
        costs_of = cache(GroupCosts)
        return Bounds(costs_of, Relaxed(), Counted(costs_of))

    def within(self, budgets: dict[str, int]) -> "StagePrices":
        """Return the prices with other budgets and some of the node types; prices without budgets are reused."""
        if budgets.items() <= self.budgets.items():
            return self
        other = replace(self, budgets=budgets)
        for name in (
            "_options",
            "_num_groups",
            "_layouts",
            "_moves",
            "_rank_to_rank",
            "_to_other_width",
            "sends",
            "boundary",
        ):
            vars(other)[name] = getattr(self, name)
        return other

    @cached_property
    def types(self) -> tuple[str, ...]:
        """Return the model's layer types; the solver refers to them by index."""
        return tuple(dict.fromkeys((EMBEDDING, *self.costs.model.layers, HEAD)))

    @cached_method
    def device_group(
        self, choice: Choice, topology: StageTopology, single_microbatch: bool, edges: int = 0
    ) -> DeviceGroup:
        """Return the costs of every strategy on stages of this topology, with the communicators that each stage makes.

        Communicators of `edges` pipeline edges are subtracted from the budget. Those of a layer's own groups are
        counted as its workspace: a stage holds at most the workspace of one layer. That is never too much, but too
        little if layers with different groups are in a stage.
        """
        handed_on = (tensor.features for kind in self.costs.model.types.values() for tensor in kind.outputs)
        features = max(handed_on)
        buffer_bytes = (choice.buffer_tokens or 0) * features * self.costs.compute_bytes
        size, types = self.communicator_bytes(topology), self.costs.cluster.node_types
        options = (self._options(name, choice, topology, single_microbatch) for name in self.types)
        if size:
            held = (size * self._num_groups(name, choice, topology) for name in self.types)
            pairs = zip(options, held, strict=True)
            options = (each._replace(workspace_bytes=each.workspace_bytes + own) for each, own in pairs)
        return DeviceGroup(
            options=tuple(options),
            redistribution_ps=self._moves(choice.free, topology),
            budget_bytes=self.budget_bytes(topology) - buffer_bytes - communicator_bytes({Purpose.EDGE: edges}, size),
            width=topology.size,
            host_budget_bytes=min(float(types[name].host_bytes) for name in topology.type_names),
        )

    @cached_method
    def split_passes(self, choice: Choice, topology: StageTopology, single_microbatch: bool) -> tuple[SplitPasses, ...]:
        """Return the parts of every strategy's passes on stages of this topology, by type."""
        return tuple(self._split_passes(name, choice, topology, single_microbatch) for name in self.types)

    def _split_passes(self, name: str, choice: Choice, topology: StageTopology, single_microbatch: bool) -> SplitPasses:
        strategies = self.layers.shardings(choice).of_type(name, topology.size)
        if not strategies:
            return SplitPasses(*np.zeros((5, 1)))
        given = choice.samples, self.costs.precision, self.layers.request.attention
        left = [weight_pass(self.costs.model, name, strategy, *given) for strategy in strategies]
        shares, deferred = np.array(left).T
        parts = parts_of(strategies)
        forward, backward = self.costs.computed_ps(name, parts, topology, choice.samples, choice.turns)
        gathers = np.zeros_like(forward)
        if name not in (EMBEDDING, HEAD):
            gathers = self.costs.least_gather_ps(name, parts, topology, single_microbatch)
        weight = np.rint(backward * shares)
        return SplitPasses(forward, backward - weight, weight, gathers, deferred)

    @cached_method
    def lean_group(
        self, choice: Choice, topology: StageTopology, single_microbatch: bool, edges: int = 0
    ) -> DeviceGroup:
        """Return the device group, limited to the strategies that `Stages` may use."""
        whole = self.device_group(choice, topology, single_microbatch, edges)
        return replace(whole, options=tuple(map(lean, whole.options)))

    def communicator_bytes(self, topology: StageTopology) -> int:
        """Return the largest memory of a communicator on a stage's node types."""
        return max(self.costs.profiles_on(name).communicator_bytes for name in topology.type_names)

    def budget_bytes(self, topology: StageTopology) -> int:
        """Return the least budget of a stage's node types less the most that a process takes, as plans are priced."""
        if not topology.node_types:
            return self.budgets[topology.node_type]
        process = max(self.costs.profiles_on(name).process_bytes for name in topology.type_names)
        return min(map(self.with_process, topology.type_names)) - process

    def with_process(self, node_type: str) -> int:
        """Return the budget of a rank plus the memory of its process."""
        return self.budgets[node_type] + self.costs.profiles_on(node_type).process_bytes

    @cached_method
    def min_send_ps(self, choice: Choice, link: Link) -> float:
        """Return the least that a send between stages of equal width takes: the head's outputs are not sent."""
        return float(self.sends(choice, link)[:-1].min())

    @cached_method
    def fastest_ps(self, choice: Choice, topology: StageTopology) -> float:
        """Return the total time of a stage's ranks for one layer of each type, each with its fastest strategy."""
        names = dict.fromkeys(self.costs.model.layers)
        times = (float(self._options(name, choice, topology, False).time_ps.min()) for name in names)
        return topology.size * sum(times)

    @cached_method
    def _options(self, name: str, choice: Choice, topology: StageTopology, single_microbatch: bool) -> Options:
        if (own := choice.of_type(name)) != choice:
            return self._options(name, own, topology, single_microbatch)
        if choice.layers is not None:
            row = self.layers.shared_row(name, choice, topology.size)
            return self._options(name, choice.free, topology, single_microbatch).take(np.array([row]))
        shardings = self.layers.shardings(choice)
        if not (strategies := shardings.of_type(name, topology.size)):
            return Options.none(_of_width(shardings, topology.size)[0])
        given = topology, choice.samples, single_microbatch, choice.turns
        priced = self.costs.layers(name, parts_of(strategies), *given)
        return Options._make((*priced, *self._layouts(name, shardings, topology)))

    @cached_method
    def _num_groups(self, name: str, choice: Choice, topology: StageTopology) -> Numbers:
        """Return how many process groups each strategy makes [strategies]; one 0 for a type that is in no stage."""
        if (own := choice.of_type(name)) != choice:
            return self._num_groups(name, own, topology)
        replicas = name in types_with_replicas(self.costs.model)
        strategies = self.layers.shardings(choice).of_type(name, topology.size)
        meets = self.costs.optimizer.whole_matrices and topology.size > 1
        stage = {(Purpose.EXCHANGE, Axis(topology.size))} if meets else set[tuple[Purpose, Axis]]()
        return np.array([len(stage | strategy_axes(each)) + replicas for each in strategies] or [0], float)

    @cached_method
    def _layouts(self, name: str, shardings: Shardings, topology: StageTopology) -> tuple[Ints, Ints]:
        """Return the index of the input layout, and of the output layout, of each strategy of a layer type.

        For the embedding's input and the head's output, the number of the strategy's class of tied parameters instead.
        """
        strategies = shardings.of_type(name, topology.size)
        numbers = np.array([shardings.layouts.index(layout_of(strategy)) for strategy in strategies])
        if name not in (EMBEDDING, HEAD):
            return numbers, numbers
        known = self.tied_parameters.numbers(shardings, name)
        classes = np.array(
            [known[self.tied_parameters.class_of(topology.type_names, strategy)] for strategy in strategies]
        )
        return (classes, numbers) if name == EMBEDDING else (numbers, classes)

    @cached_method
    def _moves(self, choice: Choice, topology: StageTopology) -> Numbers:
        """Return times [types, layouts, layouts], forward and back together, between layouts of the stage's width."""
        one_way = self.moves_one_way(choice, topology)
        return one_way + one_way.transpose(0, 2, 1)

    @cached_method
    def moves_one_way(self, choice: Choice, topology: StageTopology) -> Numbers:
        """Return times [types, layouts, layouts] of a forward pass between layouts of the stage's width."""
        return np.array([self._moves_of(name, choice, topology) for name in self.types])

    def _moves_of(self, name: str, choice: Choice, topology: StageTopology) -> Numbers:
        """Return the redistribution times of a layer type in a forward pass [layouts, layouts]."""
        shardings = self.layers.shardings(choice)
        layouts = shardings.layouts
        one_way = np.zeros((len(layouts), len(layouts)))
        for a, b in product(_of_width(shardings, topology.size), repeat=2):
            moved = self.costs.redistribution(name, layouts[a], layouts[b], topology, choice.samples)
            one_way[a, b] = moved.time_ps
        return one_way

    def handed_over(self, choice: Choice, handover: Handover) -> Numbers:
        """Return the times of a handover, one way [types, layouts before, layouts after]; infinity: impossible."""
        if handover.link is not None:
            return self._rank_to_rank(choice.free, handover.widths[0], handover.link)
        return self._to_other_width(choice.free, handover.nodes, handover.node_types)

    @cached_method
    def _rank_to_rank(self, choice: Choice, width: int, link: Link) -> Numbers:
        """Return times between stages of equal width, whose layouts must be equal."""
        sends, alike = self.sends(choice, link), _of_width(self.layers.shardings(choice), width)
        times_ps = np.full((*sends.shape, sends.shape[1]), np.inf)
        times_ps[:, alike, alike] = sends[:, alike]
        return times_ps

    @cached_method
    def _to_other_width(self, choice: Choice, nodes: tuple[Nodes, ...], node_types: tuple[str, ...]) -> Numbers:
        """Return times between stages of different widths: from any layout to any."""
        shardings = self.layers.shardings(choice)
        layouts = shardings.layouts
        times_ps = np.full((len(self.types), len(layouts), len(layouts)), np.inf)
        ends = (_of_width(shardings, len(ranks)) for ranks in nodes)
        for (number, name), (a, b) in product(enumerate(self.types), product(*ends)):
            sent = self.costs.handover(name, layouts[a], layouts[b], nodes, node_types, choice.samples)
            times_ps[number, a, b] = sent.time_ps
        return times_ps

    @cached_method
    def sends(self, choice: Choice, link: Link) -> Numbers:
        """Return times [types, layouts] of a send from rank to rank, in one direction."""
        layouts = self.layers.shardings(choice).layouts
        sent = [[self.costs.send(n, layout, link, choice.samples).time_ps for layout in layouts] for n in self.types]
        return np.array(sent, float)

    @cached_method
    def boundary(self, choice: Choice) -> Numbers:
        """Return the bytes [types, layouts] that a rank holds of a microbatch between two stages."""
        layouts = self.layers.shardings(choice).layouts
        held = [[self.costs.boundary_bytes(n, layout, choice.samples) for layout in layouts] for n in self.types]
        return np.array(held, float)


def _of_width(shardings: Shardings, width: int) -> list[int]:
    """Return the numbers of the layouts on stages of one width."""
    return [number for number, layout in enumerate(shardings.layouts) if layout.stage_size == width]
