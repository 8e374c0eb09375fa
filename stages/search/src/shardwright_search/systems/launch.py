"""Files that start a system on the nodes of a plan: by hand, in Docker, on Slurm, with Enroot, and in other `places`.

Systems take ranks for the pipeline in their order, and torchrun gives each node the ranks after the ranks of the
node before, however many each has. A plan may take up the nodes of a cluster in another order than the cluster's own.

Options are those of torchrun (torch 2.11), srun and sbatch (22.05; heterogeneous jobs since 17.11, by this name since
20.02), Pyxis (its wiki of November 2025) and `docker run`. Texts that do not depend on the plan are in `scripts/`.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.io import BadInput, document_text, read_bytes
from shardwright.types import MIB, Cluster, NodeGroup, Plan
from shardwright_search.systems.exporting import Exported
from shardwright_search.systems.places import Carried, NodesOfAType, one_line, places_of

_PLACE = re.compile(r"#@(\w+)@\n|@(\w+)@")
"""A placeholder in a script: a line of its own, or a word."""
_FEATURE = re.compile(r"[A-Za-z0-9_.-]+")
"""Pattern of names of node types by which nodes can be requested from Slurm."""
_MAX_HOSTS_BYTES = 64 * MIB
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REMEDY = "give one host name and its node type a line"
_LISTS = """\
export NODES=
for list in {lists}; do
    NODES+=$(scontrol show hostnames "$list" | tr '\\n' ' ')
done
"""
_USAGE = "# Start the plan on Slurm: in this folder, {given}sbatch slurm.sh [ARGUMENT]...\n"
_USAGE_OF_ENROOT = """\
# Start the plan on Slurm with Pyxis: in this folder, IMAGE=... {given}sbatch slurm_enroot.sh [ARGUMENT]...
#   IMAGE    an image with torch and what the plan is for: [REGISTRY#]NAME[:TAG], or the path of a .sqsh file
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
    """Name of the host; None if the user has named none."""
    ranks: range


class Launch(NamedTuple):
    """Files of a folder by name, and points that the user has to take care of, one per line."""

    files: dict[str, str]
    notes: tuple[str, ...]


_TORCHRUN = """\
# Where it is 1, torchrun takes the other nodes for as large as this one.
unset TORCH_ELASTIC_WORKER_IDENTICAL
exec torchrun --nnodes "${#ranks[@]}" --node_rank "$node" --nproc_per_node "${ranks[node]}" \\
    --master_addr "$master" --master_port "${MASTER_PORT:-29500}" """


_MODULES = 'export PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}"\n'


class Program(NamedTuple):
    """The program that the ranks of a node run, as shell words; `$folder` is the folder of the files."""

    words: str
    """Words after torchrun's options; with `alone`, the whole command, which may use `ranks`, `node` and `master`."""
    variables: Mapping[str, str] = {}
    """Variables that the user sets, with what they mean."""
    arguments: str = ""
    """Lines of words for the array `arguments`, in the place of the system's file in the folder."""
    alone: bool = False

    @property
    def start(self) -> str:
        """Return the last lines of the script of a node."""
        return f'{"exec " if self.alone else _TORCHRUN}{self.words} "$@"\n'


def launch_of(
    program: Program,
    exported: Exported,
    file_name: str,
    plan: Plan,
    plan_file: object,
    hosts: Path | None = None,
    spot: bool = False,
) -> Launch:
    """Return the files that start a plan, with ranks numbered as by torchrun; `spot`: on spot nodes.

    Raises BadInput if a node has no GPU, if nothing says which type a node of Slurm has, and for a bad file of hosts.
    """
    nodes = _nodes(plan.cluster, None if hosts is None else read_hosts(hosts, plan.cluster))
    _check_types(plan.cluster, nodes, plan_file)
    header = _sbatch(plan, nodes)
    groups = len(plan.cluster.nodes)
    given = "".join(f"{name}=... " for name in program.variables)
    own = dict(exported.beside) | ({} if program.arguments else {file_name: exported.text})
    carried = {
        **own,
        "nodes.txt": _node_list(plan, nodes),
        "node.sh": _node_script(plan, program, exported, nodes, own),
    }
    places = places_of(plan, _groups(nodes), Carried(carried, program.variables), spot)
    return Launch(
        {
            **carried,
            "docker.sh": _script("docker.sh", names="".join(f"{name} " for name in program.variables)),
            "slurm.sh": _slurm(header + _USAGE.format(given=given), nodes, groups, ()),
            "slurm_enroot.sh": _slurm(header + _USAGE_OF_ENROOT.format(given=given), nodes, groups, _CONTAINER),
            **places.files,
        },
        (*_notes(plan, nodes), *places.notes),
    )


def _groups(nodes: Sequence[Node]) -> list[NodesOfAType]:
    """Return the nodes in runs of neighbours of one type."""
    groups, first = [], 0
    for name, same in groupby(nodes, key=lambda node: node.node_type):
        each = list(same)
        groups.append(NodesOfAType(name, first, len(each), len(each[0].ranks)))
        first += len(each)
    return groups


def _node_script(plan: Plan, program: Program, exported: Exported, nodes: Sequence[Node], own: Collection[str]) -> str:
    """Return the script of a node; its program can import the modules among the plan's `own` files."""
    given = program.variables.items()
    return _script(
        "node.sh",
        variables="".join(f"#   {name:13} {meaning}\n" for name, meaning in given),
        checks="".join(f'[[ -n ${{{name}:-}} ]] || refuse "{name}: is not set" "give the {m}"\n' for name, m in given),
        plan=_plan_of_node(plan, program, exported, nodes),
        start=_MODULES * any(name.endswith(".py") for name in own) + program.start,
    )


