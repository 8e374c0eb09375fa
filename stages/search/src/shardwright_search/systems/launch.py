"""Scripts that start Megatron-LM on the nodes of a plan: by hand, in Docker, on Slurm, on Slurm with Enroot.

Megatron-LM takes ranks for the pipeline in their order, and torchrun gives each node the ranks that follow those of the
node before, however many each has. A plan may take up the nodes of a cluster in another order than the cluster's own.

Options are those of torchrun (torch 2.11), srun and sbatch (22.05; heterogeneous jobs since 17.11, by this name since
20.02), Pyxis (its wiki of November 2025) and `docker run`. Texts that do not depend on the plan are in `scripts/`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.io import BadInput, read_bytes
from shardwright.types import MIB, Cluster, NodeGroup, Plan
from shardwright_search.systems.exporting import Exported

_PLAN, _HOSTS, _SRUN = "#@plan@\n", "#@hosts@\n", "#@srun@\n"
_FEATURE = re.compile(r"[A-Za-z0-9_.-]+")
"""Pattern of a node type by whose name Slurm can be asked for nodes."""
_MAX_HOSTS_BYTES = 64 * MIB
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REMEDY = "give one host name and its node type a line"
_LISTS = """\
export NODES=
for list in {lists}; do
    NODES+=$(scontrol show hostnames "$list" | tr '\\n' ' ')
done
"""
_USAGE = "# Start the plan on Slurm: in this folder, PRETRAIN=... sbatch slurm.sh [ARGUMENT OF MEGATRON-LM]...\n"
_USAGE_OF_ENROOT = """\
# Start the plan on Slurm with Pyxis: in this folder, IMAGE=... PRETRAIN=... sbatch slurm_enroot.sh [ARGUMENT]...
#   IMAGE    an image with torch and Megatron-LM: [REGISTRY#]NAME[:TAG], or the path of a .sqsh file
#   MOUNTS   folders that it sees beside this one: SOURCE:PLACE[,SOURCE:PLACE]...
"""
_CONTAINER = (
    '--container-image="${IMAGE:?is not set}"',
    '--container-mounts="$PWD:$PWD${MOUNTS:+,$MOUNTS}"',
)
"""Options of Pyxis."""


class Node(NamedTuple):
    """A node, in the order in which nodes are numbered."""

    node_type: str
    host: str | None
    """Name of the host; None where the user has named none."""
    ranks: range


class Launch(NamedTuple):
    """Files of a folder by name, and points that the user has to see to, a line each."""

    files: dict[str, str]
    notes: tuple[str, ...]


def scripts_of(
    export: Callable[[Plan, object], Exported], plan: Plan, plan_file: object, hosts: Path | None
) -> tuple[Exported, Launch]:
    """Return the arguments of a plan whose ranks are numbered as its pipeline takes up nodes, and the scripts for it.

    Raises BadInput where a node has no GPU, where nothing says which nodes of Slurm are of which type, for a bad file
    of hosts, and for the first thing that Megatron-LM cannot express.
    """
    plan = in_pipeline_order(plan, plan_file)
    exported = export(plan, plan_file)
    nodes = _nodes(plan.cluster, None if hosts is None else read_hosts(hosts, plan.cluster))
    _check_types(plan.cluster, nodes, plan_file)
    header = _sbatch(plan, nodes)
    groups = len(plan.cluster.nodes)
    return exported, Launch(
        {
            "nodes.txt": _node_list(plan, nodes),
            "node.sh": _script("node.sh", {_PLAN: _plan_of_node(plan, exported, nodes)}),
            "docker.sh": _script("docker.sh", {}),
            "slurm.sh": _slurm(header + _USAGE, nodes, groups, ()),
            "slurm_enroot.sh": _slurm(header + _USAGE_OF_ENROOT, nodes, groups, _CONTAINER),
        },
        tuple(_notes(plan, nodes)),
    )


def _check_types(cluster: Cluster, nodes: Sequence[Node], plan_file: object) -> None:
    for name in {node.node_type: None for node in nodes}:
        if cluster.node_types[name].on_cpu:
            raise BadInput(plan_file, f"node type {name} has no GPU, which Megatron-LM needs", "plan for GPUs")
        if nodes[0].host is None and len(cluster.nodes) > 1 and _FEATURE.fullmatch(name) is None:
            raise BadInput(plan_file, f"node type {name!r} is not the name of a feature in Slurm", "pass --hosts")


def _node_list(plan: Plan, nodes: Sequence[Node]) -> str:
    lines = [f"# Nodes of plan {_on_one_line(plan.name)} in the order of their ranks: host, node type."]
    for i, node in enumerate(nodes):
        first, last = plan.stage_of_rank(node.ranks[0]), plan.stage_of_rank(node.ranks[-1])
        stages = f"pipeline stage {first}" if first == last else f"pipeline stages {first} to {last}"
        lines.append(f"# node {i}: ranks {node.ranks[0]} to {node.ranks[-1]}, {stages}")
        alone = "localhost" if len(nodes) == 1 else f"<host-{i}>"
        lines.append(f"{node.host or alone} {_on_one_line(node.node_type)}")
    return "\n".join(lines) + "\n"


def _plan_of_node(plan: Plan, exported: Exported, nodes: Sequence[Node]) -> str:
    """Return the plan's part of `node.sh`: sizes of the nodes, the arguments, and variables of the environment."""
    arguments = "".join(f"    {line}\n" for line in exported.text.splitlines())
    notes = "".join(f"# {_on_one_line(note)}\n" for note in exported.notes)
    ranks = " ".join(str(len(node.ranks)) for node in nodes)
    set_up = "".join(f"{line}\n" for line in exported.environment)
    return f"# Plan {_on_one_line(plan.name)}:\n{notes}ranks=({ranks})\narguments=(\n{arguments})\n{set_up}"


