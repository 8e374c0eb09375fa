"""The best plan whose stages have the same process groups, so that all of its communicators are counted.

The solver counts a layer's own groups, of which a stage holds the most of any layer. If each layer has no other
groups than those of a set, and no layout changes inside a stage, all groups of a stage are in that set.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from heapq import heapify, heappop, heappush

import numpy as np
from msgspec.structs import replace

from shardwright.plan.axes import Axis
from shardwright.plan.process_groups import Purpose, communicator_bytes, strategy_axes
from shardwright_search.cost_model.stage_costs import types_with_replicas
from shardwright_search.solver.interleaved import Interleaved
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import DeviceGroup
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.targets import WIDE, Best, Solvable, Target, best_guess
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import StageWidths

Groups = frozenset[tuple[Purpose, Axis]]
_NEVER_FITS = 2.0**52
"""Bytes: more than any device has."""
_NEVER_PS = 2.0**50
"""Picoseconds: 19 minutes."""


def best_alike(
    instance: Instance, bounds: Sequence[tuple[float, Target[Configuration]]], below: float
) -> Iterator[Best[Configuration]]:
    """Yield ever better plans with a score below a limit, from configurations with stages of equal width."""
    waiting: list[tuple[float, int, Target[Configuration], Solvable | None]]
    waiting = [(bound, number, target, None) for number, (bound, target) in enumerate(bounds)]
    heapify(waiting)
    number = len(waiting)
    while waiting and waiting[0][0] < below:
        bound, _, target, solvable = heappop(waiting)
        if solvable is None:
            for each in _limited(instance, target.configuration):
                heappush(waiting, (max(bound, target.score(each.relaxed_bound_ps)), number, target, each))
                number += 1
            continue
        for limit in (min(below, bound * (1 + above)) for above in WIDE):
            if (plan := best_guess(solvable, target.time_ps(limit))) is not None:
                below = target.score(plan.objective_ps)
                yield Best(target, plan, below)
            if plan is not None or limit == below:
                break
        for plan in solvable.solve_below(target.time_ps(below), 1, lambda _: None):
            below = target.score(plan.objective_ps)
            yield Best(target, plan, below)


def _limited(instance: Instance, configuration: Configuration) -> Iterator[Solvable]:
    """Yield a configuration limited to each set of groups of a strategy of blocks."""
    if configuration.pp_size > 1 and configuration.widths is not StageWidths.EQUAL:
        return
    choice = instance.choices.choice(configuration)
    shardings, width = instance.choices.layers.shardings(choice), choice.widths[0]
    own = [[strategy_axes(s) for s in shardings.of_type(n, width)] for n in instance.prices.types]
    blocks = {instance.prices.types.index(name) for name in instance.costs.model.layers}
    kinds = dict.fromkeys(groups for number in blocks for groups in own[number])
    for kind in sorted(kinds, key=len):
        if not all(any(groups <= kind for groups in each) for each in own):
            continue
        if configuration.num_chunks > 1:
            chunks = instance.interleaved_problem(configuration)
            yield Interleaved(replace(chunks, group=_counted(instance, configuration, chunks.group, own, kind)))
        else:
            problem = instance.problem(configuration)
            groups = tuple(_counted(instance, configuration, each, own, kind) for each in problem.device_groups)
            yield Pipeline(replace(problem, device_groups=groups), cache(GroupCosts), Relaxed())


def _counted(
    instance: Instance, configuration: Configuration, group: DeviceGroup, own: Sequence[Sequence[Groups]], kind: Groups
) -> DeviceGroup:
    """Return a device group in which every layer whose process groups are in a set counts all groups of the set."""
    size = max(profiles.communicator_bytes for profiles in instance.costs.profiles.used(instance.costs.cluster))
    replicas = types_with_replicas(instance.costs.model)
    options = []
    for name, each, groups in zip(instance.prices.types, group.options, own, strict=True):
        counted = [size * (len(kind) + bool(replicas) - len(one) - (name in replicas)) for one in groups]
        more = [bytes_ if one <= kind else _NEVER_FITS for bytes_, one in zip(counted, groups, strict=True)]
        options.append(each._replace(workspace_bytes=each.workspace_bytes + np.array(more)))
    further = 2 if configuration.pp_size > 2 and configuration.num_chunks == 1 else 0
    same = np.eye(group.redistribution_ps.shape[1], dtype=bool)
    return replace(
        group,
        options=tuple(options),
        redistribution_ps=np.where(same, group.redistribution_ps, _NEVER_PS),
        budget_bytes=group.budget_bytes - communicator_bytes({Purpose.EDGE: further}, size),
    )
