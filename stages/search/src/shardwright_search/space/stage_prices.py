"""The solver's numbers of pipeline stages by how their ranks lie on nodes, the same on every cluster that has such."""

from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright_formats.semantics.axes import layout_of
from shardwright_formats.types import EMBEDDING, HEAD
from shardwright_search.cost_model.communication import Nodes
from shardwright_search.cost_model.layer import CostModel, Link
from shardwright_search.cost_model.topology import StageTopology
from shardwright_search.solver.configuration_bounds import CostsOf
from shardwright_search.solver.problem import DeviceGroup, Options
from shardwright_search.solver.quick_bounds import Counted, Relaxed, lean
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.space.choices import Choice, Handover, LayerChoices, Shardings
from shardwright_search.space.ties import Ties
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.pareto import Ints, Numbers


class Bounds(NamedTuple):
    """The bounds of pipelines, with what they keep."""

    costs_of: CostsOf
    relaxed: Relaxed
    counted: Counted


class StagePrices(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Everything that was priced so far, whatever the cluster, on some of the node types."""

    costs: CostModel
    layers: LayerChoices
    budgets: dict[str, int]
    """Bytes of a rank by node type, without the process's own memory."""
    ties: Ties

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds that all pipelines share."""
        costs_of = cache(GroupCosts)
        return Bounds(costs_of, Relaxed(), Counted(costs_of))

    @property
    def types(self) -> tuple[str, ...]:
        """The model's layer types; the solver knows them by number."""
        return tuple(dict.fromkeys((EMBEDDING, *self.costs.model.layers, HEAD)))

    @cached_method
    def device_group(self, choice: Choice, topology: StageTopology, single_microbatch: bool) -> DeviceGroup:
        """Return the costs of every strategy on stages of this topology."""
        features = max(tensor.features for tensor in self.costs.model.boundary)
        buffer_bytes = (choice.buffer_tokens or 0) * features * self.costs.compute_bytes
        return DeviceGroup(
            options=tuple(self._options(name, choice, topology, single_microbatch) for name in self.types),
            redistribution_ps=np.array([self._moves(name, choice, topology) for name in self.types]),
            budget_bytes=self.budget_bytes(topology) - buffer_bytes,
            width=topology.size,
        )

    @cached_method
    def lean_group(self, choice: Choice, topology: StageTopology, single_microbatch: bool) -> DeviceGroup:
        """Return the device group with the strategies alone that `Stages` may lean on."""
        whole = self.device_group(choice, topology, single_microbatch)
        return replace(whole, options=tuple(map(lean, whole.options)))

    def budget_bytes(self, topology: StageTopology) -> int:
        """Return the least budget of a stage's node types less the most that a process takes, as plans are priced."""
        if not topology.node_types:
            return self.budgets[topology.node_type]
        process = max(self.costs.profiles_on(name).process_bytes for name in topology.type_names)
        return min(map(self.with_process, topology.type_names)) - process

    def with_process(self, node_type: str) -> int:
        """Return what a rank and its process may use."""
        return self.budgets[node_type] + self.costs.profiles_on(node_type).process_bytes

    @cached_method
    def least_send_ps(self, choice: Choice, link: Link) -> float:
        """Return the least that a send between stages of equal width takes: the head's outputs are not sent."""
        return float(self.sends(choice, link)[:-1].min())

    @cached_method
    def fastest_ps(self, choice: Choice, topology: StageTopology) -> float:
        """Return all ranks' time for a layer of each type, each with the strategy that takes the least."""
        names = dict.fromkeys(self.costs.model.layers)
        times = (float(self._options(name, choice, topology, False).time_ps.min()) for name in names)
        return topology.size * sum(times)

    def _options(self, name: str, choice: Choice, topology: StageTopology, single_microbatch: bool) -> Options:
        shardings = self.layers.shardings(choice)
        if not (strategies := shardings.of_type(name, topology.size)):
            return Options.none(_of_width(shardings, topology.size)[0])
        priced = (self.costs.layer(name, s, topology, choice.samples, single_microbatch) for s in strategies)
        rows = [
            (
                *(o.microbatch_ps, o.exposed_ps, o.state_bytes, o.memory.gradients, o.memory.gradient_sums),
                *(o.activation_bytes, o.workspace_bytes),
            )
            for o in priced
        ]
        return Options._make((*np.array(rows, float).T.copy(), *self._layouts(name, shardings, topology)))

    @cached_method
    def _layouts(self, name: str, shardings: Shardings, topology: StageTopology) -> tuple[Ints, Ints]:
        """Return the numbers of the input and output layouts of each strategy, or of the classes of ties."""
        strategies = shardings.of_type(name, topology.size)
        numbers = np.array([shardings.layouts.index(layout_of(strategy)) for strategy in strategies])
        if name not in (EMBEDDING, HEAD):
            return numbers, numbers
        known = self.ties.numbers(shardings, name)
        classes = np.array([known[self.ties.class_of(topology.type_names, strategy)] for strategy in strategies])
        return (classes, numbers) if name == EMBEDDING else (numbers, classes)

    def _moves(self, name: str, choice: Choice, topology: StageTopology) -> Numbers:
        """Return times [layouts, layouts], forward and back together, between layouts of the stage's width."""
        shardings = self.layers.shardings(choice)
        layouts = shardings.layouts
        one_way = np.zeros((len(layouts), len(layouts)))
        for a, b in product(_of_width(shardings, topology.size), repeat=2):
            moved = self.costs.redistribution(name, layouts[a], layouts[b], topology, choice.samples)
            one_way[a, b] = moved.time_ps
        return one_way + one_way.T

    def handed_over(self, choice: Choice, handover: Handover) -> Numbers:
        """Return times [types, layouts given, layouts received]; infinity: it cannot be."""
        if handover.link is not None:
            return self._rank_to_rank(choice, handover.widths[0], handover.link)
        return self._to_other_width(choice, handover.nodes, handover.node_types)

    @cached_method
    def _rank_to_rank(self, choice: Choice, width: int, link: Link) -> Numbers:
        """Return times between stages of equal width: the layout that is received is the one that was given."""
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
        """Return times [types, layouts] from rank to rank, one way."""
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
