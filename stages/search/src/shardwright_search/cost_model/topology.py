"""Where the ranks of a pipeline stage lie on the nodes, and what kinds of group they form."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_formats.semantics.groups import groups_by_kind
from shardwright_formats.semantics.layout import Layout
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.hardware_profile import GroupKind


class StageTopology(NamedTuple):
    """How many neighbouring ranks of a stage share each node: stages that lie alike cost alike."""

    node_type: str
    on_each_node: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.on_each_node)


def stage_topology(cluster: Cluster, ranks: Sequence[int]) -> StageTopology:
    """Of a stage's ranks; of several node types with one device the first is named.

    Raises BadInput where the devices differ: the ranks' times would.
    """
    nodes, types = cluster.node_of_rank, cluster.node_type_of_rank
    runs = [tuple(run) for _, run in groupby(ranks, key=nodes.__getitem__)]
    names = dict.fromkeys(types[run[0]] for run in runs)
    if len({cluster.node_types[name].device for name in names}) > 1:
        what = f"a pipeline stage lies on nodes of {' and '.join(names)}, whose devices differ"
        raise BadInput(f"cluster {cluster.name}", what, "plan stages on nodes of one type each")
    return StageTopology(types[ranks[0]], tuple(map(len, runs)))


@lru_cache(maxsize=4096)
def tp_group_kinds(topology: StageTopology, tp_size: int, consecutive: bool) -> tuple[GroupKind, ...]:
    """The kinds of a stage's tensor-parallel groups."""
    layout = Layout(topology.size, tp_size, consecutive, False)
    return kinds_of(topology, [layout.holders(index) for index in range(layout.dp_size)])


class DataGroupKinds(NamedTuple):
    """The kinds of a stage's data-parallel groups, of ranks of equal tensor-parallel index."""

    shards: tuple[GroupKind, ...]
    """Of neighbours among them that share a layer's states out."""
    replicas: tuple[GroupKind, ...]
    """Of those that hold the same part."""


@lru_cache(maxsize=4096)
def data_group_kinds(topology: StageTopology, tp_size: int, consecutive: bool, shards: int) -> DataGroupKinds:
    """Where the states are cut into so many parts: each group of so many ranks holds all of them."""
    layout = Layout(topology.size, tp_size, consecutive, False)
    holders = np.array([layout.holders(index) for index in range(layout.dp_size)])
    groups = holders.T.reshape(tp_size, -1, shards)
    replicas = groups.swapaxes(1, 2)
    return DataGroupKinds(*(kinds_of(topology, own.reshape(-1, own.shape[2])) for own in (groups, replicas)))


def kinds_of(topology: StageTopology, groups: Iterable[Sequence[int]] | np.ndarray) -> tuple[GroupKind, ...]:
    """The kinds of equally large groups of ranks, counted inside the stage."""
    nodes = np.repeat(np.arange(len(topology.on_each_node)), topology.on_each_node)
    return tuple(sorted(groups_by_kind(groups if isinstance(groups, np.ndarray) else list(groups), nodes)))