def _sbatch(plan: Plan, nodes: Sequence[Node]) -> str:
    """Return the options of sbatch: neighbours of one type are a component of a heterogeneous job."""
    components = []
    for name, same in groupby(nodes, key=lambda node: node.node_type):
        group = list(same)
        options = [
            f"--nodes={len(group)}",
            "--ntasks-per-node=1",
            f"--gpus-per-node={len(group[0].ranks)}",
            "--exclusive",
            "--mem=0",
        ]
        if group[0].host is not None:
            options.append(f"--nodelist={','.join(str(node.host) for node in group)}")
        elif len(plan.cluster.nodes) > 1:
            options.append(f"--constraint={name}")
        components.append("".join(f"#SBATCH {option}\n" for option in options))
    job = re.sub(r"[^A-Za-z0-9_.-]+", "-", plan.name)
    return f"#SBATCH --job-name={job}\n" + "#SBATCH hetjob\n".join(components)


def _slurm(header: str, nodes: Sequence[Node], groups: int, container: Sequence[str]) -> str:
    names = [f'"$SLURM_JOB_NODELIST{f"_HET_GROUP_{i}" if groups > 1 else ""}"' for i in range(groups)]
    hosts = "" if nodes[0].host is not None else _LISTS.format(lists=" ".join(names))
    among = [f"--het-group=0-{groups - 1}"] if groups > 1 else []
    srun = ["exec srun", *among, "--cpu-bind=none --kill-on-bad-exit=1", *container, 'bash "$PWD/node.sh" "$@"']
    return _script("slurm.sh", {_PLAN: header, _HOSTS: hosts, _SRUN: " \\\n    ".join(srun) + "\n"})


def _notes(plan: Plan, nodes: Sequence[Node]) -> Iterator[str]:
    if nodes[0].host is not None:
        return
    if len(nodes) > 1:
        yield "write the hosts in nodes.txt, or pass --hosts; slurm.sh takes those that Slurm gives"
    if len(plan.cluster.nodes) > 1:
        types = ", ".join({node.node_type: None for node in nodes})
        yield f"slurm.sh takes {types} for features of Slurm's nodes (--constraint): change what your site calls them"


