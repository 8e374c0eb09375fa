"""The best plan of the asked space: all configurations bounded, the promising ones solved and compared."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, Cluster, Model, Plan, ScenarioRegret
from shardwright_search.alternatives import MAX_NEAR, NEAR, changed, further, other_configurations, simulated
from shardwright_search.cost_model.plan import Evaluation, evaluate
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.robust import Regrets, regrets_of
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.budget import Infeasible, beyond_room, budgets_of, infeasible, min_room_bytes, room_bytes
from shardwright_search.space.configurations import Configuration, narrowed
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import Objective, Robust, SearchRequest
from shardwright_search.space.search_space import SearchSpace, Unlisted, space_of

_MAX_NEAR_ELSEWHERE = 16
"""The most plans of each other scenario of a robust search."""
_MAX_RUNNERS_UP = 5

Report = Callable[[str], None]
_Given = tuple[Model, Cluster, Profiles]


class StoppedEarly(BadInput):
    """A search that was stopped, by its time limit or Ctrl-C, knew no plan yet."""


class Candidate(NamedTuple):
    """A plan and what it is predicted to take."""

    plan: Plan
    evaluation: Evaluation


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen plan, what is proven, and plans that differ from it."""

    chosen: Candidate
    optimum_s: float
    """The least closed form that is known, as a step of the chosen batch size."""
    bound_s: float
    """A closed form that no plan of the space is below, as a step of the chosen batch size."""
    runners_up: tuple[Candidate, ...]
    examined: int
    solved: int
    near: int
    """Number of known plans within `NEAR` of the optimum; of a robust search, of the least largest regret."""
    simulated: int
    """Number of them that were simulated."""
    stopped: bool
    """Whether the search ended before it was done."""
    best: Best[Configuration]
    """The plan of the least closed form."""
    regrets: tuple[ScenarioRegret, ...]
    """Regrets of the chosen plan, and of the best one for the profile as it is, where the search was a robust one."""
    unlisted: Unlisted | None = None
    """Configurations that were bounded alone and may have a better plan."""
    reserve_gib: float = 0.0
    """The memory left free in the end: more than the request says where plans make more communicators than expected."""


def find_best(
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    file: Path,
    report: Report,
    time_limit_s: float | None = None,
) -> SearchAnswer | Infeasible:
    """Return the best plan of a request; `report` hears of the progress, `file` names the request in errors.

    Communicators are counted once plans are known. Where those of all near ones leave the rest too little, the search
    begins again with as much in reserve as the best one's take beyond the room that was left for them; a runner-up that
    fits is the answer where that finds nothing, or is stopped before it finds something better.

    Raises BadInput for a request that names no plan, and for profiles that do not fit it.
    """
    deadline = None if time_limit_s is None else monotonic() + time_limit_s
    budgets, asked, spare = budgets_of(request, cluster, file), request, None
    given = model, cluster, profiles
    once = partial(_once, given=given, file=file, report=report, deadline=deadline, budgets=budgets)
    while not isinstance(answer := once(asked), Infeasible):
        if (more := beyond_room(*answer.chosen, budgets, asked, profiles)) == 0:
            if spare is not None and answer.stopped and _sample_s(spare.chosen) < _sample_s(answer.chosen):
                return spare
            return answer
        spare = _with_runner_up(answer) if answer.runners_up else spare
        report(f"its communicators need {more} bytes more than was left for them: searching with as much in reserve")
        asked = replace(asked, reserve_gib=asked.reserve_gib + more / GIB)
    if spare is None and request is asked:
        spare = _with_min_room(once, request, given, budgets)
    return answer if spare is None else spare


def _with_min_room(
    once: Callable[[SearchRequest], SearchAnswer | Infeasible],
    request: SearchRequest,
    given: _Given,
    budgets: Mapping[str, int],
) -> SearchAnswer | None:
    """Return the fastest plan that fits of those that are found with room for the fewest communicators alone."""
    _, cluster, profiles = given
    narrow = narrowed(request, cluster)
    spared_gib = (room_bytes(narrow, *given) - min_room_bytes(narrow, *given)) / GIB
    asked = replace(request, reserve_gib=request.reserve_gib - spared_gib)
    if spared_gib == 0 or isinstance(answer := once(asked), Infeasible):
        return None
    if not beyond_room(*answer.chosen, budgets, asked, profiles):
        answer = replace(answer, runners_up=(answer.chosen, *answer.runners_up))
    return _with_runner_up(answer) if answer.runners_up else None


def _sample_s(candidate: Candidate) -> float:
    return candidate.evaluation.estimate.simulated_step_time_s / candidate.plan.global_batch_size


def _with_runner_up(answer: SearchAnswer) -> SearchAnswer:
    """Return the answer with its fastest runner-up in place of the chosen plan."""
    best = min(answer.runners_up, key=_sample_s)
    samples = best.plan.global_batch_size / answer.chosen.plan.global_batch_size
    return replace(
        answer,
        chosen=best,
        optimum_s=best.evaluation.estimate.objective_s,
        bound_s=answer.bound_s * samples,
        runners_up=tuple(each for each in answer.runners_up if each is not best),
    )


