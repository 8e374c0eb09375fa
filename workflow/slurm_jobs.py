"""Jobs of Slurm that start ranks: their resources, the signal before their time limit, and their state.

Nodes of several types are the components of one heterogeneous job.
"""

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import UNSET

from configuration_types import ClusterNodes, NodeKind, Slurm
from shardwright.io import BadInput, read_document
from shardwright.optimizers.registry import OPTIMIZERS
from shardwright.types import ITEMSIZE, Plan, Prediction, StepMetrics
from shardwright_train.checkpoints.folders import METRICS, folder_of_run

START_S = 30.0
"""Assumed seconds until the signal reaches the ranks and until they end, in addition to steps and saves."""
SAVE_BYTES_PER_S = 200e6
"""Bytes per second that one node writes to a shared file system: a low assumption, used until a save is measured."""
_MOST = 4
"""Divisor of a job's time: a stop in order may take at most that part of it, unless `grace_s` is set."""
_SAVES = 2
"""Number of saves to allow for: one may be in progress when the signal comes."""
_STEPS = 2
"""Number of steps to allow for: the one during which the signal comes, and one in case steps are slow."""
_NAMED = {"slurm_partition": "-p", "slurm_account": "-A", "constraint": "-C"}
"""Resources that Snakemake's profile sets if no node type does, with the options of sbatch that they become."""


class Component(NamedTuple):
    """A component of a heterogeneous job: nodes of one type that are consecutive in rank order."""

    nodes: int
    slurm: Slurm

    def named(self, defaults: Mapping[str, str]) -> dict[str, str]:
        """Return the resources of `_NAMED` that the node type sets, else their values in `defaults`."""
        set_here = zip(_NAMED, (self.slurm.partition, self.slurm.account, self.slurm.constraint), strict=True)
        values = ((name, defaults.get(name) if value is None else value) for name, value in set_here)
        return {name: value for name, value in values if value is not None}


def components_of(cluster: ClusterNodes, node_types: Mapping[str, NodeKind]) -> tuple[Component, ...]:
    """Return a cluster's nodes in rank order, grouped by type; one node if all ranks are started on one machine."""
    if cluster.all_nodes_here:
        return (Component(1, node_types[cluster.node_types[0]].slurm),)
    return tuple(
        Component(sum(group.count for group in same), node_types[name].slurm)
        for name, same in groupby(cluster.nodes, key=lambda group: group.node_type)
    )


def job_minutes(components: Sequence[Component], runtime_min: int) -> int:
    """Return the minutes of a job on these nodes: the minimum over their types, each by default `runtime_min`."""
    return min(component.slurm.runtime_min or runtime_min for component in components)


def job_resources(
    components: Sequence[Component], runtime_min: int, defaults: Mapping[str, str] | None = None, each: str = ""
) -> dict[str, int | str]:
    """Return the resources of a job on these nodes for Snakemake: `runtime` in minutes, `mem_mb` for each node.

    `mpi` tells the plugin that the job starts srun itself; `node_groups` is an argument of on_nodes.sh. The other
    resources describe the first component. The other components are in `slurm_extra`, which comes last in the options
    of sbatch. `defaults`: the resources of Snakemake's profile, used if a node type does not set them. `each`: further
    options of sbatch for every component.
    """
    first, *others = components
    profile = defaults or {}
    minutes = job_minutes(components, runtime_min)
    # Slurm loses a job if some of its components may be queued again and others may not.
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
    """Return the options of sbatch for which the plugin has no resource."""
    gpus = component.slurm.gpus_per_node
    return " ".join(filter(None, ("--exclusive", f"--gpus-per-node={gpus}" if gpus else "", each)))


