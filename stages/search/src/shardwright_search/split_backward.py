"""Split backward passes behind the best plan of the other schedules: near plans are simulated with them.

No closed form of split passes is exact enough to search by. So plans whose own closed form is near the optimum are
tried with them; `split_bound` then proves how much faster any other may be, and lists those that may be where they are
few.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from shardwright.types import Plan, Schedule
from shardwright_search.alternatives import MAX_NEAR
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate, simulated_step_ps
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.branch_and_bound import plans_below
from shardwright_search.solver.problem import Solution
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.budget import over_bytes
from shardwright_search.space.configurations import Configuration, is_solved
from shardwright_search.space.search_space import SearchSpace
from shardwright_search.split_bound import listed_below, split_bound

NEAR_SPLIT = 0.1
"""Plans whose closed form is within this share of the optimum are tried: pipelines that fill and drain gain most."""
_MAX_LABELS = 10_000
"""The most work on plans near the optimum."""
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
        (best.target.configuration._replace(schedule=schedule), best.priced.solution)
        for best in (*_near(space, optimum), *compared)
        if _is_pipeline(best.target.configuration)
        for schedule in wanted
    )
    split = _quickest(space, known, budgets)
    times = [_score(space, each.plan) for each in (joint, split.best) if each is not None]
    if optimum.stopped or not times:
        return split
    limit = min(times)
    bounds = [split_bound(space, each, limit, deadline) for each in wanted]
    below = [target for each in bounds for target in each.below]
    further = listed_below(space, below, limit) if all(each.score for each in bounds) else None
    if further is None or sum(_actions(configuration) for configuration, _ in further) > _MAX_ACTIONS:
        return split._replace(bound=min(each.score for each in bounds))
    others = _quickest(space, further, budgets)
    scores = [(_score(space, each.best.plan), each) for each in (split, others) if each.best is not None]
    bound, best = min(((score, each.best) for score, each in scores), default=(limit, None), key=itemgetter(0))
    return split._replace(best=best, tried=split.tried + others.tried, bound=min(bound, limit))


def _actions(configuration: Configuration) -> int:
    return 3 * configuration.pp_size * configuration.num_microbatches


def _quickest(space: SearchSpace, known: Iterable[tuple[Configuration, Solution]], budgets: Mapping[str, int]) -> Split:
    """Return the quickest by simulation of the plans that fit."""
    plans = [space.instance.plan(*each) for each in known]
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


def _score(space: SearchSpace, plan: Plan) -> float:
    """Return the simulated time as the search's score."""
    instance = space.instance
    return simulated_step_ps(plan, instance.costs) * instance.score_scale(plan.global_batch_size)


def _candidate(space: SearchSpace, plan: Plan) -> Candidate:
    costs, stages = space.instance.costs, len(plan.stages)
    short = has_timeline(stages, stages, plan.num_microbatches)
    return Candidate(plan, evaluate(plan, costs.profiles, costs, timeline=short))
