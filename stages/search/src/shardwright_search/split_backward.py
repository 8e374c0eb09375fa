"""Split backward passes behind the best plan of the other schedules: near plans are simulated with them.

No closed form of split passes is exact enough to search by. So plans whose own closed form is near the optimum are
tried with them; `split_bound` then proves how much faster any other may be, and lists those that may be where they are
few.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shardwright.plan.chunks import placed
from shardwright.types import LayerStrategy, Plan, Schedule
from shardwright_search.alternatives import MAX_NEAR
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.layer import CostModel
from shardwright_search.cost_model.plan import evaluate, simulated_step_ps
from shardwright_search.cost_model.stage_costs import range_costs
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.branch_and_bound import plans_below
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.budget import over_bytes
from shardwright_search.space.configurations import Configuration, is_solved
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.split_bound import listed_below, split_bound

NEAR_SPLIT = 0.1
"""Plans whose closed form is within this share of the optimum are tried: pipelines that fill and drain gain most."""
_MAX_LABELS = 10_000
"""The most work on plans near the optimum."""
_CHUNKS = 2
"""Layer ranges of a stage under schedules with several."""
_ENDS = 2
"""Ranges that have the embedding or the head."""
_MAX_ACTIONS = 200_000
"""The most passes of listed plans that are simulated."""


class Split(NamedTuple):
    """The plan of the least simulated time among those with split backward passes that fit, and how many were tried."""

    best: Candidate | None
    tried: int
    over_bytes: int = 0
    """Bytes by which the leanest exceeds its budget, where none fits."""
    bound: float = 0.0
    """A score by simulation that no plan with split backward passes is below; 0: nothing is proven."""


def asks_for_split(schedules: Iterable[Schedule]) -> bool:
    """Return whether a request names a schedule that is looked for behind the others."""
    return not all(map(is_solved, schedules))


def best_split(
    space: SearchSpace,
    optimum: Optimum[Configuration],
    compared: Sequence[Best[Configuration]],
    budgets: Mapping[str, int],
    joint: Candidate | None,
    deadline: float,
) -> Split:
    """Return the quickest plan with split backward passes by simulation, and what is proven of all others.

    `compared`: further plans to try; `joint`: the best plan of the other schedules, if it fits.
    """
    instance = space.instance
    wanted = [each for each in instance.request.schedules if not is_solved(each)]
    known = dict.fromkeys(
        (best.target.configuration, best.priced.solution)
        for best in (*_near(space, optimum), *compared)
        if _is_pipeline(best.target.configuration)
    )
    near = [instance.plan(*each) for each in known]
    split = _quickest(space, [plan for each in wanted for plan in _under(each, near, instance.costs)], budgets)
    times = [_score(space, each.plan) for each in (joint, split.best) if each is not None]
    if optimum.stopped or not times:
        return split
    limit = min(times)
    bounds = [split_bound(space, each, limit, deadline) for each in wanted]
    below = [target for each in bounds for target in each.below]
    further = listed_below(space, below, limit) if all(each.score for each in bounds) else None
    if further is None or sum(_actions(configuration) for configuration, _ in further) > _MAX_ACTIONS:
        return split._replace(bound=min(each.score for each in bounds))
    others = _quickest(space, [instance.plan(*each) for each in further], budgets)
    scores = [(_score(space, each.best.plan), each) for each in (split, others) if each.best is not None]
    bound, best = min(((score, each.best) for score, each in scores), default=(limit, None), key=itemgetter(0))
    return split._replace(best=best, tried=split.tried + others.tried, bound=min(bound, limit))


def _actions(configuration: Configuration) -> int:
    return 3 * configuration.pp_size * configuration.num_microbatches


def _quickest(space: SearchSpace, plans: Sequence[Plan], budgets: Mapping[str, int]) -> Split:
    """Return the quickest by simulation of the plans that fit."""
    lacking = list[int]()
    for plan in sorted(plans, key=partial(_score, space)):
        candidate = _candidate(space, plan)
        lacking.append(max(over_bytes(plan, candidate.evaluation.estimate, budgets)))
        if lacking[-1] <= 0:
            return Split(candidate, len(plans))
    return Split(None, len(plans), min(lacking, default=0))


def _near(space: SearchSpace, optimum: Optimum[Configuration]) -> Iterator[Best[Configuration]]:
    """Yield plans of pipelines whose closed form is near the optimum; of a stopped search those that are known."""
    yield from optimum.near
    if optimum.stopped or optimum.best is None:
        return
    limit = optimum.best.score * (1 + NEAR_SPLIT)
    targets = [t for bound, t in optimum.bounds if bound < limit and _is_pipeline(t.configuration)]
    yield from plans_below(targets, space.solvable, limit, MAX_NEAR, _MAX_LABELS)


def _is_pipeline(configuration: Configuration) -> bool:
    return configuration.pp_size > 1 and configuration.num_chunks == 1


def _under(schedule: Schedule, near: Sequence[Plan], costs: CostModel) -> Iterator[Plan]:
    """Yield plans under a schedule that splits backward passes: near ones as they are, or cut anew into chunks."""
    if not schedule.interleaves:
        yield from (replace(plan, schedule=schedule) for plan in near)
        return
    tried = list[tuple[object, ...]]()
    for plan in near:
        for layers in _layers(plan):
            changed = in_two_chunks(replace(plan, layers=layers), schedule, costs)
            if changed is None:
                continue
            choice = changed.num_microbatches, changed.stages, changed.embedding, changed.head, changed.layers
            if choice not in tried:
                tried.append(choice)
                yield changed


def _layers(plan: Plan) -> Iterator[tuple[LayerStrategy, ...]]:
    """Yield the strategies of a plan's layers, and each strategy for all layers of its type: stages share them."""
    yield plan.layers
    for one in dict.fromkeys(plan.layers):
        yield tuple(one if layer.type == one.type else layer for layer in plan.layers)


