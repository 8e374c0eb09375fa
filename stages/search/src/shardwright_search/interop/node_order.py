"""In which order nodes are started for a system that numbers ranks by pipeline stage, and which hosts they are.

Megatron-LM takes ranks for the pipeline in their order, and torchrun gives each node the ranks that follow those of the
node before, however many each has. A plan may take up the nodes of a cluster in another order than the cluster's own.
"""

import re
from collections import Counter, deque
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_formats.io import BadInput, read_bytes
from shardwright_formats.types import Cluster, NodeGroup, Plan

_MAX_HOSTS_BYTES = 64 * 1024 * 1024
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REMEDY = "give one host name and its node type a line"


class Node(NamedTuple):
    """One node, at its place in the order in which nodes are numbered."""

    node_type: str
    host: str | None
    """None where the user has named none."""
    ranks: range


def in_pipeline_order(plan: Plan, plan_file: object) -> Plan:
    """The plan with nodes, and so ranks, numbered in the order in which its pipeline takes them up.

    Raises BadInput where no order of the nodes does: torchrun cannot give a node ranks that do not follow one another.
    """
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    node_of = plan.cluster.node_of_rank
    nodes = [node for node, _ in groupby(ranks, key=node_of.__getitem__)]
    own = {node: list(same) for node, same in groupby(range(plan.world_size), key=node_of.__getitem__)}
    in_turn = [rank for node in nodes for rank in own[node]]
    if in_turn != ranks:
        node = node_of[next(rank for rank, other in zip(ranks, in_turn, strict=False) if rank != other)]
        what = f"torchrun cannot number the ranks of node {node} in the order of the pipeline stages"
        raise BadInput(plan_file, what, "plan stages that take up one node after the other")
    types = [plan.cluster.node_type_of_rank[node_of.index(node)] for node in nodes]
    groups = tuple(NodeGroup(node_type=name, count=len(list(same))) for name, same in groupby(types))
    cluster = Cluster(name=plan.cluster.name, nodes=groups, node_types=plan.cluster.node_types)
    number = {rank: i for i, rank in enumerate(ranks)}
    stages = tuple(replace(stage, ranks=tuple(number[rank] for rank in stage.ranks)) for stage in plan.stages)
    return replace(plan, cluster=cluster, stages=stages)


def nodes_of(cluster: Cluster, hosts: Mapping[str, str] | None) -> list[Node]:
    """The nodes of a cluster in their order; hosts of a type are taken in the order in which they are given."""
    left: dict[str, deque[str]] = {name: deque() for name in cluster.node_types}
    for host, node_type in (hosts or {}).items():
        left[node_type].append(host)
    found, first = [], 0
    for group in cluster.nodes:
        for _ in range(group.count):
            end = first + cluster.node_types[group.node_type].devices_per_node
            own = None if hosts is None else left[group.node_type].popleft()
            found.append(Node(group.node_type, own, range(first, end)))
            first = end
    return found


def read_hosts(path: Path, cluster: Cluster) -> dict[str, str]:
    """Node types by host, from a file of one `HOST TYPE` a line; `#` begins a comment of a line of its own.

    Raises BadInput naming the line that is none, and where hosts are not as many of each type as the cluster's nodes.
    """
    hosts: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        host, _, node_type = line.strip().partition(" ")
        if not host or host.startswith("#"):
            continue
        where, node_type = f"line {number}", node_type.strip()
        if _HOST.fullmatch(host) is None:
            raise BadInput(path, f"{where}: {host!r} is no host name", _REMEDY)
        if node_type not in cluster.node_types:
            known = ", ".join(sorted(cluster.node_types))
            what = f"{where}: the plan's cluster has no node type {node_type!r}, only {known}"
            raise BadInput(path, what, _REMEDY)
        if host in hosts:
            raise BadInput(path, f"{where}: host {host} stands twice", "name each host once")
        hosts[host] = node_type
    _check_counts(path, Counter(hosts.values()), cluster)
    return hosts


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _MAX_HOSTS_BYTES).decode().replace("\t", " ")
    except UnicodeDecodeError:
        raise BadInput(path, "is no text", _REMEDY) from None


def _check_counts(path: Path, found: Counter[str], cluster: Cluster) -> None:
    asked: Counter[str] = Counter()
    for group in cluster.nodes:
        asked[group.node_type] += group.count
    for name in cluster.node_types:
        if found[name] != asked[name]:
            what = f"{found[name]} hosts of type {name}, the plan's cluster has {asked[name]} such nodes"
            raise BadInput(path, what, "name each node of the plan's cluster")
