"""A lower bound on the step time T of a configuration on a sub-cluster, before its placements are listed."""

from collections import Counter
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_search.cost_model.layer import Link
from shardwright_search.cost_model.topology import StageTopology, stage_topology
from shardwright_search.solver.quick_bounds import OnType, Stages, sends_ps
from shardwright_search.solver.stage_options import Weights, mean_weights
from shardwright_search.space.choices import Choice
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.placements import pools_of
from shardwright_search.space.request import StageWidths
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import min_phases

_Topologies = tuple[StageTopology, ...]
"""Topologies that stages may have."""
_MAX_POSITIONS = 50_000_000
"""The most positions of stages of any widths that are counted: some seconds, and as many bytes."""


class _Equal(NamedTuple):
    """Stages of one width on a node type."""

    stages: int
    topologies: _Topologies
    links: tuple[Link, ...]
    """Links between them, and to those on other types as if these were as fast."""


class FirstBounds(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The first bounds of the configurations of a request on a cluster."""

    instance: Instance

    def bound_ps(self, configuration: Configuration) -> float | None:
        """Return the bound; infinity: there is no plan; None: the placements must be listed first.

        That is so of listed widths, of stages that span node types, of interleaved chunks, and of too many positions.
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
        """Return the weights of the stages' shares in the ranks, with each type's speed."""
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
        # A stage of several ranks begins right behind another's first only where a type's nodes are not neighbours.
        near = {width == 1, not all(unbroken)}
        by_type = []
        for pool, follow in zip(pools, unbroken, strict=True):
            stages = [pool[i : i + width] for i in range(0, len(pool), width)]
            # Stages lie on nodes as the first does from where their ends meet: from there on they lie as before.
            per_node = cluster.domain_size(cluster.node_type_of_rank[pool[0]])
            some = stages[: lcm(per_node, width) // width + 1] if follow else stages
            topologies = dict.fromkeys(stage_topology(cluster, ranks) for ranks in some)
            links = dict.fromkeys(costs.link(*pair) for pair in pairwise(some))
            if len(pools) > 1:  # what goes to another type takes as long as the slower end, and leaves its node
                links |= dict.fromkeys(Link(consecutive, True, costs.node_types_of(pool)) for consecutive in near)
            by_type.append(_Equal(len(stages), tuple(topologies), tuple(links)))
        return tuple(by_type)
