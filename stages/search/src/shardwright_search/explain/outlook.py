"""What more memory, faster links or another node would bring."""

from math import ceil
from pathlib import Path

from msgspec.structs import replace

from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.plan import Plan
from shardwright_search.cost_model.profiles import Profiles, scaled_messages
from shardwright_search.explain.answers import Question
from shardwright_search.space.request import SearchRequest

__all__ = ["faster_links", "more_memory", "more_nodes", "outlook"]

_MORE_MEMORY = 1.1
_FASTER_LINKS = 2.0


def outlook(plan: Plan, request: SearchRequest, profiles: Profiles, file: Path) -> tuple[Question, ...]:
    """The same search with 10 % more memory, with links twice as fast, and with one more node of each group."""
    model, cluster = plan.model, plan.cluster
    larger, roomier = more_memory(request, cluster, _MORE_MEMORY)
    return (
        Question(f"{_MORE_MEMORY - 1:.0%} more memory", larger, model, roomier, profiles, file),
        Question(
            f"links {_FASTER_LINKS:g} times as fast",
            request,
            model,
            cluster,
            faster_links(profiles, _FASTER_LINKS),
            file,
        ),
        *(
            Question(f"one more {group.node_type} node", request, model, more_nodes(cluster, index, 1), profiles, file)
            for index, group in enumerate(cluster.nodes)
        ),
    )


def more_memory(request: SearchRequest, cluster: Cluster, factor: float) -> tuple[SearchRequest, Cluster]:
    """The budget, and the devices' memory that bounds it, times a factor; what is left free stays."""
    asked = request.memory_gib
    budget = {name: gib * factor for name, gib in asked.items()} if isinstance(asked, dict) else asked
    types = {
        name: replace(node, memory_bytes=ceil(node.memory_bytes * factor)) for name, node in cluster.node_types.items()
    }
    larger = budget * factor if isinstance(budget, float) else budget
    return replace(request, memory_gib=larger), replace(cluster, node_types=types)


def faster_links(profiles: Profiles, factor: float) -> Profiles:
    """Every message of the hardware profile, and what reducing gradients was measured to add, in 1 / factor the time.

    Tensor and sequence parallelism inside a layer stay: a model profile has them in one number with the computation.
    """
    return profiles._replace(
        hardware=scaled_messages(profiles.hardware, 1 / factor),
        states={key: replace(of, reduction_s=of.reduction_s / factor) for key, of in profiles.states.items()},
    )


def more_nodes(cluster: Cluster, group: int, count: int) -> Cluster:
    """The cluster with so many more nodes in one of its groups."""
    nodes = list(cluster.nodes)
    nodes[group] = replace(nodes[group], count=nodes[group].count + count)
    return replace(cluster, nodes=tuple(nodes))
