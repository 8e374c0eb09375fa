"""Searches that differ from the one that made a plan: other kinds of plans, more memory, faster links, another node."""

from collections.abc import Iterator
from functools import partial
from math import ceil
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import Cluster, Model, Plan, Recompute
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.cost_model.scaling import Scaling, scaled
from shardwright_search.search import Found, find_best
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.configurations import configurations, narrowed
from shardwright_search.space.request import OuterSpace, SearchRequest, Space

_MORE_MEMORY = 1.1
_FASTER_LINKS = 2.0


class Question(NamedTuple):
    """A search that differs from the one that made a plan."""

    what: str
    """How it differs, in a few words."""
    request: SearchRequest
    model: Model
    cluster: Cluster
    profiles: Profiles
    file: Path
    """Of the request, named in errors."""


class Answer(NamedTuple):
    """The best plan; or how much every plan lacks; or why there is no such plan, or nothing to price it with."""

    what: str
    found: Found | Infeasible | BadInput


def answer(question: Question, time_limit_s: float | None = None) -> Answer:
    """Search, quietly; what cannot be asked is an answer too."""
    what, request, model, cluster, profiles, file = question
    try:
        return Answer(what, find_best(request, model, cluster, profiles, file, lambda _: None, time_limit_s))
    except BadInput as error:
        return Answer(what, error)


def neighbours(plan: Plan, request: SearchRequest, profiles: Profiles, file: Path) -> tuple[Question, ...]:
    """One kind of plan each: no recomputation, one strategy, data parallelism, ZeRO, pipeline degrees, microbatches.

    Degrees and counts are those of the request's space but the plan's own; counts are of the plan's batch size.
    """
    asked = narrowed(request, plan.cluster)
    kinds = _kinds(plan, asked, file)
    return tuple(Question(what, own, plan.model, plan.cluster, profiles, file) for what, own in kinds)


def _kinds(plan: Plan, asked: SearchRequest, file: Path) -> Iterator[tuple[str, SearchRequest]]:
    """`asked` is narrowed; data parallelism alone is a named space, in which nothing else is asked of the ends."""
    yield "no recomputation", replace(asked, recompute=(Recompute.NONE,))
    yield "one strategy for all layers", replace(asked, fine_grained=False)
    if asked.shard_sizes is not None:
        yield "states shared out among all ranks", replace(asked, shard_sizes=None)
    alone = replace(asked, embedding=OuterSpace(), head=OuterSpace(), max_pp_size=None, max_dp_size=None)
    yield "data parallelism only", replace(alone, space=Space.DP)
    yield "ZeRO only", replace(alone, space=Space.ZERO)
    every = configurations(asked, plan.model, plan.cluster, file)
    for pp_size in sorted({each.pp_size for each in every} - {len(plan.stages)}):
        yield f"pp_size {pp_size}", replace(asked, pp_sizes=(pp_size,))
    fixed = replace(asked, global_batch_size=plan.global_batch_size)
    counts = {each.num_microbatches for each in every if each.global_batch_size == plan.global_batch_size}
    for count in sorted(counts - {plan.num_microbatches}):
        yield f"{count} microbatch(es)", replace(fixed, num_microbatches=(count,))


def outlook(plan: Plan, request: SearchRequest, profiles: Profiles, file: Path) -> tuple[Question, ...]:
    """The same search with 10 % more memory, with links twice as fast, and with one more node of each group."""
    model, cluster = plan.model, plan.cluster
    larger, roomier = more_memory(request, cluster, _MORE_MEMORY)
    faster = faster_links(profiles, _FASTER_LINKS)
    nodes = [(f"one more {of.node_type} node", more_nodes(cluster, i, 1)) for i, of in enumerate(cluster.nodes)]
    return (
        Question(f"{_MORE_MEMORY - 1:.0%} more memory", larger, model, roomier, profiles, file),
        Question(f"links {_FASTER_LINKS:g} times as fast", request, model, cluster, faster, file),
        *(Question(what, request, model, wider, profiles, file) for what, wider in nodes),
    )


def more_memory(request: SearchRequest, cluster: Cluster, factor: float) -> tuple[SearchRequest, Cluster]:
    """The budget, and the devices' memory that bounds it, times a factor; what is left free stays."""
    match request.memory_gib:
        case dict() as budgets:
            budget: dict[str, float] | float | None = {name: gib * factor for name, gib in budgets.items()}
        case budget_gib:
            budget = budget_gib and budget_gib * factor
    types = {
        name: replace(node, memory_bytes=ceil(node.memory_bytes * factor)) for name, node in cluster.node_types.items()
    }
    return replace(request, memory_gib=budget), replace(cluster, node_types=types)


def faster_links(profiles: Profiles, factor: float) -> Profiles:
    """Every message of the hardware profile, and what reducing gradients was measured to add, in 1 / factor the time.

    Tensor and sequence parallelism inside a layer stay: a model profile has them in one number with the computation.
    """
    return profiles.each(partial(scaled, by=Scaling(collectives=1 / factor, reduction=1 / factor)))


def more_nodes(cluster: Cluster, group: int, count: int) -> Cluster:
    """The cluster with so many more nodes in one of its groups."""
    nodes = list(cluster.nodes)
    nodes[group] = replace(nodes[group], count=nodes[group].count + count)
    return replace(cluster, nodes=tuple(nodes))
