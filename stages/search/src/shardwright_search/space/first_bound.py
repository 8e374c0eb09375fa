"""A lower bound on T of a configuration on a sub-cluster, told before it is known where its stages can be."""

from itertools import pairwise
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_formats.semantics.schedule import in_flight
from shardwright_search.cost_model.layer import Link
from shardwright_search.cost_model.topology import StageTopology, stage_topology
from shardwright_search.solver.cached import cached_method
from shardwright_search.solver.counted_bound import OnType, sends_ps
from shardwright_search.solver.memory import min_phases
from shardwright_search.solver.relaxed_bound import Stages
from shardwright_search.solver.stage_options import mean_weights
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.layer_choices import Choice
from shardwright_search.space.placements import equal_stages
from shardwright_search.space.request import StageWidths

_Ranks = tuple[tuple[int, ...], ...]
"""Of each stage."""


class _Equal(NamedTuple):
    """Stages of one width on a node type."""

    stages: int
    topologies: tuple[StageTopology, ...]
    """That they may have."""
    links: tuple[Link, ...]
    """Between them, and to those on other types as if these were as fast."""


class FirstBounds(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Of the configurations of a request on a cluster."""

    instance: Instance

    def of(self, configuration: Configuration) -> float | None:
        """In picoseconds; infinity: there is no plan; None: it must be known where stages can be.

        That is so of unequal widths, of stages that span node types, and of interleaved chunks.
        """
        own, p, m = self.instance, configuration.pp_size, configuration.num_microbatches
        is_plain = configuration.widths is StageWidths.EQUAL and configuration.num_chunks == 1
        if own.request.span_node_types or not is_plain:
            return None
        if not own.choices.has_plans(configuration):
            return np.inf
        choice, bounds, layers = own.choices.choice(configuration), own.prices.bounds, own.types_of_layers
        by_type = self._equal(*choice.widths)
        on = tuple(topology for equal in by_type for topology in equal.topologies)
        weights = dict(zip(on, own.weights(choice, on), strict=True))
        total = sum(equal.stages * weights[equal.topologies[0]] for equal in by_type)
        mean = tuple(mean_weights(p, m, weight * p / total) for weight in weights.values())
        on_types = [self._on_type(choice, equal, m == 1) for equal in by_type]
        budget = sum(of.stages * max(group.budget_bytes for group in of.groups) for of in on_types)
        lean = tuple(own.prices.lean_group(choice, topology, m == 1) for topology in on)
        fewest = in_flight(configuration.schedule, p, m, p - 1)
        least = bounds.relaxed.least_ps(Stages(layers, lean, (1.0,) * len(on), mean, fewest, budget))
        if p == 1:
            return least
        parts = min_phases(fewest, m, any(group.keeps_sums for of in on_types for group in of.groups))
        least += min(mean)[0] * sends_ps(on_types)
        return max(least, bounds.counted.least_ps(layers, on_types, parts, m))

    def _on_type(self, choice: Choice, equal: _Equal, single_microbatch: bool) -> OnType:
        prices = self.instance.prices
        groups = tuple(prices.device_group(choice, topology, single_microbatch) for topology in equal.topologies)
        send_ps = min((prices.least_send_ps(choice, link) for link in equal.links), default=0.0)
        return OnType(equal.stages, groups, send_ps)

    @cached_method
    def _equal(self, width: int) -> tuple[_Equal, ...]:
        """By node type."""
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
