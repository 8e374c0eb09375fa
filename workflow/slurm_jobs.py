"""Slurm resources of a job that starts ranks: nodes of several types are the components of one heterogeneous job."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from configuration_types import ClusterNodes, NodeKind, Slurm

_NAMED = {"slurm_partition": "-p", "slurm_account": "-A", "constraint": "-C"}
"""Resources that are left to the profile where no node type sets them, and the options of sbatch they become."""


class Component(NamedTuple):
    """A component: equal nodes that follow one another in rank order."""

    nodes: int
    slurm: Slurm

    def named(self, defaults: Mapping[str, str]) -> dict[str, str]:
        """Return the resources of `_NAMED` that the node type sets, or else these defaults."""
        said = zip(_NAMED, (self.slurm.partition, self.slurm.account, self.slurm.constraint), strict=True)
        found = ((name, defaults.get(name) if own is None else own) for name, own in said)
        return {name: value for name, value in found if value is not None}


def components_of(cluster: ClusterNodes, node_types: Mapping[str, NodeKind]) -> tuple[Component, ...]:
    """Return a cluster's nodes in rank order, neighbours of one type together; one node where it stands for all."""
    if cluster.all_nodes_here:
        return (Component(1, node_types[cluster.node_types[0]].slurm),)
    return tuple(
        Component(sum(group.count for group in same), node_types[name].slurm)
        for name, same in groupby(cluster.nodes, key=lambda group: group.node_type)
    )


def job_resources(
    components: Sequence[Component], runtime_min: int, defaults: Mapping[str, str] | None = None, each: str = ""
) -> dict[str, int | str]:
    """Return the resources of a job on these nodes for Snakemake: `runtime` in minutes, `mem_mb` for each node.

    `mpi` tells the plugin that the job starts srun itself; on_nodes.sh is told `node_groups`, as one word. The other
    resources are the first component's; those behind it stand in `slurm_extra`, which comes last in the options of
    sbatch. `defaults` are the resources of the profile, which hold where a node type does not say them; `each` are
    further options of all.
    """
    first, *others = components
    profile = defaults or {}
    minutes = min(component.slurm.runtime_min or runtime_min for component in components)
    # Slurm loses a job of which some components may be queued again and others not.
    each = " ".join(filter(None, ("--requeue" if others else "", each)))
    asked: dict[str, int | str] = {
        "nodes": first.nodes,
        "tasks": first.nodes,
        "mpi": "srun" if first.nodes > 1 else "",
        "node_groups": " ".join(_started(component, sum(c.nodes for c in components)) for component in components),
        "cpus_per_task": first.slurm.cpus_per_node,
        "mem_mb": first.slurm.mem_mb,
        "runtime": minutes,
        "slurm_extra": " : ".join(
            [_extra(first, each), *(_options(other, minutes, profile, each) for other in others)]
        ),
    }
    return asked | first.named(profile)


def _started(component: Component, nodes: int) -> str:
    """Return a component in the form that on_nodes.sh reads; a single node needs no interface."""
    interface = component.slurm.socket_interface if nodes > 1 else None
    at = f"@{interface}" if interface else ""
    return f"{component.nodes}x{component.slurm.cpus_per_node}{at}"


def _extra(component: Component, each: str) -> str:
    """Return the options of sbatch that the plugin has no resource for."""
    gpus = component.slurm.gpus_per_node
    return " ".join(filter(None, ("--exclusive", f"--gpus-per-node={gpus}" if gpus else "", each)))


def _options(component: Component, minutes: int, defaults: Mapping[str, str], each: str) -> str:
    """Return all options of a component that the plugin knows nothing of.

    It refuses in `slurm_extra` what it says itself, of the first component: these are spelled so that it does not.
    """
    slurm, nodes = component.slurm, component.nodes
    named = component.named(defaults).items()
    said = " ".join(f"{_NAMED[name]}{shlex.quote(value)}''" for name, value in named)
    sizes = rf"-N{nodes} -n{nodes} -c{slurm.cpus_per_node} -t{minutes} --mem\={slurm.mem_mb}"
    return " ".join(filter(None, (_extra(component, each), said, sizes)))
