"""Groups of a layer's parameters that are sharded in the same way: experts, and all others."""

from collections.abc import Set
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.types import LayerStrategy, LayerType, Strategy


class ParameterGroup(NamedTuple):
    """The parameters of a layer type that are sharded by one strategy."""

    kind: LayerType
    """The type with only these parameters; for experts, with the parameters of one group of experts."""
    strategy: Strategy

    def without(self, names: Set[str]) -> "ParameterGroup":
        """Return the group without the parameters of these names."""
        kept = tuple(p for p in self.kind.parameters if p.name not in names)
        return self._replace(kind=replace(self.kind, parameters=kept))

    def uncut(self, kind: LayerType) -> LayerType:
        """Return the layer's type with only the group's parameters, unsharded."""
        names = {p.name for p in self.kind.parameters}
        return replace(kind, parameters=tuple(p for p in kind.parameters if p.name in names))


def parameter_groups(kind: LayerType, strategy: Strategy) -> tuple[ParameterGroup, ...]:
    """Return the groups of a layer's parameters, experts last."""
    if not isinstance(strategy, LayerStrategy) or strategy.experts is UNSET:
        return (ParameterGroup(kind, strategy),)
    return _with_experts(kind, strategy)


def _with_experts(kind: LayerType, strategy: LayerStrategy) -> tuple[ParameterGroup, ...]:
    grid = strategy.expert_grid
    assert grid is not None
    experts = tuple(p.of_experts(grid.ep_size) for p in kind.parameters if p.ep_dim is not UNSET)
    others = tuple(p for p in kind.parameters if p.ep_dim is UNSET)
    return (
        ParameterGroup(replace(kind, parameters=others), replace(strategy, experts=UNSET)),
        ParameterGroup(replace(kind, parameters=experts), grid),
    )
