"""A lower bound on T of a configuration on a sub-cluster, told before it is known where its stages can be."""

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
from shardwright_search.space.placements import equal_stages, pools_of
from shardwright_search.space.request import StageWidths
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.memory import min_phases

_On = tuple[StageTopology, ...]
"""That stages may have."""
_MAX_POSITIONS = 50_000_000
"""Positions of stages of any widths that are still counted: some seconds, and as many bytes."""
_Ranks = tuple[tuple[int, ...], ...]
"""The ranks of each stage."""


class _Equal(NamedTuple):
    """Stages of one width on a node type."""

    stages: int
    topologies: _On
    links: tuple[Link, ...]
    """Between them, and to those on other types as if these were as fast."""


class FirstBounds(msgspec.Struct, frozen=True, dict=True, eq=False):
    """The first bounds of the configurations of a request on a cluster."""

    instance: Instance

    def of(self, configuration: Configuration) -> float | None:
        """In picoseconds; infinity: there is no plan; None: it must be known where stages can be.

        That is so of listed widths, of stages that span node types, of interleaved chunks, and of too many positions.
        """
        own, widths = self.instance, configuration.widths
        if own.request.span_node_types or isinstance(widths, tuple) or configuration.num_chunks > 1:
            return None
        if widths is StageWidths.ANY and own.choices.num_positions(configuration) > _MAX_POSITIONS:
            return None
        if not own.choices.has_plans(configuration):
            return np.inf
        return self._of_any(configuration) if widths is StageWidths.ANY else self._of_equal(configuration)

    def _of_any(self, configuration: Configuration) -> float:
        """Return the bound of all layers over all ranks, on stages of any widths."""
        choice = self.instance.choices.choice(configuration)
        widths = self.instance.choices.widths_of_types(configuration)
        able = tuple((name, tuple(sorted(own))) for name, own in widths.items())
        on = self._anywhere(able, configuration.pp_size)
        return self._relaxed(configuration, choice, on, self._mean_weights(configuration, choice, on))

    def _of_equal(self, configuration: Configuration) -> float:
        """Return the bound on stages of one width, which hold whole blocks."""
        own, p, m = self.instance, configuration.pp_size, configuration.num_microbatches
        choice, layers = own.choices.choice(configuration), own.types_of_layers
        by_type = self._equal(*choice.widths)
        on = tuple(topology for equal in by_type for topology in equal.topologies)
        weights = self._mean_weights(configuration, choice, on)
        least = self._relaxed(configuration, choice, on, weights)
        if p == 1:
            return least
        on_types = [self._on_type(choice, equal, m == 1) for equal in by_type]
        fewest = configuration.in_flight(p - 1)
        parts = min_phases(fewest, m, any(group.keeps_sums for of in on_types for group in of.groups))
        least += min(weights)[0] * sends_ps(on_types)
        return max(least, own.prices.bounds.counted.least_ps(layers, on_types, parts, configuration.closed_forms[0]))

    def _relaxed(self, configuration: Configuration, choice: Choice, on: _On, weights: tuple[Weights, ...]) -> float:
        """Return the bound of all layers over all ranks, on stages that may be on these, with their weights."""
        own, p, m = self.instance, configuration.pp_size, configuration.num_microbatches
        groups = tuple(own.prices.lean_group(choice, topology, m == 1) for topology in on)
        mean_width = own.costs.cluster.num_devices / p
        budgets = dict.fromkeys(self._ranks, 0.0)
        for topology, group in zip(on, groups, strict=True):
            budgets[topology.node_type] = max(budgets[topology.node_type], group.budget_bytes)
        budget = sum(count * budgets[name] for name, count in self._ranks.items()) / mean_width
        relative = tuple(group.width / mean_width for group in groups)
        fewest = configuration.in_flight(p - 1)
        stages = Stages(own.types_of_layers, groups, relative, weights, fewest, budget)
        return own.prices.bounds.relaxed.least_ps(stages)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The number of ranks by node type."""
        return Counter(self.instance.costs.cluster.node_type_of_rank)

    def _mean_weights(self, configuration: Configuration, choice: Choice, on: _On) -> tuple[Weights, ...]:
        """Return the weights of the stages' shares in the ranks, each with its type's speed."""
        weights = self.instance.weights(choice, on)
        speeds = {topology.node_type: weight / topology.size for topology, weight in zip(on, weights, strict=True)}
        total = sum(count * speeds[name] for name, count in self._ranks.items())
        (form,), p = configuration.closed_forms, configuration.pp_size
        return tuple(mean_weights(form, p, weight * p / total) for weight in weights)

    @cached_method
    def _anywhere(self, widths: tuple[tuple[str, tuple[int, ...]], ...], pp_size: int) -> _On:
        """Return how stages may lie on each type: in one node, on whole ones, or as those of equal width."""
        cluster, found = self.instance.costs.cluster, dict[StageTopology, None]()
        equal = cluster.num_devices / pp_size
        ranks_of = {cluster.node_type_of_rank[ranks[0]]: ranks for ranks in pools_of(cluster)}
        for name, width in ((name, width) for name, own in widths for width in own):
            each, ranks = cluster.node_types[name].devices_per_node, ranks_of[name]
            if width <= each:
                found[StageTopology(name, (width,))] = None
            if width % each == 0:
                found[StageTopology(name, (each,) * (width // each))] = None
            if width == equal:
                stages = (ranks[i : i + width] for i in range(0, len(ranks) - width + 1, width))
                found |= dict.fromkeys(stage_topology(cluster, stage) for stage in stages)
        return tuple(found)

    def _on_type(self, choice: Choice, equal: _Equal, single_microbatch: bool) -> OnType:
        prices = self.instance.prices
        groups = tuple(prices.device_group(choice, topology, single_microbatch) for topology in equal.topologies)
        send_ps = min((prices.least_send_ps(choice, link) for link in equal.links), default=0.0)
        return OnType(equal.stages, groups, send_ps)

    @cached_method
    def _equal(self, width: int) -> tuple[_Equal, ...]:
        """Return the stages of one width by node type."""
        costs, every = self.instance.costs, equal_stages(self.instance.costs.cluster, width)
        # A stage of several ranks begins right behind another's first only where a type's nodes are not neighbours.
        near = {width == 1, not all(map(_is_unbroken, every))}
        found = []
        for stages in every:
            some = self._repeated(stages) if _is_unbroken(stages) else stages
            topologies = dict.fromkeys(stage_topology(costs.cluster, ranks) for ranks in some)
            links = dict.fromkeys(costs.link(*pair) for pair in pairwise(some))
            if len(every) > 1:  # what goes to another type takes as long as the slower end, and leaves its node
                links |= dict.fromkeys(Link(own, True, costs.node_types_of(stages[0])) for own in near)
            found.append(_Equal(len(stages), tuple(topologies), tuple(links)))
        return tuple(found)

    def _repeated(self, stages: _Ranks) -> _Ranks:
        """The stages on a type up to where they lie on nodes as the first does: from there on they lie as before."""
        cluster, width = self.instance.costs.cluster, len(stages[0])
        each = cluster.node_types[cluster.node_type_of_rank[stages[0][0]]].devices_per_node
        return stages[: lcm(each, width) // width + 1]


def _is_unbroken(stages: _Ranks) -> bool:
    """Whether the ranks of a type follow one another."""
    return stages[-1][-1] - stages[0][0] + 1 == len(stages) * len(stages[0])
