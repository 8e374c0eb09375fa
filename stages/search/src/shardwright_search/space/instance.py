"""From a configuration of the search to the solver's numbers, and from the solver's answer to a plan."""

from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright_formats.semantics.layout import Layout, layout_of
from shardwright_formats.semantics.schedule import in_flight
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.plan import PipelineStage, Plan
from shardwright_formats.types.strategy import LayerStrategy, SequenceParallel, Strategy
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.tied_weights import tie_class, tie_cost_ps
from shardwright_search.cost_model.topology import StageTopology, stage_topology
from shardwright_search.solver.branch_and_bound import Solvable
from shardwright_search.solver.cached import cached_method
from shardwright_search.solver.configuration_bounds import CostsOf
from shardwright_search.solver.pareto import Numbers
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import DeviceGroup, Options, Problem, Solution
from shardwright_search.solver.relaxed_bound import DualOf, dual_of
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.space.configurations import Configuration, shardings
from shardwright_search.space.request import SearchRequest

if TYPE_CHECKING:
    from shardwright_search.solver.interleaved import InterleavedProblem

__all__ = ["Instance", "Nothing"]

_MAX_RECENT = 6


class Nothing:
    """A configuration without any plan: some layer cannot be sharded evenly."""

    relaxed_bound_ps = lower_ps = np.inf

    def solve_below(self, *_: object) -> tuple[()]:
        """There is none."""
        return ()


class _Choice(NamedTuple):
    """What the strategies to choose from depend on."""

    stage_size: int
    samples: int
    """Of a microbatch."""
    layers: LayerStrategy | None
    buffer_tokens: int | None


class _Shardings(NamedTuple):
    """The strategies of each type, and the layouts they use."""

    strategies: tuple[tuple[Strategy, ...], ...]
    layouts: tuple[Layout, ...]


