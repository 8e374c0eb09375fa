"""What else than more memory makes a request feasible: a smaller batch, or more nodes."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import Cluster, Model
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.explain.what_if import more_nodes
from shardwright_search.search import find_best
from shardwright_search.space.budget import Infeasible, min_need
from shardwright_search.space.configurations import divisors
from shardwright_search.space.request import SearchRequest, batch_sizes
from shardwright_search.space.search_space import space_of


class Remedies(NamedTuple):
    """Changes of an infeasible request, each of which alone makes it feasible; None where none was found."""

    global_batch_size: int | None
    """The largest divisor of the batch size, or of the smallest in a range, that fits."""
    nodes: int | None
    """The least number of nodes that the profiles cover; only of a cluster of equal nodes."""


def remedies(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, file: Path) -> Remedies:
    """Try smaller batches, the largest first, and more nodes, the fewest first."""
    batches = reversed(divisors(min(batch_sizes(request)))[:-1])
    smaller = ((size, replace(request, global_batch_size=size), cluster) for size in batches)
    counts = _more_nodes(cluster, profiles)
    wider = ((count, request, more_nodes(cluster, 0, count - cluster.nodes[0].count)) for count in counts)

    def first_that_fits(tried: Iterable[tuple[int, SearchRequest, Cluster]]) -> int | None:
        return next((number for number, own, machines in tried if _fits(own, model, machines, profiles, file)), None)

    return Remedies(first_that_fits(smaller), first_that_fits(wider))


def further_remedies(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, file: Path) -> str:
    """The remedies of an infeasible request as the end of its one line; empty where there are none."""
    found = remedies(request, model, cluster, profiles, file)
    words = []
    if found.global_batch_size is not None:
        words.append(f", or lower global_batch_size to {found.global_batch_size}, the largest divisor that fits")
    if found.nodes is not None:
        words.append(f", or take {found.nodes} nodes of {cluster.nodes[0].node_type}")
    return "".join(words)


def _more_nodes(cluster: Cluster, profiles: Profiles) -> range:
    """Numbers of nodes of a cluster of equal ones, up to as many devices as the largest group that was measured."""
    group, *others = cluster.nodes
    hardware = profiles.used(cluster)[0].hardware
    largest = max((key.group_size for key in hardware.curves), default=0)
    most = largest // cluster.node_types[group.node_type].devices_per_node
    return range(0) if others else range(group.count + 1, most + 1)


def _fits(request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, file: Path) -> bool:
    """Whether some plan fits; what cannot be asked, or priced with these profiles, is no remedy."""
    try:
        space = space_of(request, model, cluster, profiles, file)
        every = [target.configuration for target in space.targets]
        if min_need(space.instance, every).missing_bytes > 0:
            return False
        single = [configuration for configuration in every if configuration.num_chunks == 1]
        if single and min_need(space.instance, single).missing_bytes <= 0:
            return True
        # Several chunks may hold more than one: their need is only known by searching.
        return not isinstance(find_best(request, model, cluster, profiles, file, report=lambda _: None), Infeasible)
    except BadInput:
        return False
