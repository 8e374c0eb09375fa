"""What a rank may use, and what is missing when no plan fits."""

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.cluster import Cluster
from shardwright_search.solver.min_memory import least_memory
from shardwright_search.space.configurations import Case
from shardwright_search.space.instance import Pricing
from shardwright_search.space.request import SearchRequest

__all__ = ["GIB", "Infeasible", "Need", "budgets_of", "infeasible", "least_need"]

GIB = 2**30


class Infeasible(NamedTuple):
    """No plan fits: why, how much is missing on a rank, and the least budget with which one fits.

    Of several chunks a stage only a bound is known: not `exact`, both numbers are then too small.
    """

    reason: str
    missing_bytes: int
    least_bytes: int
    exact: bool


class Need(NamedTuple):
    """The least memory that a rank needs in any case, process included: which case, and the stage that needs it."""

    memory_bytes: int
    case: Case
    stage: int
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


def least_need(pricing: Pricing, every: Sequence[Case]) -> Need:
    """The case that lacks the least, over cases with one chunk: several chunks hold no less."""
    single = [case._replace(num_chunks=1) for case in every]
    bounds = sorted(((_least_share(pricing, case), number) for number, case in enumerate(single)))
    best: Need | None = None
    for bound, number in bounds:
        if best is not None and bound >= best.missing_bytes:
            break
        problem = pricing.problem(single[number])
        need = least_memory(problem)
        process = pricing.costs.profiles.process_bytes
        found = Need(need.memory_bytes + process, single[number], need.stage, need.missing_bytes)
        if best is None or found.missing_bytes < best.missing_bytes:
            best = found
    if best is None:
        raise ValueError("no case")
    return best


def infeasible(pricing: Pricing, every: Sequence[Case], file: Path) -> Infeasible:
    """What the case with the smallest need lacks."""
    need = least_need(pricing, every)
    cluster, request = pricing.costs.cluster, pricing.request
    node_type = cluster.node_type_of_rank[pricing.stage_ranks(need.case.pp_size)[need.stage][0]]
    # Measured memory may be more than the tables say by a factor.
    missing_bytes = ceil(need.missing_bytes * pricing.costs.profiles.memory_factor)
    least_bytes = budgets_of(request, cluster, file)[node_type] + missing_bytes
    # Rounded up to a number that is read back as enough.
    least_gib = ceil((least_bytes / GIB + request.reserve_gib) * 1e6) / 1e6
    exact = need.case in every
    amount = f"{'at least' if exact else 'more than'} {least_gib:.6f}"
    remedy = f"raise memory_gib to {amount}"
    if least_gib * GIB > cluster.node_types[node_type].memory_bytes:
        remedy = f"take devices of {amount} GiB"
    return Infeasible(
        f"no plan fits: even the leanest ({need.case}) lacks {'' if exact else 'more than '}{missing_bytes} bytes "
        f"a rank in pipeline stage {need.stage}: {remedy}",
        missing_bytes,
        least_bytes,
        exact,
    )


def _least_share(pricing: Pricing, case: Case) -> float:
    """A lower bound on what a case lacks: the least of every element, evenly over the stages."""
    problem = pricing.problem(case)
    place = problem.places[0]
    least = np.array([(o.state_bytes + o.activation_bytes).min() for o in place.options])
    total = sum(least[kind] for kind in problem.elements)
    return float(total / problem.pp_size - max(p.budget_bytes for p in problem.places))
