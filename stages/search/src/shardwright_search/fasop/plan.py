"""An estimated candidate as a plan."""

from itertools import accumulate

from msgspec.structs import replace

from shardwright_formats.types import Cluster, LayerStrategy, Model, PipelineStage, Plan, Schedule, Strategy
from shardwright_search.fasop.estimate import Estimate
from shardwright_search.fasop.problem import Problem
from shardwright_search.space.request import SearchRequest


def plan_of(problem: Problem, estimate: Estimate, request: SearchRequest, model: Model, cluster: Cluster) -> Plan:
    """Plain data parallelism, 1F1B; ranks are the cluster's, in whose order the nodes of a type are taken."""
    own, cluster = estimate.candidate, _cluster_of(problem, estimate.candidate.nodes, cluster)
    width = own.tp_size * own.dp_size
    ranks = _ranks(problem, own.nodes, cluster)
    placed = [tuple(ranks[start : start + width]) for start in range(0, len(ranks), width)]
    blocks = [min(max(layer - 1, 0), len(model.layers)) for layer in accumulate(estimate.partition, initial=0)]
    strategy = Strategy(tp_size=own.tp_size, dp_size=own.dp_size)
    return Plan(
        name=request.name,
        model=model,
        cluster=cluster,
        global_batch_size=problem.batch,
        num_microbatches=own.num_microbatches(problem.batch),
        schedule=Schedule.ONE_F_ONE_B,
        precision=request.precision,
        attention=request.attention,
        compile=request.compile,
        stages=tuple(
            PipelineStage(ranks=tuple(sorted(stage)), layers=((blocks[i], blocks[i + 1]),))
            for i, stage in enumerate(placed)
        ),
        embedding=strategy,
        head=strategy,
        layers=tuple(LayerStrategy(tp_size=own.tp_size, dp_size=own.dp_size, type=kind) for kind in model.layers),
    )


def _cluster_of(problem: Problem, nodes: tuple[int, ...], cluster: Cluster) -> Cluster:
    """As many nodes of each type as are placed, the first of the whole cluster."""
    left = {own.name: nodes.count(kind) for kind, own in enumerate(problem.node_types)}
    groups = []
    for group in cluster.nodes:
        taken = min(group.count, left[group.node_type])
        left[group.node_type] -= taken
        groups += [replace(group, count=taken)] if taken else []
    return replace(cluster, nodes=tuple(groups))


def _ranks(problem: Problem, nodes: tuple[int, ...], cluster: Cluster) -> list[int]:
    """The cluster's ranks in the order of the placed nodes."""
    of: dict[str, list[int]] = {}
    for rank, name in enumerate(cluster.node_type_of_rank):
        of.setdefault(name, []).append(rank)
    taken = {name: iter(ranks) for name, ranks in of.items()}
    names = [problem.node_types[kind].name for kind in nodes]
    return [next(taken[name]) for name in names for _ in range(problem.devices_per_node)]