def _options(component: Component, minutes: int, defaults: Mapping[str, str], each: str) -> str:
    """Return all options of a component that the plugin does not set itself.

    The plugin refuses options in `slurm_extra` that it sets itself for the first component. They are spelled here in a
    way that it does not recognize.
    """
    slurm, nodes = component.slurm, component.nodes
    named = component.named(defaults).items()
    said = " ".join(f"{_NAMED[name]}{shlex.quote(value)}''" for name, value in named)
    sizes = rf"-N{nodes} -n{nodes} -c{slurm.cpus_per_node} -t{minutes} --mem\={slurm.mem_mb}"
    return " ".join(filter(None, (_extra(component, each), said, sizes)))


def signal_lead_s(
    plan: Path, prediction: Path, checkpoints: Path, parent: Path | None, grace_s: float | None, job_min: int
) -> int:
    """Return the seconds before a job's end at which Slurm signals it: `grace_s`, else the duration of a stop in order.

    A stop takes two predicted steps, `START_S`, and two saves. A save takes as long as the longest one in the run's
    metrics, or else as long as the nodes need at an assumed rate. A stop gets at most a quarter of the job, and exactly
    that if the plan or its prediction cannot be used; a warning says so, with a remedy. `parent`: the checkpoint from
    which a run branches. Raises FileNotFoundError while the plan's files do not exist yet.
    """
    if grace_s is not None:
        return ceil(grace_s)
    for file in (plan, prediction):
        os.stat(str(file))
    most_s = 60 * job_min // _MOST
    try:
        planned = read_document(plan, Plan)
        step_s = _predicted_step_s(plan, planned, prediction)
    except BadInput as error:
        _warn_once(f"warning: {error}; until then a stop in order is given a quarter of the job's {job_min} min")
        return most_s
    save_s = _measured_save_s(folder_of_run(checkpoints, planned, parent) / METRICS)
    if save_s is None:
        rate = SAVE_BYTES_PER_S * planned.cluster.num_nodes
        stored = ITEMSIZE["float32"] * planned.model.parameter_count
        save_s = (stored + OPTIMIZERS[planned.optimizer].state_bytes(stored, "float32")) / rate
    needed_s = START_S + _STEPS * step_s + _SAVES * save_s
    if needed_s > most_s:
        _warn_once(
            f"warning: {plan}: a stop in order may take {ceil(needed_s)} s (two steps of {step_s:.0f} s, two saves of "
            f"{save_s:.0f} s), and gets a quarter of the job's {job_min} min: raise "
            "node_types.<name>.slurm.runtime_min, or set runs.<name>.grace_s to its duration"
        )
    return min(ceil(needed_s), most_s)


def _measured_save_s(metrics: Path) -> float | None:
    """Return the seconds of the longest save in a run's metrics; None if they have no save."""
    longest_s = None
    for number, line in enumerate(metrics.read_bytes().splitlines() if metrics.is_file() else (), start=1):
        if b'"save_s"' not in line or line[-1:] != b"}":  # the last line may be incomplete
            continue
        try:
            save_s = msgspec.json.decode(line, type=StepMetrics).save_s
        except (msgspec.DecodeError, RecursionError) as error:
            _warn_once(f"warning: {metrics}: line {number} ({error}): its save is not taken into account")
        else:
            longest_s = longest_s if save_s is UNSET else max(longest_s or 0.0, save_s)
    return longest_s


@cache
def _warn_once(text: str) -> None:
    """Print a warning once, however often Snakemake requests a job's resources."""
    print(text, file=sys.stderr)


def _predicted_step_s(file: Path, plan: Plan, prediction: Path) -> float:
    """Return the predicted step time of a searched plan, in seconds.

    Raises BadInput if the prediction cannot be read, or belongs to another plan.
    """
    predicted = read_document(prediction, Prediction)
    if plan.sha256 != predicted.plan_sha256:
        raise BadInput(file, f"is not the plan of {prediction}", "search again, or set runs.<name>.grace_s")
    return predicted.estimate.simulated_step_time_s


def is_array(rule: str, executor_settings: object) -> bool:
    """Return whether an executor submits the jobs of a rule as a Slurm array; only executors for Slurm do."""
    asked = getattr(executor_settings, "array_jobs", None) or ""
    return not {rule, "all"}.isdisjoint(re.split("[,; ]+", asked))
