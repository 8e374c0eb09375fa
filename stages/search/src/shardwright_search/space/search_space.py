"""The configurations of a request: those to search, those that are only bounded, and how each is solved."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, islice, pairwise, product
from math import lcm
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.optimizers.registry import OPTIMIZERS
from shardwright.plan.offload import can_offload
from shardwright.types import Cluster, LayerStrategy, Model, Offload, Strategy
from shardwright_search.cost_model.collectives import StageTopology, stage_topology
from shardwright_search.cost_model.layer import CostModel, Link
from shardwright_search.cost_model.profiles import Profiles, check_profiles, host_rate
from shardwright_search.cost_model.stage_costs import has_shared
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.min_memory import plain_plan
from shardwright_search.solver.partition import Pipeline, PricedSolution
from shardwright_search.solver.quick_bounds import OnType, Stages, sends_ps
from shardwright_search.solver.stage_options import Weights, mean_weights
from shardwright_search.solver.stopping import ended, latest, soon
from shardwright_search.solver.targets import Best, Solvable, Target
from shardwright_search.space.budget import budgets_of, with_spare
from shardwright_search.space.choices import Choice
from shardwright_search.space.configurations import NO_DEMANDS, Configuration, Demands, Outer, configurations, narrowed
from shardwright_search.space.instance import Instance
from shardwright_search.space.placements import pools_of
from shardwright_search.space.request import SearchRequest, StageWidths, runnable
from shardwright_search.space.uniform_bounds import UniformBounds
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import min_phases

# A lower bound on the step time T of a configuration on a sub-cluster, before its placements are listed.


_Topologies = tuple[StageTopology, ...]
"""Topologies that stages may have."""
_MAX_POSITIONS = 50_000_000
"""The most positions of stages of any widths that are counted: some seconds, and as many bytes."""


class _Equal(NamedTuple):
    """Stages of one width on a node type."""

    stages: int
    topologies: _Topologies
    links: tuple[Link, ...]
    """Links between them, and to stages on other types, as if those were as fast."""


class FirstBounds(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The first bounds of the configurations of a request on a cluster."""

    instance: Instance

    def bound_ps(self, configuration: Configuration) -> float | None:
        """Return the bound; infinity: there is no plan; None: the placements must be listed first.

        They must be listed for listed widths, stages that span node types, interleaved chunks, or too many positions.
        """
        choices, widths = self.instance.choices, configuration.widths
        if self.instance.request.span_node_types or isinstance(widths, tuple) or configuration.num_chunks > 1:
            return None
        if widths is StageWidths.ANY and choices.num_positions(configuration) > _MAX_POSITIONS:
            return None
        if not choices.has_plans(configuration):
            return np.inf
        choice = choices.choice(configuration)
        if widths is StageWidths.EQUAL:
            return self._equal_ps(configuration, choice)
        by_type = tuple(
            (name, tuple(sorted(able))) for name, able in choices.ways(configuration).widths_of_types.items()
        )
        topologies = self._anywhere(by_type, configuration.pp_size)
        return self._relaxed_ps(
            configuration, choice, topologies, self._mean_weights(configuration, choice, topologies)
        )

    def _equal_ps(self, configuration: Configuration, choice: Choice) -> float:
        """Return the bound on stages of one width, which hold whole blocks."""
        instance, p, m = self.instance, configuration.pp_size, configuration.num_microbatches
        by_type = self._equal(*choice.widths)
        topologies = tuple(topology for equal in by_type for topology in equal.topologies)
        weights = self._mean_weights(configuration, choice, topologies)
        least = self._relaxed_ps(configuration, choice, topologies, weights)
        if p == 1:
            return least
        on_types = [self._on_type(configuration, choice, equal) for equal in by_type]
        fewest = configuration.in_flight(p - 1)
        parts = min_phases(fewest, m, any(group.keeps_sums for on_type in on_types for group in on_type.groups))
        least += min(weights)[0] * sends_ps(on_types)
        counted, (form, *_) = instance.prices.bounds.counted, configuration.closed_forms
        return max(least, counted.min_ps(instance.types_of_layers, on_types, parts, form))

    def _relaxed_ps(
        self, configuration: Configuration, choice: Choice, topologies: _Topologies, weights: tuple[Weights, ...]
    ) -> float:
        """Return the bound for all layers over all ranks, on stages with these topologies and weights."""
        instance, p, m = self.instance, configuration.pp_size, configuration.num_microbatches
        edges = configuration.edges
        groups = tuple(instance.prices.lean_group(choice, topology, m == 1, edges) for topology in topologies)
        mean_width = instance.costs.cluster.num_devices / p
        budgets = dict.fromkeys(self._ranks, 0.0)
        for topology, group in zip(topologies, groups, strict=True):
            budgets[topology.node_type] = max(budgets[topology.node_type], group.budget_bytes)
        budget = sum(count * budgets[name] for name, count in self._ranks.items()) / mean_width
        relative = tuple(group.width / mean_width for group in groups)
        fewest = configuration.in_flight(p - 1)
        stages = Stages(instance.types_of_layers, groups, relative, weights, fewest, budget)
        return instance.prices.bounds.relaxed.min_ps(stages)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """Return the number of ranks by node type."""
        return Counter(self.instance.costs.cluster.node_type_of_rank)

    def _mean_weights(
        self, configuration: Configuration, choice: Choice, topologies: _Topologies
    ) -> tuple[Weights, ...]:
        """Return the `mean_weights` of a stage on each topology, whose ranks count by their node type's speed."""
        weights = self.instance.weights(choice, topologies)
        speeds = {on.node_type: weight / on.size for on, weight in zip(topologies, weights, strict=True)}
        total = sum(count * speeds[name] for name, count in self._ranks.items())
        (form,), p = configuration.closed_forms, configuration.pp_size
        return tuple(mean_weights(form, p, weight * p / total) for weight in weights)

    @cached_method
    def _anywhere(self, widths: tuple[tuple[str, tuple[int, ...]], ...], pp_size: int) -> _Topologies:
        """Return the topologies that a stage may have on each type: in one node, on whole nodes, or at equal widths."""
        cluster, topologies = self.instance.costs.cluster, dict[StageTopology, None]()
        equal = cluster.num_devices / pp_size
        ranks_of = {cluster.node_type_of_rank[ranks[0]]: ranks for ranks in pools_of(cluster)}
        for name, width in ((name, width) for name, able in widths for width in able):
            per_node, ranks = cluster.domain_size(name), ranks_of[name]
            if width <= per_node:
                topologies[StageTopology(name, (width,))] = None
            if width % per_node == 0:
                topologies[StageTopology(name, (per_node,) * (width // per_node))] = None
            if width == equal:
                stages = (ranks[i : i + width] for i in range(0, len(ranks) - width + 1, width))
                topologies |= dict.fromkeys(stage_topology(cluster, stage) for stage in stages)
        return tuple(topologies)

    def _on_type(self, configuration: Configuration, choice: Choice, equal: _Equal) -> OnType:
        prices, single_microbatch = self.instance.prices, configuration.num_microbatches == 1
        edges = configuration.edges
        groups = tuple(prices.device_group(choice, topology, single_microbatch, edges) for topology in equal.topologies)
        send_ps = min((prices.min_send_ps(choice, link) for link in equal.links), default=0.0)
        return OnType(equal.stages, groups, send_ps)

    @cached_method
    def _equal(self, width: int) -> tuple[_Equal, ...]:
        """Return the stages of one width by node type."""
        costs = self.instance.costs
        cluster, pools = costs.cluster, pools_of(costs.cluster)
        unbroken = [pool[-1] - pool[0] + 1 == len(pool) for pool in pools]
        # A stage of several ranks begins right after another's first rank only if a type's nodes are not neighbours.
        near = {width == 1, not all(unbroken)}
        by_type = []
        for pool, follow in zip(pools, unbroken, strict=True):
            stages = [pool[i : i + width] for i in range(0, len(pool), width)]
            # Where a stage and a node end together, the placement of stages on nodes repeats from the first stage on.
            per_node = cluster.domain_size(cluster.node_type_of_rank[pool[0]])
            some = stages[: lcm(per_node, width) // width + 1] if follow else stages
            topologies = dict.fromkeys(stage_topology(cluster, ranks) for ranks in some)
            links = dict.fromkeys(costs.link(*pair) for pair in pairwise(some))
            if len(pools) > 1:  # a send to another type takes as long as the slower end, and leaves its node
                links |= dict.fromkeys(Link(consecutive, True, costs.node_types_of(pool)) for consecutive in near)
            by_type.append(_Equal(len(stages), tuple(topologies), tuple(links)))
        return tuple(by_type)


# The space.


_ROUNDING_BYTES = 16
"""The most that rounding up each term of a corrected memory can add."""
_MAX_RECENT = 6
_MAX_PLAIN = 20


class NothingListed(BadInput):
    """No configuration of a space has a plan, whatever the memory."""


class Unlisted(NamedTuple):
    """Configurations that are bounded and not searched: their stages have too many placements."""

    scores: tuple[tuple[float, int], ...]
    """For each configuration a lower bound of its plans' scores, and its pipeline degree."""

    def below(self, score: float) -> "Unlisted | None":
        """Return the configurations that may have a plan below this score; None: there are none."""
        left = tuple(each for each in self.scores if each[0] < score)
        return Unlisted(left) if left else None

    @property
    def bound(self) -> float:
        """Return a lower bound of the score of all plans of these configurations."""
        return min(self.scores)[0]

    @property
    def text(self) -> str:
        """Return a clause with the number of configurations that are not searched, and the reason."""
        sizes = sorted({size for _, size in self.scores})
        degrees = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        cases = f"stage_widths any: in {len(self.scores)} cases, {degrees} stages"
        return f"{cases} can be placed on the nodes in more ways than a search tries"

    def error(self, file: Path, problem: str = "no plan was found:") -> BadInput:
        """Return the error to raise if these configurations must be searched."""
        return BadInput(file, f"{problem} {self.text}", "limit pp_sizes, or list stage_widths")


class _Deferred:
    """A configuration with a first bound, whose numbers are computed only if that bound does not rule it out."""

    def __init__(self, bound_ps: float, made: Callable[[], Solvable]) -> None:
        self.relaxed_bound_ps, self._made = bound_ps, made

    @cached_property
    def _whole(self) -> Solvable:
        return self._made()

    @property
    def lower_ps(self) -> float:
        """Return a lower bound on the step time T."""
        return max(self._whole.relaxed_bound_ps, self._whole.lower_ps)

    def guess(self, below_ps: float) -> PricedSolution | None:
        """Return a plan with T < below_ps, found by a heuristic; None if it finds none."""
        return self._whole.guess(below_ps)

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[PricedSolution, ...]:
        """Return plans with T < below_ps, the best first."""
        return self._whole.solve_below(below_ps, most, tick)


class SearchSpace(msgspec.Struct, frozen=True, dict=True, eq=False):
    """A request with its instance; `file` names it in errors."""

    instance: Instance
    file: Path
    demands: Demands = NO_DEMANDS

    @cached_property
    def _configurations(self) -> tuple[Configuration, ...]:
        costs = self.instance.costs
        return configurations(self.instance.request, costs.model, costs.cluster, self.file)

    @cached_property
    def listed(self) -> tuple[Target[Configuration], ...]:
        """Return the configurations that are searched, each with its score: seconds of a step, or of a sample."""
        return tuple(self.instance.target(split) for each in self._configurations for split in self._split(each))

    @property
    def targets(self) -> tuple[Target[Configuration], ...]:
        """The configurations that are searched; raises NothingListed if none has a plan at all."""
        if self.listed:
            return self.listed
        if self.unlisted is not None:
            raise self.unlisted.error(self.file)
        if any(self.instance.choices.has_plans(each) for each in self._configurations):
            problem = "interleaved_1f1b: no pp_size and chunks_per_stage give all chunks the same types of layers"
            raise NothingListed(self.file, f"{problem} on stages placed alike", "allow 1f1b or gpipe, or other sizes")
        problem = "no strategy divides the batch, the model and the devices evenly"
        raise NothingListed(self.file, problem, "change the batch, or allow other pp_sizes, tp_sizes or cp_sizes")

    @cached_property
    def unlisted(self) -> Unlisted | None:
        """Return the configurations that have placements and are only bounded; None: there are none.

        If no bound is known before stages are placed, as for stages that span node types, the bound is 0.
        """
        choices, left = self.instance.choices, []
        for configuration in self._configurations:
            if not choices.is_listed(configuration):
                bound_ps = self._first_bounds.bound_ps(configuration) or 0.0
                if np.isfinite(bound_ps) or choices.has_plans(configuration):
                    left.append((self.instance.target(configuration).score(bound_ps), configuration.pp_size))
        return Unlisted(tuple(left)) if left else None

    def open_below(self, score: float) -> Unlisted | None:
        """Return the configurations that are only bounded and may have a plan below this score; None: none."""
        return self.unlisted and self.unlisted.below(score)

    def check_listed(self, name: str) -> None:
        """Raise BadInput if configurations are only bounded, for callers that need all of them searched."""
        if self.unlisted is not None:
            raise self.unlisted.error(self.file, f"{name}:")

    @cached_property
    def solvable(self) -> Callable[[Configuration], Solvable]:
        """Return a function that prepares a configuration to be bounded and solved; it caches the last few."""

        def made(configuration: Configuration) -> Solvable:
            is_soon_bounded = configuration.widths is StageWidths.ANY or configuration.layers is not None
            return (self.deferred if is_soon_bounded else self.whole)(configuration)

        return lru_cache(_MAX_RECENT)(made)

    @cached_property
    def _first_bounds(self) -> FirstBounds:
        return FirstBounds(self.instance)

    @cached_property
    def uniform_bounds(self) -> UniformBounds:
        """The bounds of configurations whose layers share a strategy."""
        return UniformBounds(self.instance)

    def deferred(self, configuration: Configuration) -> Solvable:
        """Return a configuration with its first bound, if there is one."""
        bounds = self._first_bounds if configuration.layers is None else self.uniform_bounds
        bound_ps, made = bounds.bound_ps(configuration), partial(self.whole, configuration)
        return made() if bound_ps is None else _Deferred(bound_ps, made)

    def whole(self, configuration: Configuration) -> Solvable:
        """Return a configuration with all its numbers."""
        instance = self.instance
        if configuration.num_chunks > 1:
            from shardwright_search.solver.interleaved import Interleaved

            return Interleaved(instance.interleaved_problem(configuration))
        bounds = instance.prices.bounds
        return Pipeline(instance.problem(configuration), bounds.costs_of, bounds.relaxed)

    def plain(self, targets: Sequence[Target[Configuration]]) -> Best[Configuration] | None:
        """Return the best of some plain plans, for a search that was stopped before it had one; None: none fits.

        They belong to configurations with one chunk. If stages may have any widths, it is the best plan with equal
        widths that is found soon: equal widths have few placements.
        """
        single = [target for target in targets if target.configuration.num_chunks == 1]
        if self.instance.request.stage_widths is not StageWidths.ANY:
            return latest(self._plain(single), soon(0.0))[0]
        equals, until = dict[Target[Configuration], None](), soon(0.0)

        def list_equals() -> None:
            for target in single:
                for equal in self._of_equal_width(target.configuration):
                    equals[target._replace(configuration=equal)] = None

        ended(list_equals, until)
        best = optimize(tuple(equals), self.solvable, deadline=until, wide=True).best
        return best or latest(self._plain([*equals, *single]), soon(0.0))[0]

    def _plain(self, targets: Iterable[Target[Configuration]]) -> Iterator[Best[Configuration]]:
        """Yield ever better plans among the `plain_plan`s of the first targets."""
        solved = ((target, plain_plan(self.instance.problem(target.configuration))) for target in targets)
        plans = (Best(target, plan, target.score(plan.objective_ps)) for target, plan in solved if plan is not None)
        yield from accumulate(islice(plans, _MAX_PLAIN), _lesser)

    def _of_equal_width(self, configuration: Configuration) -> Iterator[Configuration]:
        """Yield the configuration with stages of equal width, if it has plans."""
        equal = configuration._replace(widths=StageWidths.EQUAL)
        if self.instance.costs.cluster.num_devices % equal.pp_size == 0 and self.instance.choices.has_plans(equal):
            yield equal

    def _split(self, configuration: Configuration) -> Iterator[Configuration]:
        """Yield the configuration once for each common strategy and buffer size with which it has plans.

        If a configuration is only bounded, the same with stages of equal width is searched in its place, if possible.
        """
        choices, request = self.instance.choices, self.instance.request
        ways = (configuration,) if choices.is_listed(configuration) else self._of_equal_width(configuration)
        for way in filter(self._has_plans, chain.from_iterable(map(self._by_ends, ways))):
            shared: Sequence[LayerStrategy | None] = [None] if request.fine_grained else choices.layer_strategies(way)
            for split in self._demanded(way._replace(layers=layers) for layers in shared):
                if not request.megatron_gather_buffer:
                    yield split
                    continue
                sizes = (split._replace(buffer_tokens=tokens) for tokens in choices.buffer_tokens(split))
                yield from filter(choices.has_plans, sizes)

    def _demanded(self, configurations: Iterable[Configuration]) -> Iterator[Configuration]:
        """Yield the configurations that meet the demands.

        If embedding and head must be alike, each is yielded once for every strategy that both can have. If they must be
        as the layers, each configuration must already name one strategy for all layers.
        """
        demands, choices = self.demands, self.instance.choices
        if demands == NO_DEMANDS:
            yield from configurations
            return
        for asked in configurations:
            configuration = asked._replace(block_in_each_stage=demands.block_in_each_stage)
            if demands.block_in_each_stage and asked.pp_size > len(self.instance.costs.model.layers):
                continue
            shared: Sequence[Strategy | None] = [None]
            if demands.outer is Outer.ALIKE:
                shared = choices.outer_strategies(configuration)
            elif demands.outer is Outer.AS_LAYERS:
                assert asked.layers is not None
                shared = [Strategy(**{name: getattr(asked.layers, name) for name in Strategy.__struct_fields__})]
            each = (configuration._replace(outer=outer) for outer in shared)
            yield from (split for split in each if demands.allows(split) and choices.has_plans(split))

    def _has_plans(self, configuration: Configuration) -> bool:
        """Return whether a configuration has plans, ignoring memory: several chunks have to be equal."""
        if not self.instance.choices.has_plans(configuration):
            return False
        return configuration.num_chunks == 1 or self.instance.chunk_types(configuration) is not None

    def _by_ends(self, configuration: Configuration) -> Iterator[Configuration]:
        """Yield the configuration split by the first and last stage's node types, if the cost of ties needs it."""
        model, names = self.instance.costs.model, self.instance.stage_types
        if len(names) == 1 or configuration.num_chunks > 1 or not (model.has_copies or has_shared(model)):
            yield configuration
            return
        yield from (configuration._replace(ends=(first, last)) for first, last in product(names, repeat=2))


def _lesser(best: Best[Configuration], other: Best[Configuration]) -> Best[Configuration]:
    return min(best, other, key=lambda each: each.score)


def space_of(
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    file: Path,
    known: Instance | None = None,
    demands: Demands = NO_DEMANDS,
) -> SearchSpace:
    """Return the search space of a request; `known`: prices of a cluster with the same node types, or more.

    Raises BadInput for profiles that do not fit the request, for a budget that no device has, and if the runtime
    supports none of the requested context parallelism.
    """
    if len(request.optimizers) > 1:
        raise BadInput(file, f"optimizer: {', '.join(request.optimizers)} are several", "name one here")
    check_profiles(profiles, model, cluster, request.precision, request.attention, request.compile)
    _check_offload(request, cluster, profiles, file)
    request = with_spare(request, cluster, profiles)
    sizes = budgets_of(request, cluster, file)
    profiled = set.intersection(*({key.tp_size for key in each.layers} for each in profiles.used(cluster)))
    request = narrowed(request, cluster, profiled)
    if not demands.elsewhere:
        request = runnable(request, model, cluster, file)
    budgets = {
        name: _without_process(size, profiles.of_device(cluster.node_types[name].device), cluster.num_devices > 1)
        for name, size in sizes.items()
    }
    if known is not None:
        return SearchSpace(known.on(cluster, request, budgets), file, demands)
    costs = CostModel(
        model,
        cluster,
        profiles,
        request.precision,
        request.gradient_reduction,
        request.time_model,
        OPTIMIZERS[request.optimizers[0]],
        request.loss_chunks,
    )
    return SearchSpace(Instance.made(request, costs, budgets), file, demands)


def _check_offload(request: SearchRequest, cluster: Cluster, profiles: Profiles, file: Path) -> None:
    """Raise BadInput if the request allows an offload that its optimizer or a node type does not support."""
    if not request.offloads:
        return
    if request.offloads_optimizer and not can_offload(OPTIMIZERS[request.optimizers[0]]):
        problem = f"offload: {request.optimizers[0]} updates whole matrices, of all layers at once"
        raise BadInput(file, problem, "leave out offload, or take another optimizer")
    for name in dict.fromkeys(cluster.node_type_of_rank):
        kind, updates = cluster.node_types[name], ("host_updates_per_s",) if Offload.UPDATE in request.offload else ()
        there = {"host_memory_gib": kind.host_memory_gib is not UNSET}
        for rate in ("host_bytes_per_s", *updates):
            there[rate] = host_rate(kind, profiles.of_device(kind.device), rate) is not None
        for field, known in there.items():
            if not known:
                problem = f"offload: node type {name} of cluster {cluster.name} has no {field}"
                raise BadInput(file, problem, "add it to the cluster file")


def _without_process(budget_bytes: int, profiles: Profiles, communicates: bool) -> int:
    """Return a budget without the memory of the process and, if it `communicates`, of the all-rank communicator."""
    factor, always = profiles.memory_factor, profiles.process_bytes + communicates * profiles.communicator_bytes
    return int(budget_bytes / factor) - always - (0 if factor == 1 else _ROUNDING_BYTES)