def _once(
    request: SearchRequest,
    given: _Given,
    file: Path,
    report: Report,
    deadline: float | None,
    budgets: Mapping[str, int],
) -> SearchAnswer | Infeasible:
    space = space_of(request, *given, file)
    if request.robust is not None:
        space.check_listed("robust")
    # What is only bounded is so within the time limit, too.
    unlisted, optimum = space.unlisted, _optimum_or_plain(space, deadline, report)
    if optimum.best is None:
        return _no_plan(space, unlisted)
    report(f"{len(optimum.near)} plans within {NEAR:.0%} of the optimum: simulating them")
    instance, near = space.instance, optimum.near

    def fits(candidate: Candidate) -> bool:
        return not beyond_room(*candidate, budgets, request, instance.costs.profiles)

    ranked = simulated(instance, near[:MAX_NEAR])
    num_simulated, regrets = len(ranked), tuple[ScenarioRegret, ...]()
    others = () if optimum.stopped else tuple(other_configurations(space, optimum, ranked[0].best, deadline))
    if request.robust is None:
        more = (*others, *further(space, optimum, ranked, deadline))
        ranked = tuple(sorted((*ranked, *simulated(instance, more)), key=lambda each: each.score))
        close = (each.best for each in ranked if any(each.best is other for other in near))
        best, *rest = changed(instance, ranked, deadline), *close
        chosen = next((each for each in (best, *rest) if fits(_candidate(instance, each))), best)
    else:
        all_regrets = _all_regrets(space, near[:MAX_NEAR], request.robust, deadline, report)
        nominal, near = ranked[0].best, all_regrets.least(NEAR)
        ranked = simulated(instance, near[:MAX_NEAR])
        num_simulated, chosen = len(ranked), ranked[0].best
        regrets = all_regrets.reported(chosen, nominal)
    left, scale = space.open_below(optimum.best.score), chosen.target.scale * 1e12
    candidate = _candidate(instance, chosen, timeline=True)
    known = (*others, *(each.best for each in ranked))
    return SearchAnswer(
        chosen=candidate,
        optimum_s=optimum.best.score / scale,
        bound_s=min(optimum.bound, np.inf if left is None else left.bound) / scale,
        runners_up=tuple(filter(fits, _runners_up(instance, candidate.plan, known))),
        examined=optimum.looked_at,
        solved=optimum.solved,
        near=len(near),
        simulated=num_simulated,
        stopped=optimum.stopped,
        best=optimum.best,
        regrets=regrets,
        unlisted=left,
        reserve_gib=request.reserve_gib,
    )


def _no_plan(space: SearchSpace, unlisted: Unlisted | None) -> Infeasible:
    """Return what is lacking; raises BadInput where something that was only bounded may have a plan."""
    if unlisted is not None and np.isfinite(unlisted.bound):
        raise unlisted.error(space.file)
    name = "even the leanest" if unlisted is None else "the leanest of equal widths"
    return infeasible(space.instance, [target.configuration for target in space.targets], space.file, name)


def _all_regrets(
    space: SearchSpace, near: Sequence[Best[Configuration]], robust: Robust, deadline: float | None, report: Report
) -> Regrets:
    """Return the regrets of the near plans of all scenarios; `near` are those of the profile as it is."""

    def search(scenario: str, other: Instance) -> tuple[Best[Configuration], ...]:
        report(f"scenario: {scenario}")
        return _optimum(SearchSpace(other, space.file), deadline, report).near[:_MAX_NEAR_ELSEWHERE]

    return regrets_of(space.instance, near, robust, search)


def _candidate(instance: Instance, best: Best[Configuration], timeline: bool = False) -> Candidate:
    plan = instance.plan(best.target.configuration, best.priced.solution)
    return Candidate(plan, evaluate(plan, instance.costs.profiles, instance.costs, timeline=timeline))


def _optimum_or_plain(space: SearchSpace, deadline: float | None, report: Report) -> Optimum[Configuration]:
    """Return the optimum; where the search was stopped before it knew a plan, the best of some plain ones."""
    optimum = _optimum(space, deadline, report)
    if optimum.best is not None or not optimum.stopped:
        return optimum
    promising = [target for _, target in optimum.bounds]
    if (plain := space.plain(promising or space.targets)) is None:
        raise StoppedEarly(space.file, "no plan was found before the search was stopped", "give it more time")
    return optimum._replace(best=plain, near=(plain,), bound=min(optimum.bound, plain.score))


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
    """Return a few plans that do something else than the chosen one and one another, by ascending closed form."""
    decisions = {_decision(chosen)}
    taken: list[Candidate] = []
    for other in others:
        plan = instance.plan(other.target.configuration, other.priced.solution)
        if len(taken) < _MAX_RUNNERS_UP and (decision := _decision(plan)) not in decisions:
            decisions.add(decision)
            taken.append(_candidate(instance, other))
    return tuple(sorted(taken, key=lambda c: c.evaluation.objective_ps / c.plan.global_batch_size))


def _decision(plan: Plan) -> tuple[object, ...]:
    """Return what a plan does, whatever it is called: with one microbatch all schedules do the same."""
    schedule = plan.schedule if plan.num_microbatches > 1 else None
    return plan.stages, plan.embedding, plan.head, plan.layers, plan.global_batch_size, plan.num_microbatches, schedule
