"""Split backward passes behind the best plan of the other schedules: near plans are simulated with them.

No closed form of split passes is exact enough to search by. So plans whose own closed form is near the optimum are
tried with them, and what is found is found by simulation: nothing is proven of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.types import Plan, Schedule
from shardwright_search.alternatives import MAX_NEAR
from shardwright_search.candidates import Candidate
from shardwright_search.cost_model.plan import evaluate, simulated_step_ps
from shardwright_search.simulation.simulator import has_timeline
from shardwright_search.solver.branch_and_bound import plans_below
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.budget import over_bytes
from shardwright_search.space.configurations import Configuration, is_solved
from shardwright_search.space.search_space import SearchSpace

NEAR_SPLIT = 0.1
"""Plans whose closed form is within this share of the optimum are tried: pipelines that fill and drain gain most."""
_MAX_LABELS = 10_000
"""The most work on plans near the optimum."""


class Split(NamedTuple):
    """The plan of the least simulated time among those with split backward passes that fit, and how many were tried."""

    best: Candidate | None
    tried: int
    over_bytes: int = 0
    """Bytes by which the leanest exceeds its budget, where none fits."""


def asks_for_split(schedules: Iterable[Schedule]) -> bool:
    """Return whether a request names a schedule that is looked for behind the others."""
    return not all(map(is_solved, schedules))


def best_split(
    space: SearchSpace,
    optimum: Optimum[Configuration],
    compared: Sequence[Best[Configuration]],
    budgets: Mapping[str, int],
) -> Split:
    """Return the quickest plan with split backward passes by simulation; `compared`: further plans to try."""
    instance = space.instance
    wanted = [each for each in instance.request.schedules if not is_solved(each)]
    known = dict.fromkeys(
        (best.target.configuration, best.priced.solution, schedule)
        for best in (*_near(space, optimum), *compared)
        if _is_pipeline(best.target.configuration)
        for schedule in wanted
    )
    plans = [replace(instance.plan(configuration, solution), schedule=each) for configuration, solution, each in known]
    lacking = list[int]()
    for plan in sorted(plans, key=partial(_sample_ps, space)):
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


def _sample_ps(space: SearchSpace, plan: Plan) -> float:
    return simulated_step_ps(plan, space.instance.costs) / plan.global_batch_size


def _candidate(space: SearchSpace, plan: Plan) -> Candidate:
    costs, stages = space.instance.costs, len(plan.stages)
    short = has_timeline(stages, stages, plan.num_microbatches)
    return Candidate(plan, evaluate(plan, costs.profiles, costs, timeline=short))
