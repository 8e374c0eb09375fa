"""From a case of the search to the solver's numbers, and from the solver's answer to a plan."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardwright_formats.cluster import Cluster
from shardwright_formats.model import EMBEDDING, HEAD, Model
from shardwright_formats.placement import Layout, layout_of
from shardwright_formats.plan import PipelineStage, Plan
from shardwright_formats.schedule import in_flight
from shardwright_formats.strategy import LayerStrategy, Strategy
from shardwright_search.costs.table import Setting, element_cost, redistribution_cost, send_cost
from shardwright_search.profiles import Profiles
from shardwright_search.request import SearchRequest
from shardwright_search.solver.problem import Options, Problem, Solution, StageTable
from shardwright_search.space import Case, strategies

__all__ = ["PricedCase", "plan_of", "priced_case", "restricted"]


class PricedCase(NamedTuple):
    """A case with the strategies of each type, by the type's number, and their costs."""

    case: Case
    types: tuple[str, ...]
    strategies: tuple[tuple[Strategy, ...], ...]
    problem: Problem


def priced_case(
    request: SearchRequest, model: Model, cluster: Cluster, profiles: Profiles, case: Case, budget_bytes: int
) -> PricedCase | None:
    """Price every strategy of a case; None when some type of layer cannot be spread evenly in any way.

    `budget_bytes` is that of a rank, the process's own memory included.
    """
    samples = request.global_batch_size // case.num_microbatches
    width = cluster.num_devices // case.pp_size
    types = tuple(dict.fromkeys((EMBEDDING, *model.layers, HEAD)))
    spreads = tuple(strategies(request, model, name, width, samples) for name in types)
    if not all(spreads):
        return None
    setting = Setting(model, cluster, profiles, request.precision, samples, case.num_microbatches)
    layouts = sorted({layout_of(strategy) for found in spreads for strategy in found})
    stages = _stage_ranks(cluster, case.pp_size)
    tables: dict[tuple[int, ...], StageTable] = {}
    for ranks in stages:
        if (pattern := _node_pattern(cluster, ranks)) not in tables:
            tables[pattern] = _stage_table(setting, types, spreads, layouts, ranks)
    sends = [
        [[send_cost(setting, name, layout, here, there).time_ps for layout in layouts] for name in types]
        for here, there in pairwise(stages)
    ]
    problem = Problem(
        elements=tuple(types.index(name) for name in (EMBEDDING, *model.layers, HEAD)),
        tables=tuple(tables[_node_pattern(cluster, ranks)] for ranks in stages),
        sends_ps=np.array(sends, np.int64).reshape(case.pp_size - 1, len(types), len(layouts)),
        in_flight=tuple(in_flight(case.schedule, case.pp_size, case.num_microbatches, i) for i in range(case.pp_size)),
        num_microbatches=case.num_microbatches,
        budget_bytes=budget_bytes - profiles.process_bytes,
    )
    return PricedCase(case, types, spreads, problem)


def restricted(priced: PricedCase, allowed: Callable[[Strategy], bool]) -> PricedCase | None:
    """The same case with some of the strategies only; None when a type is left without any."""
    kept = [[i for i, strategy in enumerate(found) if allowed(strategy)] for found in priced.strategies]
    if not all(kept):
        return None
    tables = {
        id(table): StageTable(
            tuple(
                Options(*(column[rows] for column in options))
                for options, rows in zip(table.options, kept, strict=True)
            ),
            table.redistribution_ps,
        )
        for table in priced.problem.tables
    }
    fields = {name: getattr(priced.problem, name) for name in Problem.__struct_fields__}
    return PricedCase(
        priced.case,
        priced.types,
        tuple(tuple(found[i] for i in rows) for found, rows in zip(priced.strategies, kept, strict=True)),
        Problem(**fields | {"tables": tuple(tables[id(table)] for table in priced.problem.tables)}),
    )


def plan_of(request: SearchRequest, model: Model, cluster: Cluster, priced: PricedCase, solution: Solution) -> Plan:
    """The plan that a solution of the case stands for."""
    chosen = [
        priced.strategies[kind][option] for kind, option in zip(priced.problem.elements, solution.options, strict=True)
    ]
    cuts = (0, *(end - 1 for end in solution.ends[:-1]), len(model.layers))
    embedding, *layers, head = chosen
    return Plan(
        name=request.name,
        model=model,
        cluster=cluster,
        global_batch_size=request.global_batch_size,
        num_microbatches=priced.case.num_microbatches,
        schedule=priced.case.schedule,
        gradient_reduction=request.gradient_reduction,
        precision=request.precision,
        attention=request.attention,
        stages=tuple(
            PipelineStage(ranks=ranks, layers=((cuts[i], cuts[i + 1]),))
            for i, ranks in enumerate(_stage_ranks(cluster, priced.case.pp_size))
        ),
        embedding=embedding,
        head=head,
        layers=tuple(layer for layer in layers if isinstance(layer, LayerStrategy)),
    )


def _stage_ranks(cluster: Cluster, pp_size: int) -> tuple[tuple[int, ...], ...]:
    width = cluster.num_devices // pp_size
    return tuple(tuple(range(i * width, (i + 1) * width)) for i in range(pp_size))


def _node_pattern(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """Which ranks share a node: stages alike in this have the same costs."""
    nodes = [cluster.node_of_rank[rank] for rank in ranks]
    return tuple(node - nodes[0] for node in nodes)


def _stage_table(
    setting: Setting,
    types: Sequence[str],
    spreads: Sequence[Sequence[Strategy]],
    layouts: Sequence[Layout],
    ranks: Sequence[int],
) -> StageTable:
    options = []
    for name, found in zip(types, spreads, strict=True):
        costs = [element_cost(setting, name, strategy, ranks) for strategy in found]
        columns = [
            [cost.microbatch_ps for cost in costs],
            [cost.gradient_sync_ps for cost in costs],
            [cost.optimizer_ps for cost in costs],
            [cost.state_bytes for cost in costs],
            [cost.activation_bytes for cost in costs],
            [cost.transient_bytes for cost in costs],
            [layouts.index(layout_of(strategy)) for strategy in found],
        ]
        options.append(Options(*(np.array(column, np.int64) for column in columns)))
    moves = [
        [
            [
                redistribution_cost(setting, name, source, target, ranks).time_ps
                + redistribution_cost(setting, name, target, source, ranks).time_ps
                for target in layouts
            ]
            for source in layouts
        ]
        for name in types
    ]
    return StageTable(tuple(options), np.array(moves, np.int64))