def in_two_chunks(plan: Plan, schedule: Schedule, costs: CostModel) -> Plan | None:
    """Return a plan of one chunk a stage under a schedule of two, whose ranges take as equal times as they can.

    None if stages differ in width, or there are too few layers for all.
    """
    pp_size = len(plan.stages)
    if len({len(stage.ranks) for stage in plan.stages}) > 1 or len(plan.layers) < _CHUNKS * pp_size - _ENDS:
        return None
    times = [layer.microbatch_ps for each in range_costs(plan, costs) for layer in each.layers]
    held = placed(even_ranges(times, _CHUNKS * pp_size), schedule, pp_size)
    stages = (replace(stage, layers=layers) for stage, layers in zip(plan.stages, held, strict=True))
    return replace(plan, schedule=schedule, stages=tuple(stages))


def even_ranges(times: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return ranges of layers with the least sum of squared times; only the first and the last may have no layers.

    `times`: of the embedding, the layers and the head.
    """
    layers, until = len(times) - _ENDS, np.cumsum(times, dtype=float)
    least, cut_at = (until - 0.0)[:-1] ** 2, list[NDArray[np.intp]]()  # of the first range, by its end
    for _ in range(count - 2):
        added = np.subtract.outer(until[:-1], until[:-1])
        totals = np.where(np.tri(layers + 1, k=-1, dtype=bool), least + added**2, np.inf)
        cut_at.append(totals.argmin(axis=1))
        least = totals.min(axis=1)
    ends = [layers, int((least + (until[-1] - until[:-1]) ** 2).argmin())]
    for before in reversed(cut_at):
        ends.append(int(before[ends[-1]]))
    return list(pairwise((0, *reversed(ends))))


def _score(space: SearchSpace, plan: Plan) -> float:
    """Return the simulated time as the search's score."""
    instance = space.instance
    return simulated_step_ps(plan, instance.costs) * instance.score_scale(plan.global_batch_size)


def _candidate(space: SearchSpace, plan: Plan) -> Candidate:
    costs, stages = space.instance.costs, len(plan.stages)
    short = has_timeline(len(plan.way), stages, plan.num_microbatches)
    return Candidate(plan, evaluate(plan, costs.profiles, costs, timeline=short))
