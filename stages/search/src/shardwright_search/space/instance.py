"""From a configuration of the search to the solver's numbers, and from the solver's answer to a plan."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardwright_formats.semantics.layout import layout_of
from shardwright_formats.semantics.schedule import in_flight
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import PipelineStage, Plan
from shardwright_formats.types.strategy import LayerStrategy
from shardwright_search.cost_model.communication import Nodes
from shardwright_search.cost_model.layer import CostModel, Link
from shardwright_search.cost_model.topology import StageTopology
from shardwright_search.solver.cached import cached_method
from shardwright_search.solver.configuration_bounds import CostsOf
from shardwright_search.solver.pareto import Ints, Numbers
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import Cut, DeviceGroup, Options, Problem, Solution
from shardwright_search.solver.relaxed_bound import DualOf, dual_of
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.targets import Solvable
from shardwright_search.space.choices import Choice, Choices, Handovers, Shardings
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.placements import NodeTypes
from shardwright_search.space.request import SearchRequest
from shardwright_search.space.ties import Ties

if TYPE_CHECKING:
    from shardwright_search.solver.interleaved_problem import InterleavedProblem


_MAX_RECENT = 6


class Nothing:
    """A configuration without any plan: some layer cannot be sharded evenly."""

    relaxed_bound_ps = lower_ps = np.inf

    def guess(self, *_: object) -> None:
        """There is none."""

    def solve_below(self, *_: object) -> tuple[()]:
        """There is none."""
        return ()


class Instance(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A request with the cost model that prices it, and all that was priced so far."""

    request: SearchRequest
    """Narrowed."""
    costs: CostModel
    budgets: dict[str, int]
    """Bytes of a rank by node type, without the process's own memory."""

    @cached_property
    def choices(self) -> Choices:
        """What there is to choose."""
        return Choices(self.request, self.costs)

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The model's layer types; the solver knows them by number."""
        return tuple(dict.fromkeys(self._names))

    @property
    def _names(self) -> tuple[str, ...]:
        """The type of every layer."""
        return EMBEDDING, *self.costs.model.layers, HEAD

    @cached_property
    def _ties(self) -> Ties:
        return Ties(self.costs, self.stage_types)

    @cached_property
    def stage_types(self) -> tuple[NodeTypes, ...]:
        """The node types that a stage may be on together: one, or several where stages may span them."""
        names, most = tuple(self.budgets), len(self.budgets) if self.request.span_node_types else 1
        return tuple(tuple(sorted(own)) for count in range(1, most + 1) for own in combinations(names, count))

    def stage_ranks(self, configuration: Configuration, solution: Solution) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline stage of a solution."""
        return self.choices.placed(configuration).stage_ranks(solution.device_groups)

    def node_type(self, configuration: Configuration, group: int) -> str:
        """Of a device group of the configuration's problem; of several the one of the least budget."""
        return min(self.choices.placed(configuration).topologies[group].type_names, key=self._with_process)

    @cached_property
    def solvable(self) -> Callable[[Configuration], Solvable]:
        """A configuration, ready to be bounded and solved; the last few are kept."""
        return lru_cache(_MAX_RECENT)(self.unkept_solvable)

    def unkept_solvable(self, configuration: Configuration) -> Solvable:
        """The same, made anew."""
        if not self.choices.has_plans(configuration):
            return Nothing()
        if configuration.num_chunks > 1:
            from shardwright_search.solver.interleaved import Interleaved

            problem = self.interleaved_problem(configuration)
            return Nothing() if problem is None else Interleaved(problem)
        return Pipeline(self.problem(configuration), *self._remembered)

    @cached_property
    def _remembered(self) -> tuple[CostsOf, DualOf]:
        """What the pipelines share."""
        return cache(GroupCosts), cache(dual_of)

    def problem(self, configuration: Configuration) -> Problem:
        """The numbers of a configuration of GPipe or 1F1B."""
        choice, p, m = self.choices.choice(configuration), configuration.pp_size, configuration.num_microbatches
        placed = self.choices.placed(configuration)
        weights = self._weights(choice, placed.topologies)
        return Problem(
            layers=tuple(self.types.index(name) for name in self._names),
            device_groups=tuple(
                self._device_group(choice, on, m == 1, own) for on, own in zip(placed.topologies, weights, strict=True)
            ),
            placements=placed.moves,
            sends_ps=self._handed_over(choice, self.choices.handovers(configuration)),
            in_flight=tuple(in_flight(configuration.schedule, p, m, stage) for stage in range(p)),
            num_microbatches=m,
            boundary_bytes=self._boundary(choice),
            tie_ps=self._ties.costs_ps(self.choices.shardings(choice), p, configuration.ends),
        )

    def interleaved_problem(self, configuration: Configuration) -> "InterleavedProblem | None":
        """None where stages have different topologies, or chunks hold different types of layers."""
        from shardwright_search.solver.interleaved_problem import InterleavedProblem
        from shardwright_search.space.in_flight import moments_in_flight

        choice, p = self.choices.choice(configuration), configuration.pp_size
        layers, placed = self.costs.model.layers, self.choices.placed(configuration)
        share = len(layers) // (p * configuration.num_chunks)
        if len(placed.topologies) > 1 or any(
            layers[i : i + share] != layers[:share] for i in range(0, len(layers), share)
        ):
            return None
        first, second, last = (moments_in_flight(configuration, stage) for stage in (0, min(1, p - 1), p - 1))
        ranks = placed.stage_ranks((0,) * p)
        around = (*pairwise(ranks), (ranks[-1], ranks[0]))
        return InterleavedProblem(
            embedding=self.types.index(EMBEDDING),
            positions=tuple(self.types.index(name) for name in layers[:share]),
            head=self.types.index(HEAD),
            group=self._device_group(choice, placed.topologies[0], configuration.num_microbatches == 1),
            pp_size=p,
            num_chunks=configuration.num_chunks,
            num_microbatches=configuration.num_microbatches,
            sends_ps=np.array([self._sends(choice, self.costs.link(*pair)) for pair in around]),
            moments_in_flight=(first, second if p > 2 else (*first, *last), last),
            boundary_bytes=self._boundary(choice),
            tie_ps=self._ties.costs_ps(self.choices.shardings(choice), p),
        )

    def plan(self, configuration: Configuration, solution: Solution) -> Plan:
        """The plan that a solution of a configuration stands for."""
        model, request = self.costs.model, self.request
        strategies, ranks = (
            self.choices.shardings(self.choices.choice(configuration)),
            self.stage_ranks(configuration, solution),
        )
        widths = [len(ranks[bisect_right(solution.ends, number)]) for number in range(len(self._names))]
        chosen = zip(self._names, widths, solution.options, strict=True)
        embedding, *layers, head = (strategies.of(name, width)[option] for name, width, option in chosen)
        return Plan(
            name=request.name,
            model=model,
            cluster=self.costs.cluster,
            global_batch_size=configuration.global_batch_size,
            num_microbatches=configuration.num_microbatches,
            schedule=configuration.schedule,
            gradient_reduction=request.gradient_reduction,
            precision=request.precision,
            attention=request.attention,
            compile=request.compile,
            stages=_stages(configuration, solution, ranks, len(model.layers)),
            embedding=embedding,
            head=head,
            layers=tuple(layer for layer in layers if isinstance(layer, LayerStrategy)),
        )

    @cached_method
    def _device_group(
        self, choice: Choice, topology: StageTopology, single_microbatch: bool, weight: int | None = None
    ) -> DeviceGroup:
        features = max(tensor.features for tensor in self.costs.model.boundary)
        buffer_bytes = (choice.buffer_tokens or 0) * features * self.costs.compute_bytes
        count = 1 if single_microbatch else 2
        return DeviceGroup(
            options=tuple(self._options(name, choice, topology, count) for name in self.types),
            redistribution_ps=np.array([self._moves(name, choice, topology) for name in self.types]),
            budget_bytes=self._budget_bytes(topology) - buffer_bytes,
            width=topology.size,
            weight=weight,
        )

    def _budget_bytes(self, topology: StageTopology) -> int:
        """The least budget of the stage's node types less the most that a process takes there, as plans are priced."""
        if not topology.node_types:
            return self.budgets[topology.node_type]
        process = max(self.costs.profiles_on(name).process_bytes for name in topology.type_names)
        return min(map(self._with_process, topology.type_names)) - process

    def _with_process(self, node_type: str) -> int:
        return self.budgets[node_type] + self.costs.profiles_on(node_type).process_bytes

    @cached_method
    def _weights(self, choice: Choice, topologies: tuple[StageTopology, ...]) -> tuple[int, ...]:
        """Of the ranks of a stage, each its type's speed over that of the slowest, in hundredths; of one type 1."""
        if len(self.budgets) == 1:
            return tuple(on.size for on in topologies)
        layers, times = dict.fromkeys(self.costs.model.layers), dict[str, float]()
        for on in topologies:
            if not on.node_types:
                own = on.size * float(sum(self._options(name, choice, on, 2).time_ps.min() for name in layers))
                times[on.node_type] = min(own, times.get(on.node_type, own))
        slowest = max(times.values(), default=1.0)
        speeds = {name: round(100 * slowest / times.get(name, slowest)) for name in self.budgets}
        return tuple(sum(on.ranks_on(name) * speeds[name] for name in on.type_names) for on in topologies)

    def _options(self, name: str, choice: Choice, topology: StageTopology, num_microbatches: int) -> Options:
        shardings = self.choices.shardings(choice)
        if not (found := shardings.of(name, topology.size)):
            return Options.none(next(i for i, own in enumerate(shardings.layouts) if own.stage_size == topology.size))
        priced = (self.costs.layer(name, s, topology, choice.samples, num_microbatches) for s in found)
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
        """Numbers of the input and output layouts of each strategy, or of the classes of ties."""
        found = shardings.of(name, topology.size)
        numbers = np.array([shardings.layouts.index(layout_of(strategy)) for strategy in found])
        if name not in (EMBEDDING, HEAD):
            return numbers, numbers
        known = self._ties.numbers(shardings, name)
        classes = np.array([known[self._ties.class_of(topology.type_names, strategy)] for strategy in found])
        return (classes, numbers) if name == EMBEDDING else (numbers, classes)

    def _moves(self, name: str, choice: Choice, topology: StageTopology) -> Numbers:
        """[layouts, layouts]: there in forward and back in backward, between layouts of the stage's width."""
        layouts = self.choices.shardings(choice).layouts
        own = [i for i, layout in enumerate(layouts) if layout.stage_size == topology.size]
        one_way = np.zeros((len(layouts), len(layouts)))
        for a, b in product(own, own):
            taken = self.costs.redistribution(name, layouts[a], layouts[b], topology, choice.samples)
            one_way[a, b] = taken.time_ps
        return one_way + one_way.T

    def _handed_over(self, choice: Choice, handovers: Handovers) -> dict[Cut, Numbers]:
        """[types, layouts given, layouts received] at every cut."""
        every = [
            self._rank_to_rank(choice, own.widths[0], own.link)
            if own.link is not None
            else self._to_other_width(choice, own.nodes, own.node_types)
            for own in handovers.every
        ]
        return {cut: every[number] for cut, number in handovers.number.items()}

    @cached_method
    def _rank_to_rank(self, choice: Choice, width: int, link: Link) -> Numbers:
        """What is received is what was given."""
        layouts, sends = self.choices.shardings(choice).layouts, self._sends(choice, link)
        found = np.full((*sends.shape, len(layouts)), np.inf)
        for i, layout in enumerate(layouts):
            if layout.stage_size == width:
                found[:, i, i] = sends[:, i]
        return found

    @cached_method
    def _to_other_width(self, choice: Choice, nodes: tuple[Nodes, ...], node_types: tuple[str, ...]) -> Numbers:
        """From any layout to any."""
        layouts = self.choices.shardings(choice).layouts
        found = np.full((len(self.types), len(layouts), len(layouts)), np.inf)
        given, taken = ([i for i, own in enumerate(layouts) if own.stage_size == len(ranks)] for ranks in nodes)
        for (number, name), (a, b) in product(enumerate(self.types), product(given, taken)):
            ends = layouts[a], layouts[b], nodes, node_types
            found[number, a, b] = self.costs.handover(name, *ends, choice.samples).time_ps
        return found

    @cached_method
    def _sends(self, choice: Choice, link: Link) -> Numbers:
        """[types, layouts]."""
        layouts = self.choices.shardings(choice).layouts
        sent = [[self.costs.send(n, layout, link, choice.samples).time_ps for layout in layouts] for n in self.types]
        return np.array(sent, float)

    @cached_method
    def _boundary(self, choice: Choice) -> Numbers:
        """[types, layouts]."""
        layouts = self.choices.shardings(choice).layouts
        held = [[self.costs.boundary_bytes(n, layout, choice.samples) for layout in layouts] for n in self.types]
        return np.array(held, float)


def _stages(
    configuration: Configuration, solution: Solution, ranks: Sequence[tuple[int, ...]], num_layers: int
) -> tuple[PipelineStage, ...]:
    """The layer ranges of every pipeline stage: even chunks, or as the solution cuts."""
    cuts = [0, *(end - 1 for end in solution.ends[:-1]), num_layers]
    if configuration.num_chunks > 1:
        cuts = list(range(0, num_layers + 1, num_layers // (configuration.pp_size * configuration.num_chunks)))
    ranges = list(pairwise(cuts))
    p = configuration.pp_size
    return tuple(PipelineStage(ranks=own, layers=tuple(ranges[i::p])) for i, own in enumerate(ranks))
