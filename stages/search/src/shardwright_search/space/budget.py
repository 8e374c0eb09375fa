"""What a rank may use, and what is missing when no plan fits."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, Cluster, Plan
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import SearchRequest


class Infeasible(NamedTuple):
    """No plan fits: why, how much is missing on a rank, and the least budget with which one fits.

    Of several chunks a stage only a bound is known: not `exact`, both numbers are then too small.
    """

    reason: str
    missing_bytes: int
    min_bytes: int
    exact: bool


class Need(NamedTuple):
    """The configuration that lacks the least memory, and the stage where it does."""

    configuration: Configuration
    stage: int
    node_type: str
    """Of that stage."""
    missing_bytes: int
    """More than that stage's budget by so much; negative where it fits."""


def budgets_of(request: SearchRequest, cluster: Cluster, file: Path) -> dict[str, int]:
    """What a rank may use, by node type: `memory_gib`, or all memory of the device, less the reserve.

    Raises BadInput when the request allows more than a device has, or names a node type that the cluster has not.
    """
    used = dict.fromkeys(group.node_type for group in cluster.nodes)
    asked = request.memory_gib
    named = dict(asked) if isinstance(asked, Mapping) else {}
    for name in named:
        if name not in used:
            what = f"memory_gib names node type {name!r}, cluster {cluster.name} has {', '.join(used)}"
            raise BadInput(file, what, "name its node types")
    found = {}
    for name in used:
        device_bytes = cluster.node_types[name].memory_bytes
        gib = named.get(name) if isinstance(asked, Mapping) else asked
        budget = device_bytes if gib is None else int(gib * GIB)
        if budget > device_bytes:
            what = f"memory_gib {gib:g} is more than a device has, {device_bytes / GIB:.6g}"
            raise BadInput(file, what, "lower memory_gib or leave it null")
        found[name] = budget - int(request.reserve_gib * GIB)
        if found[name] <= 0:
            raise BadInput(file, f"reserve_gib {request.reserve_gib:g} leaves nothing", "lower reserve_gib")
    return found


def budgets_of_stages(plan: Plan, budgets: Mapping[str, int]) -> tuple[int, ...]:
    """What a rank of each pipeline stage may use, of what it may by node type: the least of the stage's types."""
    types = plan.cluster.node_type_of_rank
    return tuple(min(budgets[types[rank]] for rank in stage.ranks) for stage in plan.stages)


def min_need(instance: Instance, every: Sequence[Configuration]) -> Need:
    """The configuration that lacks the least, over configurations with one chunk: several chunks hold no less."""
    from shardwright_search.solver.min_memory import min_memory

    single = [configuration._replace(num_chunks=1) for configuration in every]
    bounds = sorted(((_least_share(instance, configuration), number) for number, configuration in enumerate(single)))
    best: Need | None = None
    for bound, number in bounds:
        if best is not None and bound >= best.missing_bytes:
            break
        need = min_memory(instance.problem(single[number]))
        found = Need(single[number], need.stage, instance.node_type(single[number], need.group), need.missing_bytes)
        if best is None or found.missing_bytes < best.missing_bytes:
            best = found
    if best is None:
        raise ValueError("no configuration")
    return best


def infeasible(
    instance: Instance, every: Sequence[Configuration], file: Path, of: str = "even the leanest"
) -> Infeasible:
    """What the configuration with the smallest need lacks; `of`: what that is called."""
    need = min_need(instance, every)
    cluster, request = instance.costs.cluster, instance.request
    # Measured memory may be more than the tables say by a factor.
    missing_bytes = ceil(need.missing_bytes * instance.costs.profiles_on(need.node_type).memory_factor)
    min_bytes = budgets_of(request, cluster, file)[need.node_type] + missing_bytes
    # Rounded up to a number that is read back as enough.
    min_gib = ceil((min_bytes / GIB + request.reserve_gib) * 1e6) / 1e6
    exact = need.configuration in every
    amount = f"{'at least' if exact else 'more than'} {min_gib:.6f}"
    remedy = f"raise memory_gib to {amount}"
    if min_gib * GIB > cluster.node_types[need.node_type].memory_bytes:
        remedy = f"take devices of {amount} GiB"
    return Infeasible(
        f"no plan fits: {of} ({need.configuration}) lacks {'' if exact else 'more than '}{missing_bytes} "
        f"bytes a rank in pipeline stage {need.stage}: {remedy}",
        missing_bytes,
        min_bytes,
        exact,
    )


def _least_share(instance: Instance, configuration: Configuration) -> float:
    """A lower bound on what a configuration lacks: the least of every layer on all ranks, evenly over all ranks."""
    problem = instance.problem(configuration)
    own = [[(o.state_bytes + o.activation_bytes).min() for o in group.options] for group in problem.device_groups]
    least = (np.array(own) * np.array(problem.relative_widths)[:, None]).min(0)
    total = sum(least[kind] for kind in problem.layers)
    return float(total / problem.pp_size - max(p.budget_bytes for p in problem.device_groups))
