"""A configuration of the search as the solver's numbers, and the solver's answer as a plan."""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import combinations, pairwise

import msgspec
import numpy as np
from msgspec import UNSET

from shardwright.plan.schedules.registry import schedule_of
from shardwright.types import EMBEDDING, HEAD, Cluster, LayerStrategy, PipelineStage, Plan
from shardwright_search.cost_model.collectives import StageTopology
from shardwright_search.cost_model.layer import CostModel, picoseconds
from shardwright_search.solver.interleaved_problem import InterleavedProblem, moments_in_flight
from shardwright_search.solver.problem import Problem, Solution
from shardwright_search.solver.targets import Target
from shardwright_search.space.choices import Choice, Choices, LayerChoices
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.placements import NodeTypes
from shardwright_search.space.request import Objective, SearchRequest
from shardwright_search.space.stage_prices import StagePrices, TiedParameters
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import frees_outputs


class Instance(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A request with its cost model, and a cache of prices."""

    request: SearchRequest
    """Narrowed."""
    costs: CostModel
    budgets: dict[str, int]
    """Bytes of a rank by node type, without the process's own memory."""
    prices: StagePrices
    """Prices on these node types, or on more."""

    @classmethod
    def made(cls, request: SearchRequest, costs: CostModel, budgets: dict[str, int]) -> "Instance":
        """Return an instance with an empty cache."""
        layers = LayerChoices(request, costs.model)
        tied_parameters = TiedParameters(costs, _stage_types(request, budgets))
        return cls(request, costs, budgets, StagePrices(costs, layers, budgets, tied_parameters))

    def on(self, cluster: Cluster, request: SearchRequest, budgets: dict[str, int]) -> "Instance":
        """Return the instance on a subset of the nodes, with other degrees and budgets; valid prices are reused."""
        return Instance(request, self.costs.on(cluster), budgets, self.prices.within(budgets))

    @cached_property
    def choices(self) -> Choices:
        """The strategies of layers and the placements of stages that can be chosen."""
        return Choices(self.request, self.costs, self.prices.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the type of every layer."""
        return EMBEDDING, *self.costs.model.layers, HEAD

    @cached_property
    def _tied_parameters(self) -> TiedParameters:
        return TiedParameters(self.costs, self.prices.tied_parameters.stage_types)

    @cached_property
    def stage_types(self) -> tuple[NodeTypes, ...]:
        """Return the node types of a stage: one, or combinations if stages may span several."""
        return _stage_types(self.request, self.budgets)

    def target(self, configuration: Configuration) -> Target[Configuration]:
        """Return a configuration with its score: the time of a step, or of a sample, by the objective."""
        return Target(
            configuration=configuration,
            offset_ps=float(picoseconds(self.costs.step_overhead_s)),
            scale=self.score_scale(configuration.global_batch_size),
        )

    def score_scale(self, global_batch_size: int) -> float:
        """Return the factor from a step's time to the score, which is for a step or for a sample."""
        return 1.0 if self.request.objective is Objective.STEP_TIME else 1.0 / global_batch_size

    def stage_ranks(self, configuration: Configuration, solution: Solution) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each pipeline stage of a solution."""
        placed = self.choices.placed(configuration)
        return placed.stage_ranks(solution.device_groups)

    def node_type(self, configuration: Configuration, group: int) -> str:
        """Return the node type of a device group of a problem; if it spans several, the one with the least budget."""
        topologies = self.choices.placed(configuration).topologies
        return min(topologies[group].type_names, key=self.prices.with_process)

    @cached_property
    def types_of_layers(self) -> tuple[int, ...]:
        """Return the index of every layer's type, as the solver numbers them."""
        return tuple(map(self.prices.types.index, self.names))

    @cached_method
    def weights(self, choice: Choice, topologies: tuple[StageTopology, ...]) -> tuple[int, ...]:
        """Return the weight of a stage on each topology: ranks times speed relative to the slowest type, in hundredths.

        With one node type it is the number of ranks.
        """
        if len(self.budgets) == 1:
            return tuple(on.size for on in topologies)
        times = dict[str, float]()
        for on in topologies:
            if not on.node_types:
                fastest_ps = self.prices.fastest_ps(choice, on)
                times[on.node_type] = min(fastest_ps, times.get(on.node_type, fastest_ps))
        slowest = max(times.values(), default=1.0)
        speeds = {name: round(100 * slowest / times.get(name, slowest)) for name in self.budgets}
        return tuple(sum(on.ranks_on(name) * speeds[name] for name in on.type_names) for on in topologies)

    @cached_property
    def counts_communicators(self) -> bool:
        """Whether communicators hold memory on some device."""
        cluster = self.costs.cluster
        return cluster.num_devices > 1 and any(each.communicator_bytes for each in self.costs.profiles.used(cluster))

    def problem(self, configuration: Configuration) -> Problem:
        """Return the solver's numbers of a configuration of GPipe or 1F1B."""
        choice, p, m = self.choices.choice(configuration), configuration.pp_size, configuration.num_microbatches
        placed, handovers = self.choices.placed(configuration), self.choices.handovers(configuration)
        sends = [self.prices.handed_over(choice, handover) for handover in handovers.different]
        return Problem(
            layers=self.types_of_layers,
            device_groups=tuple(
                self.prices.device_group(choice, on, m == 1, configuration.edges) for on in placed.topologies
            ),
            weights=self.weights(choice, placed.topologies),
            placements=placed.moves,
            sends_ps={cut: sends[number] for cut, number in handovers.number.items()},
            in_flight=tuple(map(configuration.in_flight, range(p))),
            num_microbatches=m,
            closed_form=configuration.closed_forms[0],
            boundary_bytes=self.prices.boundary(choice.free),
            tied_ps=self._tied_parameters.costs_ps(
                self.choices.layers.shardings(choice._replace(layers=None)), p, configuration.ends
            ),
            block_in_each_stage=configuration.block_in_each_stage,
        )

    def chunk_types(self, configuration: Configuration) -> tuple[str, ...] | None:
        """Return the layer types of a whole chunk; None if chunks or placements differ.

        If the first chunk has no layers, the embedding must output what the last layer of a chunk outputs.
        """
        names, types = self.costs.model.layers, self.costs.model.types
        first, second, *_ = configuration.chunk_ends(len(names))
        (ahead, behind), whole = configuration.lacking, names[first:second]
        repeated = whole * (configuration.pp_size * configuration.num_chunks)
        alike = names == repeated[ahead : len(repeated) - behind]
        alike = alike and (first > 0 or types[EMBEDDING].outputs == types[whole[-1]].outputs)
        return whole if alike and len(self.choices.placed(configuration).topologies) == 1 else None

    def interleaved_problem(self, configuration: Configuration) -> InterleavedProblem:
        """Return the solver's numbers of a configuration of an interleaved schedule with equal chunks."""
        choice, p, m = self.choices.choice(configuration), configuration.pp_size, configuration.num_microbatches
        v, placed = configuration.num_chunks, self.choices.placed(configuration)
        if (types := self.chunk_types(configuration)) is None:
            raise ValueError(f"{configuration}: its chunks differ")
        schedule, frees = schedule_of(configuration.schedule), frees_outputs(self.costs.model)
        ranks = placed.stage_ranks((0,) * p)
        around = (*pairwise(ranks), (ranks[-1], ranks[0]))
        return InterleavedProblem(
            embedding=self.prices.types.index(EMBEDDING),
            positions=tuple(map(self.prices.types.index, types)),
            head=self.prices.types.index(HEAD),
            group=self.prices.device_group(
                choice, placed.topologies[0], m == 1, configuration.edges
            ).without_moved_activations(),
            pp_size=p,
            num_chunks=v,
            num_microbatches=m,
            closed_forms=configuration.closed_forms,
            sends_ps=np.array([self.prices.sends(choice.free, self.costs.link(*pair)) for pair in around]),
            moments_in_flight=moments_in_flight(schedule, p, m, v, frees),
            boundary_bytes=self.prices.boundary(choice.free),
            tied_ps=self._tied_parameters.costs_ps(self.choices.layers.shardings(choice._replace(layers=None)), p),
            frees_outputs=frees,
            lacking=configuration.lacking,
        )

    def plan(self, configuration: Configuration, solution: Solution) -> Plan:
        """Return the plan for a solution of a configuration."""
        model, request, ranks = self.costs.model, self.request, self.stage_ranks(configuration, solution)
        strategies = self.choices.layers.shardings(self.choices.choice(configuration))
        widths = [len(ranks[bisect_right(solution.ends, number)]) for number in range(len(self.names))]
        chosen = zip(self.names, widths, solution.options, strict=True)
        embedding, *layers, head = (strategies.of_type(name, width)[option] for name, width, option in chosen)
        return Plan(
            name=request.name,
            model=model,
            cluster=self.costs.cluster,
            global_batch_size=configuration.global_batch_size,
            num_microbatches=configuration.num_microbatches,
            schedule=configuration.schedule,
            gradient_reduction=request.gradient_reduction,
            precision=request.precision,
            optimizer=request.optimizers[0],
            attention=request.attention,
            compile=request.compile,
            loss_chunks=UNSET if request.loss_chunks == 1 else request.loss_chunks,
            stages=_stages(configuration, solution, ranks, len(model.layers)),
            embedding=embedding,
            head=head,
            layers=tuple(layer for layer in layers if isinstance(layer, LayerStrategy)),
        )


def _stages(
    configuration: Configuration, solution: Solution, ranks: Sequence[tuple[int, ...]], num_layers: int
) -> tuple[PipelineStage, ...]:
    """Return the layer ranges of each pipeline stage: its chunks, or its range between the solution's cuts."""
    cuts = [0, *(end - 1 for end in solution.ends[:-1]), num_layers]
    if configuration.num_chunks > 1:
        cuts = [0, *configuration.chunk_ends(num_layers)]
    ranges, p = list(pairwise(cuts)), configuration.pp_size
    return tuple(PipelineStage(ranks=each, layers=tuple(ranges[i::p])) for i, each in enumerate(ranks))


def _stage_types(request: SearchRequest, budgets: Collection[str]) -> tuple[NodeTypes, ...]:
    """Return the node types of a stage: one, or combinations if stages may span several."""
    most = len(budgets) if request.span_node_types else 1
    return tuple(tuple(sorted(names)) for count in range(1, most + 1) for names in combinations(budgets, count))
