"""The best plan of the asked space: every configuration bounded, the promising ones solved and compared."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np

from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, Cluster, Model, Plan, ScenarioRegret
from shardwright_search.alternatives import MAX_NEAR, NEAR, further, other_configurations
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.least_simulated import changed, simulated
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.budget import Infeasible, beyond_room, budgets_of, infeasible, min_room_bytes, room_bytes
from shardwright_search.space.configurations import Configuration, narrowed
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import Objective, SearchRequest
from shardwright_search.space.search_space import SearchSpace, Unlisted, space_of

_MAX_NEAR_ELSEWHERE = 16
"""Plans of each other scenario of a robust search."""
_MAX_RUNNERS_UP = 5

Report = Callable[[str], None]
_Given = tuple[Model, Cluster, Profiles]


class StoppedEarly(BadInput):
    """A search that was stopped, by its time limit or Ctrl-C, knew no plan yet."""


class Candidate(NamedTuple):
    """A plan and what it is predicted to take."""

    plan: Plan
    evaluation: Evaluation


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen plan, what is proven, and plans that differ from it."""

    chosen: Candidate
    optimum_s: float
    """The least closed form found, as a step of the chosen batch size."""
    bound_s: float
    """A closed form that no plan of the space is below, likewise."""
    runners_up: tuple[Candidate, ...]
    examined: int
    solved: int
    near: int
    """Plans within `NEAR` of the optimum that were found; of a robust search, of the least largest regret."""
    simulated: int
    """The number of them that were simulated."""
    stopped: bool
    """Whether the search ended before it was done."""
    best: Best[Configuration]
    """The plan of the least closed form."""
    regrets: tuple[ScenarioRegret, ...]
    """Of the chosen plan and that plan's like for the profile as it is, where the search was a robust one."""
    unlisted: Unlisted | None = None
    """Configurations that were bounded alone and may have a better plan."""
    reserve_gib: float = 0.0
    """What was left free in the end: more than the request says where plans make more communicators than expected."""


def find_best(
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    file: Path,
    report: Report,
    time_limit_s: float | None = None,
) -> Found | Infeasible:
    """The best plan of a request; `report` hears of the progress, `file` names the request in errors.

    Communicators are counted once plans are known. Where those of all near ones leave the rest too little, the search
    begins again with as much in reserve as the best one's take beyond the room that was left for them; a runner-up that
    fits is the answer where that finds nothing, or is stopped before it finds something better.

    Raises BadInput for a request that names no plan, and for profiles that do not fit it.
    """
    deadline = None if time_limit_s is None else monotonic() + time_limit_s
    budgets, asked, spare = budgets_of(request, cluster, file), request, None
    given = model, cluster, profiles
    once = partial(_once, given=given, file=file, report=report, deadline=deadline, budgets=budgets)
    while not isinstance(found := once(asked), Infeasible):
        fitting = tuple(one for one in found.runners_up if not beyond_room(*one, budgets, asked, profiles))
        found = msgspec.structs.replace(found, runners_up=fitting, reserve_gib=asked.reserve_gib)
        if (more := beyond_room(*found.chosen, budgets, asked, profiles)) == 0:
            return spare if spare is not None and found.stopped and _sample_s(spare) < _sample_s(found) else found
        spare = _with_runner_up(found) if fitting else spare
        report(f"its communicators need {more} bytes more than was left for them: searching with as much in reserve")
        asked = msgspec.structs.replace(asked, reserve_gib=asked.reserve_gib + more / GIB)
    if spare is None and request is asked:
        spare = _with_least_room(once, request, given, budgets)
    return found if spare is None else spare


def _with_least_room(
    once: Callable[[SearchRequest], Found | Infeasible],
    request: SearchRequest,
    given: _Given,
    budgets: Mapping[str, int],
) -> Found | None:
    """The fastest plan that fits of those that are found where room is left for the fewest communicators alone."""
    _, cluster, profiles = given
    narrow = narrowed(request, cluster)
    spared_gib = (room_bytes(narrow, *given) - min_room_bytes(narrow, *given)) / GIB
    asked = msgspec.structs.replace(request, reserve_gib=request.reserve_gib - spared_gib)
    if spared_gib == 0 or isinstance(found := once(asked), Infeasible):
        return None
    every = (found.chosen, *found.runners_up)
    fitting = tuple(one for one in every if not beyond_room(*one, budgets, asked, profiles))
    found = msgspec.structs.replace(found, runners_up=fitting, reserve_gib=asked.reserve_gib)
    return _with_runner_up(found) if fitting else None


def _sample_s(found: Found) -> float:
    plan, evaluation = found.chosen
    return evaluation.estimate.simulated_step_time_s / plan.global_batch_size


def _with_runner_up(found: Found) -> Found:
    """The fastest runner-up in place of the chosen plan."""
    every = [msgspec.structs.replace(found, chosen=one) for one in found.runners_up]
    best = min(every, key=_sample_s)
    samples = best.chosen.plan.global_batch_size / found.chosen.plan.global_batch_size
    return msgspec.structs.replace(
        best,
        optimum_s=best.chosen.evaluation.estimate.objective_s,
        bound_s=found.bound_s * samples,
        runners_up=tuple(one for one in found.runners_up if one is not best.chosen),
    )


