"""The placement of a pipeline stage's ranks on nodes, and the kinds of groups that they form."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardwright.plan.axes import Axis, ParameterAxes
from shardwright.plan.groups import groups_by_kind
from shardwright.types import Cluster
from shardwright.types.hardware_profile import GroupKind


class StageTopology(NamedTuple):
    """How many neighbouring ranks of a stage are on each node or NVLink domain; equal placements cost the same."""

    node_type: str
    """Node type of its ranks; if it spans several, the type whose costs are requested."""
    on_each_node: tuple[int, ...]
    node_types: tuple[str, ...] = ()
    """Node type of each node, if it spans several types."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return sum(self.on_each_node)

    @property
    def each_type(self) -> tuple["StageTopology", ...]:
        """Return the topology once for each node type of the stage; the slowest type determines common times."""
        names = dict.fromkeys(self.node_types or (self.node_type,))
        return tuple(self._replace(node_type=name) for name in names)

    @property
    def type_names(self) -> tuple[str, ...]:
        """Its node types, in the order of their names."""
        return tuple(sorted({*self.node_types} or {self.node_type}))

    def ranks_on(self, node_type: str) -> int:
        """Return the number of its ranks on a node type."""
        types = self.node_types or (self.node_type,) * len(self.on_each_node)
        return sum(ranks for name, ranks in zip(types, self.on_each_node, strict=True) if name == node_type)


def stage_topology(cluster: Cluster, ranks: Sequence[int]) -> StageTopology:
    """Return the topology of a stage's ranks."""
    nodes, types = cluster.domain_of_rank, cluster.node_type_of_rank
    runs = [tuple(run) for _, run in groupby(ranks, key=nodes.__getitem__)]
    names = tuple(types[run[0]] for run in runs)
    return StageTopology(names[0], tuple(map(len, runs)), names if len(set(names)) > 1 else ())


@lru_cache(maxsize=4096)
def axis_group_kinds(topology: StageTopology, axis: Axis) -> tuple[GroupKind, ...]:
    """Return the kinds of a stage's groups along an axis."""
    return kinds_of(topology, axis.groups(range(topology.size)))


class DataGroupKinds(NamedTuple):
    """The kinds of a stage's data-parallel groups, whose ranks have equal tensor-parallel index."""

    shards: tuple[GroupKind, ...]
    """Kinds of the groups of neighbours among them that share a layer's states out."""
    replicas: tuple[GroupKind, ...]
    """Kinds of the groups that hold the same part."""


@lru_cache(maxsize=4096)
def data_group_kinds(topology: StageTopology, axes: ParameterAxes) -> DataGroupKinds:
    """Return the kinds of the groups that shard a layer's states, and of the groups of replicas."""
    states = np.array(axes.states.groups(range(topology.size)))
    groups = states.reshape(len(states), axes.replicas, axes.shards)
    replicas = groups.swapaxes(1, 2)
    return DataGroupKinds(*(kinds_of(topology, each.reshape(-1, each.shape[2])) for each in (groups, replicas)))


def kinds_of(topology: StageTopology, groups: Iterable[Sequence[int]] | np.ndarray) -> tuple[GroupKind, ...]:
    """Return the kinds of equally large groups of ranks, counted inside the stage, with a rank of the node type."""
    nodes = np.repeat(np.arange(len(topology.on_each_node)), topology.on_each_node)
    members = groups if isinstance(groups, np.ndarray) else list(groups)
    if topology.node_types:
        ranks = np.asarray(members)
        on_type = np.array([name == topology.node_type for name in topology.node_types])[nodes]
        members = ranks[on_type[ranks].any(1)]
    return tuple(sorted(groups_by_kind(members, nodes))) if len(members) else ()
