"""Costs of tied parameters, and of those that layers share, by how the first and the last stage hold them."""

from itertools import product, zip_longest
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_formats.semantics.axes import layout_of
from shardwright_formats.types import EMBEDDING, HEAD, Strategy
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.tied_weights import has_shared, shared_cost_ps, tie_class, tie_cost_ps
from shardwright_search.space.choices import Shardings
from shardwright_search.space.placements import NodeTypes, pools_of
from shardwright_search.step.cached_method import cached_method
from shardwright_search.step.pareto import Numbers


class _End(NamedTuple):
    """The node types of the first or last stage, and a strategy of its embedding or head."""

    node_types: NodeTypes
    strategy: Strategy

    @property
    def width(self) -> int:
        return layout_of(self.strategy).stage_size


class Ties(msgspec.Struct, frozen=True, dict=True, eq=False):
    """Ties on a cluster; the embedding and the head are of classes, all of which tie alike."""

    costs: CostModel
    stage_types: tuple[NodeTypes, ...]
    """The node types that a stage may be on together, those that the cluster lacks among them."""

    @cached_method
    def costs_ps(self, shardings: Shardings, pp_size: int, types: tuple[NodeTypes, NodeTypes] | None = None) -> Numbers:
        """Return the costs [classes of the embedding, of the head], shared parameters' included; infinity: no plan.

        `types`: of the first and the last stage, where these are given.
        """
        if not self.costs.model.tied and not has_shared(self.costs.model):
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
                costs_ps[i, j] = tie_cost_ps(self.costs, before.strategy, behind.strategy, *ranks)
                costs_ps[i, j] += self._shared_ps(*ranks)
        return costs_ps

    @cached_method
    def numbers(self, shardings: Shardings, name: str) -> dict[object, int]:
        """Return the number of each class of the embedding or the head."""
        return {tie: number for number, tie in enumerate(self._classes(shardings, name))}

    def class_of(self, node_types: NodeTypes, strategy: Strategy) -> object:
        """Return what ties depend on: of parameters that layers share, which the first stage sends to the last, widths.

        Of tied parameters how the ranks share them; None where all cost alike.
        """
        if self.costs.model.tied:
            return node_types, tie_class(strategy)
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
        """Return the ranks of a first or last stage; of several types some of each, for all such stages tie alike."""
        types = self.costs.cluster.node_type_of_rank
        pools = [pool[::-1] if last else pool for pool in pools_of(self.costs.cluster) if types[pool[0]] in node_types]
        in_turn = [rank for turn in zip_longest(*pools) for rank in turn if rank is not None]
        return tuple(sorted(in_turn[:width]))


def _apart(before: _End, behind: _End, first: tuple[int, ...], last: tuple[int, ...]) -> bool:
    """Return whether the first and the last stage can be two; of stages that span types the ranks are not known."""
    if len(before.node_types) == len(behind.node_types) == 1:
        return not set(first) & set(last)
    return first != last