def _script(name: str, parts: dict[str, str]) -> str:
    text = files(__package__).joinpath("scripts", name).read_text(encoding="utf-8")
    for placeholder, part in parts.items():
        text = text.replace(placeholder, part, 1)
    return text


def _on_one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def in_pipeline_order(plan: Plan, plan_file: object) -> Plan:
    """Return the plan with nodes, and so ranks, numbered in the order in which its pipeline takes them up.

    Raises BadInput where no order of the nodes does: torchrun cannot give a node ranks that do not follow one another.
    """
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    node_of = plan.cluster.node_of_rank
    nodes = [node for node, _ in groupby(ranks, key=node_of.__getitem__)]
    ranks_of = {node: list(same) for node, same in groupby(range(plan.world_size), key=node_of.__getitem__)}
    in_turn = [rank for node in nodes for rank in ranks_of[node]]
    if in_turn != ranks:
        node = node_of[next(rank for rank, other in zip(ranks, in_turn, strict=False) if rank != other)]
        problem = f"torchrun cannot number the ranks of node {node} in the order of the pipeline stages"
        raise BadInput(plan_file, problem, "plan stages that take up one node after the other")
    types = [plan.cluster.node_type_of_rank[node_of.index(node)] for node in nodes]
    groups = tuple(NodeGroup(node_type=name, count=len(list(same))) for name, same in groupby(types))
    cluster = Cluster(name=plan.cluster.name, nodes=groups, node_types=plan.cluster.node_types)
    number = {rank: i for i, rank in enumerate(ranks)}
    stages = tuple(replace(stage, ranks=tuple(number[rank] for rank in stage.ranks)) for stage in plan.stages)
    return replace(plan, cluster=cluster, stages=stages)


def _nodes(cluster: Cluster, hosts: Mapping[str, str] | None) -> list[Node]:
    """Return the nodes of a cluster in their order; hosts of a type are taken in the order in which they are given."""
    left = {name: iter([host for host, kind in (hosts or {}).items() if kind == name]) for name in cluster.node_types}
    nodes, first = [], 0
    for node_type in (group.node_type for group in cluster.nodes for _ in range(group.count)):
        end = first + cluster.node_types[node_type].devices_per_node
        nodes.append(Node(node_type, None if hosts is None else next(left[node_type]), range(first, end)))
        first = end
    return nodes


def read_hosts(path: Path, cluster: Cluster) -> dict[str, str]:
    """Return node types by host, from a file of one `HOST TYPE` a line; `#` begins a comment of a line of its own.

    Raises BadInput naming the line that is none, and where hosts are not as many of each type as the cluster's nodes.
    """
    hosts: dict[str, str] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        host, _, node_type = line.strip().partition(" ")
        if not host or host.startswith("#"):
            continue
        where, node_type = f"line {number}", node_type.strip()
        if _HOST.fullmatch(host) is None:
            raise BadInput(path, f"{where}: {host!r} is not a host name", _REMEDY)
        if node_type not in cluster.node_types:
            known = ", ".join(sorted(cluster.node_types))
            raise BadInput(path, f"{where}: the plan's cluster has no node type {node_type!r}, only {known}", _REMEDY)
        if host in hosts:
            raise BadInput(path, f"{where}: host {host} stands twice", "name each host once")
        hosts[host] = node_type
    counts, wanted = Counter(hosts.values()), Counter[str]()
    for group in cluster.nodes:
        wanted[group.node_type] += group.count
    for name in cluster.node_types:
        if counts[name] != wanted[name]:
            problem = f"{counts[name]} hosts of type {name}, the plan's cluster has {wanted[name]} such nodes"
            raise BadInput(path, problem, "name each node of the plan's cluster")
    return hosts


def _text(path: Path) -> str:
    try:
        return read_bytes(path, _MAX_HOSTS_BYTES).decode().replace("\t", " ")
    except UnicodeDecodeError:
        raise BadInput(path, "is not text", _REMEDY) from None
