"""Groups of ranks on nodes, and the times of their messages in a hardware profile."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright.types.hardware_profile import CollectiveKey, GroupKind, HardwareProfile


def groups_by_kind(groups: ArrayLike, node_of_rank: Sequence[int] | NDArray[Any]) -> dict[GroupKind, NDArray[Any]]:
    """Return groups of ranks [groups, size] by their kind, which describes how a group's ranks are placed on nodes."""
    members, nodes = np.asarray(groups), np.asarray(node_of_rank)
    group, _, ranks = ranks_on_nodes(members, nodes)
    most = np.zeros(len(members), int)
    np.maximum.at(most, group, ranks)
    codes = 2 * most + (np.diff(members, axis=1) == 1).all(1)
    size = members.shape[1]
    return {GroupKind(size, int(c) // 2, bool(c % 2)): members[codes == c] for c in np.unique(codes)}


def ranks_on_nodes(groups: NDArray[Any], nodes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return, for each group and each of its nodes: the group, the node, and how many of its ranks are on the node."""
    nodes_of_members = nodes[groups]
    if (
        nodes_of_members[:, 1:] < nodes_of_members[:, :-1]
    ).any():  # most groups are in the order of their ranks, and sorting takes longest
        nodes_of_members = np.sort(nodes_of_members, axis=1)
    begins = np.ones(nodes_of_members.shape, bool)
    begins[:, 1:] = nodes_of_members[:, 1:] != nodes_of_members[:, :-1]
    firsts = np.flatnonzero(begins)
    return (
        firsts // nodes_of_members.shape[1],
        nodes_of_members.ravel()[firsts],
        np.diff(firsts, append=nodes_of_members.size),
    )


@lru_cache(maxsize=4096)
def nearest_measured(profile: HardwareProfile, key: CollectiveKey) -> CollectiveKey | None:
    """Return the measured key for a kind of message: the same key, else the fastest measured one that is not faster.

    Candidates have at least as many ranks as the key's group. If that group spans several nodes, they also have at most
    as many ranks per node, so that at least as many groups share a node's network. None if there is no candidate.
    """
    if key in profile.curves:
        return key
    group = key.group

    def rank(other: CollectiveKey) -> tuple[bool, bool, float]:
        sizes, times_s = profile.curves[other]
        return other.group.across_nodes, other.consecutive > key.consecutive, float(times_s[-1] / sizes[-1])

    slower = (
        other
        for other in profile.curves
        if other.collective == key.collective
        and other.group_size >= group.size
        and (not group.across_nodes or other.ranks_per_node <= group.ranks_per_node)
    )
    return min(slower, key=rank, default=None)


def seconds_on(profile: HardwareProfile, key: CollectiveKey, num_bytes: float) -> float:
    """Return the time of a measured kind of message: linear between sizes, constant below, the last slope above.

    If the time falls in the last segment because of noise, the bandwidth at the largest size is used instead.
    """
    sizes, times_s = profile.curves[key]
    if num_bytes <= sizes[-1]:
        return float(np.interp(num_bytes, sizes, times_s))
    slope = times_s[-1] / sizes[-1]
    if len(sizes) > 1 and times_s[-1] > times_s[-2]:
        slope = (times_s[-1] - times_s[-2]) / (sizes[-1] - sizes[-2])
    return float(times_s[-1] + (num_bytes - sizes[-1]) * slope)
