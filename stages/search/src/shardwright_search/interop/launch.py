"""Scripts that start Megatron-LM on the nodes of a plan: by hand, in Docker, on Slurm, on Slurm with Enroot.

Options are those of torchrun (torch 2.11), srun and sbatch (22.05; heterogeneous jobs since 17.11, by this name since
20.02), Pyxis (its wiki of November 2025) and `docker run`. What does not depend on the plan stands in `scripts/`.
"""

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.types import Cluster, Plan
from shardwright_search.interop.node_order import Node
from shardwright_search.interop.target import Exported

_PLAN, _HOSTS, _SRUN = "#@plan@\n", "#@hosts@\n", "#@srun@\n"
_FEATURE = re.compile(r"[A-Za-z0-9_.-]+")
"""A node type by whose name Slurm can be asked for nodes."""
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


class Launch(NamedTuple):
    """Files of a folder by name, and what the user has to see to, a line each."""

    files: dict[str, str]
    notes: tuple[str, ...]


def launch_of(plan: Plan, exported: Exported, nodes: Sequence[Node], plan_file: object) -> Launch:
    """The scripts for a plan whose ranks are numbered as its pipeline takes them up, and for what is exported of it.

    Raises BadInput where a node has no GPU, or where nothing says which nodes of Slurm are of which type.
    """
    _check_types(plan.cluster, nodes, plan_file)
    header = _sbatch(plan, nodes)
    groups = len(plan.cluster.nodes)
    return Launch(
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
            raise BadInput(plan_file, f"node type {name!r} is no name of a feature of Slurm's", "pass --hosts")


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
    """What of `node.sh` is the plan's: sizes of the nodes, the arguments, and variables of the environment."""
    arguments = "".join(f"    {line}\n" for line in exported.text.splitlines())
    notes = "".join(f"# {_on_one_line(note)}\n" for note in exported.notes)
    ranks = " ".join(str(len(node.ranks)) for node in nodes)
    set_up = "".join(f"{line}\n" for line in exported.environment)
    return f"# Plan {_on_one_line(plan.name)}:\n{notes}ranks=({ranks})\narguments=(\n{arguments})\n{set_up}"


def _sbatch(plan: Plan, nodes: Sequence[Node]) -> str:
    """What the nodes are asked of Slurm with: neighbours of one type are a component of a heterogeneous job."""
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
    for mark, part in parts.items():
        text = text.replace(mark, part, 1)
    return text


def _on_one_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