def _check_types(cluster: Cluster, nodes: Sequence[Node], plan_file: object) -> None:
    for name in {node.node_type: None for node in nodes}:
        if cluster.node_types[name].on_cpu:
            raise BadInput(plan_file, f"node type {name} has no GPU, which these scripts ask for", "plan for GPUs")
        if nodes[0].host is None and len(cluster.nodes) > 1 and _FEATURE.fullmatch(name) is None:
            raise BadInput(plan_file, f"node type {name!r} is not the name of a feature in Slurm", "pass --hosts")


def _node_list(plan: Plan, nodes: Sequence[Node]) -> str:
    lines = [f"# Nodes of plan {one_line(plan.name)} in the order of their ranks: host, node type."]
    for i, node in enumerate(nodes):
        first, last = plan.stage_of_rank(node.ranks[0]), plan.stage_of_rank(node.ranks[-1])
        stages = f"pipeline stage {first}" if first == last else f"pipeline stages {first} to {last}"
        lines.append(f"# node {i}: ranks {node.ranks[0]} to {node.ranks[-1]}, {stages}")
        alone = "localhost" if len(nodes) == 1 else f"<host-{i}>"
        lines.append(f"{node.host or alone} {one_line(node.node_type)}")
    return "\n".join(lines) + "\n"


def _plan_of_node(plan: Plan, program: Program, exported: Exported, nodes: Sequence[Node]) -> str:
    """Return the plan's part of `node.sh`: sizes of the nodes, arguments if any, and variables of the environment."""
    arguments = "".join(f"    {line}\n" for line in program.arguments.splitlines())
    arguments = f"arguments=(\n{arguments})\n" if arguments else ""
    notes = "".join(f"# {one_line(note)}\n" for note in exported.notes)
    ranks = " ".join(str(len(node.ranks)) for node in nodes)
    set_up = "".join(f"{line}\n" for line in exported.environment)
    return f"# Plan {one_line(plan.name)}:\n{notes}ranks=({ranks})\n{arguments}{set_up}"


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
    return _script("slurm.sh", plan=header, hosts=hosts, srun=" \\\n    ".join(srun) + "\n")


def _notes(plan: Plan, nodes: Sequence[Node]) -> Iterator[str]:
    if nodes[0].host is not None:
        return
    if len(nodes) > 1:
        yield "write the hosts in nodes.txt, or pass --hosts; slurm.sh takes those that Slurm gives"
    if len(plan.cluster.nodes) > 1:
        types = ", ".join({node.node_type: None for node in nodes})
        yield f"slurm.sh takes {types} for features of Slurm's nodes (--constraint): change what your site calls them"


def _script(name: str, **parts: str) -> str:
    """Return a script template with its placeholders filled."""
    text = files(__package__).joinpath("scripts", name).read_text(encoding="utf-8")
    return _PLACE.sub(lambda place: parts.get(place[1] or place[2], place[0]), text)


def in_pipeline_order(plan: Plan, plan_file: object) -> Plan:
    """Return the plan with nodes, and so ranks, numbered in pipeline order.

    Raises BadInput if no order of the nodes allows that: torchrun gives each node consecutive ranks.
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
    """Return the nodes of a cluster in order, with hosts assigned by type in the given order."""
    left = {name: iter([host for host, kind in (hosts or {}).items() if kind == name]) for name in cluster.node_types}
    nodes, first = [], 0
    for node_type in (group.node_type for group in cluster.nodes for _ in range(group.count)):
        end = first + cluster.node_types[node_type].devices_per_node
        nodes.append(Node(node_type, None if hosts is None else next(left[node_type]), range(first, end)))
        first = end
    return nodes


def read_hosts(path: Path, cluster: Cluster) -> dict[str, str]:
    """Return node types by host, from a file with one `HOST TYPE` per line; lines that begin with `#` are comments.

    Raises BadInput naming a malformed line, and if a type has more or fewer hosts than the cluster has nodes of it.
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
            raise BadInput(path, f"{where}: host {host} is listed twice", "name each host once")
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


# The files that start a plan in this project's own runtime.


PLAN_FILE = "plan.json"
_WORDS = (
    f'shardwright train run "$folder/{PLAN_FILE}" --nnodes "${{#ranks[@]}}" --node-rank "$node" \\\n'
    '    --rendezvous "$master:${MASTER_PORT:-29500}"'
)
_SECRET = {"SHARDWRIGHT_SECRET": "secret by which nodes know one another: the same 32 or more random characters on all"}
_NOTE = "node.sh takes --data, --steps, --checkpoints and --out of `shardwright train run` (elsewhere ARGUMENTS does)"


def own_launch(plan: Plan, plan_file: object, spot: bool = False) -> Launch:
    """Return the files that start a plan by `shardwright train run`; `spot`: on spot nodes.

    Raises BadInput as `launch_of` does.
    """
    exported = Exported(document_text(plan), ())
    program = Program(_WORDS, _SECRET if plan.cluster.num_nodes > 1 else {}, alone=True)
    launch = launch_of(program, exported, PLAN_FILE, plan, plan_file, spot=spot)
    return launch._replace(notes=(_NOTE, *launch.notes))