class Instance(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A request with the cost model that prices it, and all that was priced so far."""

    request: SearchRequest
    """Narrowed."""
    costs: CostModel
    budgets: dict[str, int]
    """Bytes of a rank by node type, without the process's own memory."""

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The model's layer types; the solver knows them by number."""
        return tuple(dict.fromkeys(self._names))

    @property
    def _names(self) -> tuple[str, ...]:
        """The type of every layer."""
        return EMBEDDING, *self.costs.model.layers, HEAD

    def has_plans(self, configuration: Configuration) -> bool:
        """Whether every layer of a configuration can be sharded in some way."""
        return all(self._shardings(self._choice(configuration)).strategies)

    def stage_ranks(self, pp_size: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline stage."""
        width = self.costs.cluster.num_devices // pp_size
        return tuple(tuple(range(i * width, (i + 1) * width)) for i in range(pp_size))

    @cached_property
    def solvable(self) -> Callable[[Configuration], Solvable]:
        """A configuration, ready to be bounded and solved; the last few are kept."""
        return lru_cache(_MAX_RECENT)(self._solvable)

    def _solvable(self, configuration: Configuration) -> Solvable:
        if not self.has_plans(configuration):
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
        choice, p, m = self._choice(configuration), configuration.pp_size, configuration.num_microbatches
        ranks, of_stages = self.stage_ranks(p), self._topologies(p)
        topologies = tuple(dict.fromkeys(of_stages))
        sends = np.array([self._sends(choice, self.costs.link(*pair)) for pair in pairwise(ranks)])
        shape = p - 1, len(topologies), len(topologies), len(self.types), len(self._shardings(choice).layouts)
        return Problem(
            layers=tuple(self.types.index(name) for name in self._names),
            device_groups=tuple(self._device_group(choice, topology, m == 1) for topology in topologies),
            available=tuple(of_stages.count(topology) for topology in topologies),
            allowed=tuple((topologies.index(topology),) for topology in of_stages),
            sends_ps=np.broadcast_to(sends.reshape(shape[0], 1, 1, *shape[3:]), shape),
            in_flight=tuple(in_flight(configuration.schedule, p, m, stage) for stage in range(p)),
            num_microbatches=m,
            boundary_bytes=self._boundary(choice),
            tie_ps=self._ties(choice, p),
        )

    def interleaved_problem(self, configuration: Configuration) -> "InterleavedProblem | None":
        """None where stages have different topologies, or chunks hold different types of layers."""
        from shardwright_search.solver.interleaved import InterleavedProblem
        from shardwright_search.space.in_flight import moments_in_flight

        choice, p = self._choice(configuration), configuration.pp_size
        layers, ranks, topologies = self.costs.model.layers, self.stage_ranks(p), self._topologies(p)
        share = len(layers) // (p * configuration.num_chunks)
        if len(set(topologies)) > 1 or any(
            layers[i : i + share] != layers[:share] for i in range(0, len(layers), share)
        ):
            return None
        first, second, last = (moments_in_flight(configuration, stage) for stage in (0, min(1, p - 1), p - 1))
        around = (*pairwise(ranks), (ranks[-1], ranks[0]))
        return InterleavedProblem(
            embedding=self.types.index(EMBEDDING),
            positions=tuple(self.types.index(name) for name in layers[:share]),
            head=self.types.index(HEAD),
            group=self._device_group(choice, topologies[0], configuration.num_microbatches == 1),
            pp_size=p,
            num_chunks=configuration.num_chunks,
            num_microbatches=configuration.num_microbatches,
            sends_ps=np.array([self._sends(choice, self.costs.link(*pair)) for pair in around]),
            moments_in_flight=(first, second if p > 2 else (*first, *last), last),
            boundary_bytes=self._boundary(choice),
            tie_ps=self._ties(choice, p),
        )

    def plan(self, configuration: Configuration, solution: Solution) -> Plan:
        """The plan that a solution of a configuration stands for."""
        model, request = self.costs.model, self.request
        strategies = dict(zip(self.types, self._shardings(self._choice(configuration)).strategies, strict=True))
        chosen = zip(self._names, solution.options, strict=True)
        embedding, *layers, head = (strategies[name][option] for name, option in chosen)
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
            stages=_stages(configuration, solution, self.stage_ranks(configuration.pp_size), len(model.layers)),
            embedding=embedding,
            head=head,
            layers=tuple(layer for layer in layers if isinstance(layer, LayerStrategy)),
        )

    def layer_strategies(self, configuration: Configuration) -> tuple[LayerStrategy, ...]:
        """What all layers can share: strategies that every type of layer has, told by the first type's."""
        of = dict(zip(self.types, self._shardings(self._choice(configuration)).strategies, strict=True))
        first, *others = dict.fromkeys(self.costs.model.layers)
        return tuple(
            s
            for s in of[first]
            if isinstance(s, LayerStrategy) and all(replace(s, type=other) in of[other] for other in others)
        )

    def buffer_tokens(self, configuration: Configuration) -> tuple[int, ...]:
        """The sizes that Megatron's gather buffer can have, in tokens; 0 without sequence parallelism."""
        choice = self._choice(configuration)
        every = (strategy for own in self._shardings(choice).strategies for strategy in own)
        return tuple(sorted({0, *(self._gathered_tokens(strategy, choice.samples) for strategy in every)}))

    def _choice(self, configuration: Configuration) -> _Choice:
        stage_size, samples = self.costs.cluster.num_devices // configuration.pp_size, configuration.microbatch_samples
        return _Choice(stage_size, samples, configuration.layers, configuration.buffer_tokens)

    @cached_method
    def _topologies(self, pp_size: int) -> tuple[StageTopology, ...]:
        """By pipeline stage."""
        return tuple(stage_topology(self.costs.cluster, ranks) for ranks in self.stage_ranks(pp_size))

    @cached_method
    def _shardings(self, choice: _Choice) -> _Shardings:
        found = tuple(
            tuple(s for s in self._all_shardings(name, choice.stage_size) if self._possible(s, choice, name))
            for name in self.types
        )
        return _Shardings(found, tuple(sorted({layout_of(strategy) for own in found for strategy in own})))

    @cached_method
    def _all_shardings(self, type_name: str, stage_size: int) -> tuple[Strategy, ...]:
        return shardings(self.request, self.costs.model, type_name, stage_size)

    def _possible(self, strategy: Strategy, choice: _Choice, type_name: str) -> bool:
        """Whether it shares a microbatch's samples out evenly, and is what the configuration fixes."""
        if choice.samples % strategy.dp_size:
            return False
        tokens = self._gathered_tokens(strategy, choice.samples)
        if choice.buffer_tokens is not None and tokens > choice.buffer_tokens:
            return False
        if choice.layers is None or not isinstance(strategy, LayerStrategy):
            return True
        return strategy == replace(choice.layers, type=type_name)

    def _gathered_tokens(self, strategy: Strategy, samples: int) -> int:
        """Tokens that Megatron's sequence parallelism gathers whole."""
        if strategy.sequence_parallel is not SequenceParallel.MEGATRON:
            return 0
        return samples // strategy.dp_size * self.costs.model.sequence_length

    @cached_method
    def _device_group(self, choice: _Choice, topology: StageTopology, single_microbatch: bool) -> DeviceGroup:
        strategies, layouts = self._shardings(choice)
        features = max(tensor.features for tensor in self.costs.model.boundary)
        buffer_bytes = (choice.buffer_tokens or 0) * features * self.costs.compute_bytes
        count, own = 1 if single_microbatch else 2, zip(self.types, strategies, strict=True)
        return DeviceGroup(
            options=tuple(self._options(name, found, layouts, topology, choice.samples, count) for name, found in own),
            redistribution_ps=np.array([self._moves(name, layouts, topology, choice.samples) for name in self.types]),
            budget_bytes=self.budgets[topology.node_type] - buffer_bytes,
        )

    def _options(
        self,
        name: str,
        found: Sequence[Strategy],
        layouts: Sequence[Layout],
        topology: StageTopology,
        samples: int,
        num_microbatches: int,
    ) -> Options:
        priced = (self.costs.layer(name, strategy, topology, samples, num_microbatches) for strategy in found)
        rows = [
            (o.microbatch_ps, o.exposed_ps, o.state_bytes, o.memory.gradients, o.activation_bytes, o.workspace_bytes)
            for o in priced
        ]
        numbers = np.array([layouts.index(layout_of(strategy)) for strategy in found])
        known = list(self._tie_classes(found))
        classes = np.array([known.index(tie_class(strategy)) for strategy in found] if known else [0] * len(found))
        layouts_of = classes if name == EMBEDDING else numbers, classes if name == HEAD else numbers
        return Options._make((*np.array(rows, float).T.copy(), *layouts_of))

    def _moves(self, name: str, layouts: Sequence[Layout], topology: StageTopology, samples: int) -> Numbers:
        """[layouts, layouts]: there in forward and back in backward."""
        pairs = [[self.costs.redistribution(name, a, b, topology, samples).time_ps for b in layouts] for a in layouts]
        one_way = np.array(pairs, float)
        return np.asarray(one_way + one_way.T)

    @cached_method
    def _sends(self, choice: _Choice, link: tuple[bool, bool]) -> Numbers:
        """[types, layouts]."""
        layouts = self._shardings(choice).layouts
        sent = [[self.costs.send(n, layout, link, choice.samples).time_ps for layout in layouts] for n in self.types]
        return np.array(sent, float)

    @cached_method
    def _boundary(self, choice: _Choice) -> Numbers:
        """[types, layouts]."""
        layouts = self._shardings(choice).layouts
        held = [[self.costs.boundary_bytes(n, layout, choice.samples) for layout in layouts] for n in self.types]
        return np.array(held, float)

    @cached_method
    def _ties(self, choice: _Choice, pp_size: int) -> Numbers:
        """[classes of the embedding, of the head]."""
        if not self.costs.model.tied:
            return np.zeros((1, 1))
        own = dict(zip(self.types, self._shardings(choice).strategies, strict=True))
        first, last = self._tie_classes(own[EMBEDDING]), self._tie_classes(own[HEAD])
        ends = self.stage_ranks(pp_size)[0], self.stage_ranks(pp_size)[-1]
        ties = [[tie_cost_ps(self.costs, a, b, *ends) for b in last.values()] for a in first.values()]
        return np.array(ties, float)

    def _tie_classes(self, found: Sequence[Strategy]) -> dict[object, Strategy]:
        """A strategy of each class that ties tell apart; none where nothing is tied."""
        return {tie_class(strategy): strategy for strategy in found} if self.costs.model.tied else {}


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
