"""Utilization of each node type of a mixed cluster in a step: which type binds, how long it idles, at what cost."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from shardwright.display.timeline import idle_s
from shardwright.types import Estimate, Plan


class NodeTypeUse(NamedTuple):
    """Use of one node type by its stages; a stage that spans several types counts for each."""

    name: str
    stages: int
    ranks: int
    busiest_s: float
    """The longest that one of its stages computes or reduces."""
    idle_share: float
    """Share of its ranks' time, until the last stage is done, in which they idle."""
    idle_usd: float | None
    """Price of the idle time in a step; None: the type has no price."""


def node_type_uses(plan: Plan, estimate: Estimate) -> tuple[NodeTypeUse, ...]:
    """Return the use of each node type with a stage, in the order of the ranks; empty for one type or no timeline."""
    types = plan.cluster.node_type_of_rank
    if len(set(types)) == 1 or not estimate.timeline:
        return ()
    end_s = max(event.end_s for event in estimate.timeline)
    idle_times = dict[str, list[tuple[int, float]]]()
    for number, stage in enumerate(plan.stages):
        idle = idle_s((event for event in estimate.timeline if event.stage == number), number, end_s)
        for name, ranks in Counter(types[rank] for rank in stage.ranks).items():
            idle_times.setdefault(name, []).append((ranks, idle))
    order = [name for name in dict.fromkeys(types) if name in idle_times]
    return tuple(_use(plan, name, idle_times[name], end_s) for name in order)


def _use(plan: Plan, name: str, stages: list[tuple[int, float]], end_s: float) -> NodeTypeUse:
    """Return the use of a type; `stages`: ranks and idle time of each."""
    ranks, idle_rank_s = sum(width for width, _ in stages), sum(width * idle for width, idle in stages)
    node = plan.cluster.node_types[name]
    usd = None if node.usd_per_hour is None else idle_rank_s / 3600 * node.usd_per_hour / node.devices_per_node
    busiest_s = end_s - min(idle for _, idle in stages)
    return NodeTypeUse(name, len(stages), ranks, busiest_s, idle_rank_s / (ranks * end_s), usd)


def binding(uses: Sequence[NodeTypeUse]) -> NodeTypeUse:
    """Return the one whose busiest stage takes the longest."""
    return max(uses, key=lambda use: use.busiest_s)
