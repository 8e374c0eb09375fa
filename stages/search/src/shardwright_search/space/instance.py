"""From a case of the search to the solver's numbers, and from the solver's answer to a plan."""

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise

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
from shardwright_search.solver.configuration_bounds import CostsOf
from shardwright_search.solver.interleaved import Interleaved, InterleavedProblem
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import DeviceGroup, Options, Problem, Solution
from shardwright_search.solver.relaxed_bound import DualOf, dual_of
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.space.configurations import Configuration, shardings
from shardwright_search.space.in_flight import moments_in_flight
from shardwright_search.space.request import SearchRequest

__all__ = ["Instance", "Nothing"]

_MAX_RECENT = 6


class Nothing:
    """A case without any plan: some layer cannot be spread evenly."""

    relaxed_bound_ps = lower_ps = np.inf

    def solve_below(self, *_: object) -> tuple[()]:
        """There is none."""
        return ()


class _Shardings(msgspec.Struct, frozen=True, eq=False):
    """The strategies of each type in a case, and the layouts they use."""

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
        return tuple(dict.fromkeys((EMBEDDING, *self.costs.model.layers, HEAD)))

    def has_plans(self, configuration: Configuration) -> bool:
        """Whether every layer of a case can be spread in some way."""
        return all(self._shardings(configuration).strategies)

    def stage_ranks(self, pp_size: int) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline stage."""
        width = self.costs.cluster.num_devices // pp_size
        return tuple(tuple(range(i * width, (i + 1) * width)) for i in range(pp_size))

    def solvable(self, configuration: Configuration) -> Solvable:
        """The case, ready to be bounded and solved; the last few are kept."""
        if configuration not in self._recent:
            while len(self._recent) >= _MAX_RECENT:
                del self._recent[next(iter(self._recent))]
            self._recent[configuration] = self._solvable(configuration)
        return self._recent[configuration]

    def _solvable(self, configuration: Configuration) -> Solvable:
        sharding = self._shardings(configuration)
        if not all(sharding.strategies):
            return Nothing()
        if configuration.num_chunks > 1:
            problem = self._interleaved(configuration, sharding)
            return Nothing() if problem is None else Interleaved(problem)
        return Pipeline(self.problem(configuration), self._costs_of, self._dual_of)

    def problem(self, configuration: Configuration) -> Problem:
        """The numbers of a case of GPipe or 1F1B."""
        sharding, stages = self._shardings(configuration), self.stage_ranks(configuration.pp_size)
        topologies = tuple(dict.fromkeys(self._topologies(configuration.pp_size)))
        sends = np.array([self._sends(configuration, sharding, here, there) for here, there in pairwise(stages)], float)
        return Problem(
            layers=tuple(self.types.index(name) for name in (EMBEDDING, *self.costs.model.layers, HEAD)),
            device_groups=tuple(self._device_group(configuration, sharding, topology) for topology in topologies),
            available=tuple(self._topologies(configuration.pp_size).count(topology) for topology in topologies),
            allowed=tuple((topologies.index(topology),) for topology in self._topologies(configuration.pp_size)),
            sends_ps=np.broadcast_to(
                sends.reshape(len(stages) - 1, 1, 1, len(self.types), len(sharding.layouts)),
                (len(stages) - 1, len(topologies), len(topologies), len(self.types), len(sharding.layouts)),
            ),
            in_flight=tuple(
                in_flight(configuration.schedule, configuration.pp_size, configuration.num_microbatches, i)
                for i in range(configuration.pp_size)
            ),
            num_microbatches=configuration.num_microbatches,
            boundary_bytes=self._boundary(configuration, sharding),
            tie_ps=self._ties(configuration, sharding),
        )

    def plan(self, configuration: Configuration, solution: Solution) -> Plan:
        """The plan that a solution of a case stands for."""
        model, request = self.costs.model, self.request
        names = (EMBEDDING, *model.layers, HEAD)
        strategies = self._shardings(configuration).strategies
        embedding, *layers, head = (
            strategies[self.types.index(name)][option] for name, option in zip(names, solution.options, strict=True)
        )
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
        """What all layers of a case can share: strategies that every type of layer has, told by the first type's."""
        sharding = dict(zip(self.types, self._shardings(configuration).strategies, strict=True))
        first, *others = dict.fromkeys(self.costs.model.layers)
        return tuple(
            s
            for s in sharding[first]
            if isinstance(s, LayerStrategy) and all(replace(s, type=other) in sharding[other] for other in others)
        )

    def buffer_tokens(self, configuration: Configuration) -> tuple[int, ...]:
        """The sizes that Megatron's gather buffer can have, in tokens; 0 without sequence parallelism."""
        sharding = self._shardings(configuration).strategies
        return tuple(
            sorted({0} | {_gathered(s, configuration.microbatch_samples) * self._length for f in sharding for s in f})
        )

    @property
    def _length(self) -> int:
        return self.costs.model.sequence_length

    @cached_property
    def _costs_of(self) -> CostsOf:
        return cache(GroupCosts)

    @cached_property
    def _recent(self) -> dict[Configuration, Solvable]:
        return {}

    @cached_property
    def _dual_of(self) -> DualOf:
        return cache(dual_of)

    @cached_property
    def _known_ties(self) -> dict[tuple[object, ...], int]:
        return {}

    @cached_property
    def _known_topologies(self) -> dict[int, tuple[StageTopology, ...]]:
        return {}

    @cached_property
    def _known_shardings(self) -> dict[tuple[object, ...], _Shardings]:
        return {}

    @cached_property
    def _known_device_groups(self) -> dict[tuple[object, ...], DeviceGroup]:
        return {}

    @cached_property
    def _known_sends(self) -> dict[tuple[object, ...], list[list[float]]]:
        return {}

    def _topologies(self, pp_size: int) -> tuple[StageTopology, ...]:
        """By pipeline stage."""
        if pp_size not in self._known_topologies:
            self._known_topologies[pp_size] = tuple(
                stage_topology(self.costs.cluster, ranks) for ranks in self.stage_ranks(pp_size)
            )
        return self._known_topologies[pp_size]

    def _shardings(self, configuration: Configuration) -> _Shardings:
        width, samples = self.costs.cluster.num_devices // configuration.pp_size, configuration.microbatch_samples
        key = width, samples, configuration.layers, configuration.buffer_tokens
        if key not in self._known_shardings:
            found = tuple(
                tuple(s for s in self._shardings_of(name, width) if self._possible(s, configuration, name))
                for name in self.types
            )
            layouts = tuple(sorted({layout_of(strategy) for strategies in found for strategy in strategies}))
            self._known_shardings[key] = _Shardings(found, layouts)
        return self._known_shardings[key]

    def _shardings_of(self, type_name: str, width: int) -> tuple[Strategy, ...]:
        if (type_name, width) not in self._all_shardings:
            self._all_shardings[type_name, width] = shardings(self.request, self.costs.model, type_name, width)
        return self._all_shardings[type_name, width]

    @cached_property
    def _all_shardings(self) -> dict[tuple[str, int], tuple[Strategy, ...]]:
        return {}

    def _possible(self, strategy: Strategy, configuration: Configuration, type_name: str) -> bool:
        """Whether it shares a microbatch's samples out evenly, and is what the case fixes."""
        if configuration.microbatch_samples % strategy.dp_size:
            return False
        if configuration.buffer_tokens is not None and (
            _gathered(strategy, configuration.microbatch_samples) * self._length > configuration.buffer_tokens
        ):
            return False
        if configuration.layers is None or not isinstance(strategy, LayerStrategy):
            return True
        return strategy == replace(configuration.layers, type=type_name)

    def _device_group(self, configuration: Configuration, sharding: _Shardings, topology: StageTopology) -> DeviceGroup:
        one = configuration.num_microbatches == 1
        key = topology, configuration.microbatch_samples, one, configuration.layers, configuration.buffer_tokens
        if key not in self._known_device_groups:
            options = tuple(
                self._options(name, found, sharding, configuration, topology)
                for name, found in zip(self.types, sharding.strategies, strict=True)
            )
            moves = np.array(
                [self._moves(name, sharding, configuration.microbatch_samples, topology) for name in self.types]
            )
            budget = self.budgets[topology.node_type] - self._buffer_bytes(configuration)
            self._known_device_groups[key] = DeviceGroup(options, moves, budget)
        return self._known_device_groups[key]

    def _buffer_bytes(self, configuration: Configuration) -> int:
        features = max(tensor.features for tensor in self.costs.model.boundary)
        return (configuration.buffer_tokens or 0) * features * self.costs.compute_bytes

    def _options(
        self,
        name: str,
        found: Sequence[Strategy],
        sharding: _Shardings,
        configuration: Configuration,
        topology: StageTopology,
    ) -> Options:
        costs = [
            self.costs.layer(name, strategy, topology, configuration.microbatch_samples, configuration.num_microbatches)
            for strategy in found
        ]
        layouts = np.array([sharding.layouts.index(layout_of(strategy)) for strategy in found])
        known = list(self._tie_classes(found))
        classes = np.array([known.index(tie_class(strategy)) for strategy in found] if known else [0] * len(found))
        return Options(
            np.array([cost.microbatch_ps for cost in costs], float),
            np.array([cost.exposed_ps for cost in costs], float),
            np.array([cost.state_bytes for cost in costs], float),
            np.array([cost.memory.gradients for cost in costs], float),
            np.array([cost.activation_bytes for cost in costs], float),
            np.array([cost.workspace_bytes for cost in costs], float),
            input_layout=classes if name == EMBEDDING else layouts,
            output_layout=classes if name == HEAD else layouts,
        )

    def _moves(self, name: str, sharding: _Shardings, samples: int, topology: StageTopology) -> list[list[float]]:
        """[layouts, layouts]: there in forward and back in backward."""
        one_way = {
            (a, b): self.costs.redistribution(name, a, b, topology, samples).time_ps
            for a in sharding.layouts
            for b in sharding.layouts
        }
        return [[float(one_way[a, b] + one_way[b, a]) for b in sharding.layouts] for a in sharding.layouts]

    def _sends(
        self, configuration: Configuration, sharding: _Shardings, here: Sequence[int], there: Sequence[int]
    ) -> list[list[float]]:
        """[types, layouts]."""
        samples = configuration.microbatch_samples
        key = self.costs.link(here, there), sharding.layouts, samples
        if key not in self._known_sends:
            self._known_sends[key] = [
                [float(self.costs.send(name, layout, key[0], samples).time_ps) for layout in sharding.layouts]
                for name in self.types
            ]
        return self._known_sends[key]

    def _boundary(self, configuration: Configuration, sharding: _Shardings) -> np.ndarray:
        """[types, layouts]."""
        samples = configuration.microbatch_samples
        resident = [[self.costs.boundary_bytes(n, layout, samples) for layout in sharding.layouts] for n in self.types]
        return np.array(resident, float)

    def _ties(self, configuration: Configuration, sharding: _Shardings) -> np.ndarray:
        """[classes of the embedding, of the head]."""
        if not self.costs.model.tied:
            return np.zeros((1, 1))
        first, last = (self._tie_classes(sharding.strategies[self.types.index(name)]) for name in (EMBEDDING, HEAD))
        return np.array(
            [[self._tie(configuration.pp_size, *a, *b) for b in last.items()] for a in first.items()], float
        )

    def _tie(self, pp_size: int, here: object, embedding: Strategy, there: object, head: Strategy) -> int:
        if (key := (pp_size, here, there)) not in self._known_ties:
            stages = self.stage_ranks(pp_size)
            self._known_ties[key] = tie_cost_ps(self.costs, embedding, head, stages[0], stages[-1])
        return self._known_ties[key]

    def _tie_classes(self, found: Sequence[Strategy]) -> dict[object, Strategy]:
        """A strategy of each class that ties tell apart; none where nothing is tied."""
        return {tie_class(strategy): strategy for strategy in found} if self.costs.model.tied else {}

    def _interleaved(self, configuration: Configuration, sharding: _Shardings) -> InterleavedProblem | None:
        """None where stages lie differently on the nodes, or chunks hold different types of layers."""
        layers, stages = self.costs.model.layers, self.stage_ranks(configuration.pp_size)
        share = len(layers) // (configuration.pp_size * configuration.num_chunks)
        topologies = set(self._topologies(configuration.pp_size))
        if len(topologies) > 1 or any(layers[i : i + share] != layers[:share] for i in range(0, len(layers), share)):
            return None
        around = (*pairwise(stages), (stages[-1], stages[0]))
        workspaces = [
            moments_in_flight(configuration, stage)
            for stage in (0, min(1, configuration.pp_size - 1), configuration.pp_size - 1)
        ]
        middle = workspaces[1] if configuration.pp_size > 2 else (*workspaces[0], *workspaces[2])
        return InterleavedProblem(
            embedding=self.types.index(EMBEDDING),
            positions=tuple(self.types.index(name) for name in layers[:share]),
            head=self.types.index(HEAD),
            group=self._device_group(configuration, sharding, next(iter(topologies))),
            pp_size=configuration.pp_size,
            num_chunks=configuration.num_chunks,
            num_microbatches=configuration.num_microbatches,
            sends_ps=np.array([self._sends(configuration, sharding, *pair) for pair in around], float),
            moments_in_flight=(workspaces[0], middle, workspaces[2]),
            boundary_bytes=self._boundary(configuration, sharding),
            tie_ps=self._ties(configuration, sharding),
        )


def _gathered(strategy: Strategy, samples: int) -> int:
    """Samples that Megatron's sequence parallelism gathers whole."""
    return samples // strategy.dp_size if strategy.sequence_parallel is SequenceParallel.MEGATRON else 0


def _stages(
    configuration: Configuration, solution: Solution, ranks: Sequence[tuple[int, ...]], num_layers: int
) -> tuple[PipelineStage, ...]:
    """The layer ranges of every pipeline stage: even chunks, or as the solution cuts."""
    if configuration.num_chunks > 1:
        share = num_layers // (configuration.pp_size * configuration.num_chunks)
        starts = range(0, num_layers, share)
        return tuple(
            PipelineStage(ranks=own, layers=tuple((s, s + share) for s in starts[i :: configuration.pp_size]))
            for i, own in enumerate(ranks)
        )
    cuts = (0, *(end - 1 for end in solution.ends[:-1]), num_layers)
    return tuple(PipelineStage(ranks=own, layers=((cuts[i], cuts[i + 1]),)) for i, own in enumerate(ranks))