def _once(
    request: SearchRequest,
    given: _Given,
    file: Path,
    report: Report,
    deadline: float | None,
    budgets: Mapping[str, int],
) -> Found | Infeasible:
    space = space_of(request, *given, file)
    instance, profiles = space.instance, space.instance.costs.profiles

    def fits(one: Best[Configuration]) -> bool:
        plan = instance.plan(one.target.configuration, one.found.solution)
        candidate = Candidate(plan, evaluate(plan, profiles, instance.costs, timeline=False))
        return not beyond_room(*candidate, budgets, request, profiles)

    if request.robust is not None:
        space.check_listed("robust")
    # What is only bounded is so within the time limit, too.
    left, optimum = space.unlisted, _optimum(space, deadline, report)
    if optimum.best is None and optimum.stopped:
        promising = [target for _, target in optimum.bounds]
        if (plain := space.plain(promising or space.targets)) is None:
            raise StoppedEarly(file, "no plan was found before the search was stopped", "give it more time")
        optimum = optimum._replace(best=plain, near=(plain,), bound=min(optimum.bound, plain.score))
    if optimum.best is None:
        if left is not None and np.isfinite(left.bound):
            raise left.error(file)
        name = "even the leanest" if left is None else "the leanest of equal widths"
        return infeasible(instance, [target.configuration for target in space.targets], file, name)
    left = space.open_below(optimum.best.score)
    report(f"{len(optimum.near)} plans within {NEAR:.0%} of the optimum: simulating them")
    close = optimum.near
    ranked = simulated(instance, close[:MAX_NEAR])
    num_simulated = len(ranked)
    others = () if optimum.stopped else tuple(other_configurations(space, optimum, ranked[0].best, deadline))
    regrets: tuple[ScenarioRegret, ...] = ()
    if request.robust is None:
        more = (*others, *further(space, optimum, ranked, deadline))
        ranked = tuple(sorted((*ranked, *simulated(instance, more)), key=lambda one: one.score))
        chosen = changed(instance, ranked, deadline)
        near = (one.best for one in ranked if any(one.best is each for each in close))
        fitting = (one for one in (chosen, *near) if fits(one))
        chosen = next(fitting, chosen)
    else:
        from shardwright_search.robust import regrets_of

        def search(scenario: str, other: Instance) -> tuple[Best[Configuration], ...]:
            report(f"scenario: {scenario}")
            return _optimum(SearchSpace(other, file), deadline, report).near[:_MAX_NEAR_ELSEWHERE]

        every = regrets_of(instance, close[:MAX_NEAR], request.robust, search)
        nominal, close = ranked[0].best, every.least(NEAR)
        ranked = simulated(instance, close[:MAX_NEAR])
        num_simulated, chosen = len(ranked), ranked[0].best
        regrets = every.reported(chosen, nominal)
    plan = instance.plan(chosen.target.configuration, chosen.found.solution)
    scale = chosen.target.scale * 1e12
    return Found(
        chosen=Candidate(plan, evaluate(plan, profiles, instance.costs)),
        optimum_s=optimum.best.score / scale,
        bound_s=min(optimum.bound, np.inf if left is None else left.bound) / scale,
        runners_up=_runners_up(instance, plan, (*others, *(one.best for one in ranked))),
        examined=optimum.looked_at,
        solved=optimum.solved,
        near=len(close),
        simulated=num_simulated,
        stopped=optimum.stopped,
        best=optimum.best,
        regrets=regrets,
        unlisted=left,
    )


def _optimum(space: SearchSpace, deadline: float | None, report: Report) -> Optimum[Configuration]:
    def progress(best: float, bound: float, left: int) -> None:
        known = "no plan yet" if not np.isfinite(best) else f"best {best * 1e-9:.6g} ms, gap {best / bound - 1:.2%}"
        unit = "step" if space.instance.request.objective is Objective.STEP_TIME else "sample"
        report(f"{left} configurations left: {known}, bound {bound * 1e-9:.6g} ms a {unit}")

    report(f"bounding {len(space.targets)} configurations")
    return optimize(
        space.targets,
        space.solvable,
        NEAR,
        MAX_NEAR,
        deadline,
        progress,
        waits=lambda asked: asked.num_chunks > 1,
        wide=len(space.instance.budgets) > 1,
    )


def _runners_up(instance: Instance, chosen: Plan, others: Sequence[Best[Configuration]]) -> tuple[Candidate, ...]:
    """A few plans that do something else than the chosen one and one another, by ascending closed form."""
    known = {_decision(chosen)}
    taken: list[Candidate] = []
    for other in others:
        plan = instance.plan(other.target.configuration, other.found.solution)
        if len(taken) < _MAX_RUNNERS_UP and (what := _decision(plan)) not in known:
            known.add(what)
            taken.append(Candidate(plan, evaluate(plan, instance.costs.profiles, instance.costs, timeline=False)))
    return tuple(sorted(taken, key=lambda c: c.evaluation.objective_ps / c.plan.global_batch_size))


def _decision(plan: Plan) -> tuple[object, ...]:
    """Return what a plan does, whatever it is called: with one microbatch all schedules do the same."""
    schedule = plan.schedule if plan.num_microbatches > 1 else None
    return plan.stages, plan.embedding, plan.head, plan.layers, plan.global_batch_size, plan.num_microbatches, schedule
