"""The best plan of the asked space: all configurations bounded, the promising ones solved and compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright_formats.io import BadInput
from shardwright_formats.types import GIB, MIB, Cluster, Model, ScenarioRegret
from shardwright_search.alternatives import MAX_NEAR, NEAR, further
from shardwright_search.candidates import Candidate, best_elsewhere, candidate_of, is_short, runners_up
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.least_simulated import changed, simulated
from shardwright_search.robust import Regrets, regrets_of
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.stopping import Stopped, latest, soon, stopped_at, until
from shardwright_search.solver.targets import Best, Optimum
from shardwright_search.space.budget import (
    Infeasible,
    beyond_room,
    budgets_of,
    infeasible,
    min_room_bytes,
    room_bytes,
    states_beyond_budget,
    with_spare,
)
from shardwright_search.space.configurations import Configuration, narrowed
from shardwright_search.space.demands import NO_DEMANDS, Demands
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import Objective, Robust, SearchRequest
from shardwright_search.space.search_space import SearchSpace, Unlisted, space_of

_MAX_NEAR_ELSEWHERE = 16
"""The most plans of each other scenario of a robust search."""

T = TypeVar("T")
Report = Callable[[str], None]
_Given = tuple[Model, Cluster, Profiles]


class StoppedEarly(BadInput):
    """A search that was stopped, by its time limit or Ctrl-C, knew no plan yet."""


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The chosen plan, what is proven, and plans that differ from it."""

    chosen: Candidate
    optimum_s: float
    """The least closed form that is known, as a step of the chosen batch size."""
    bound_s: float
    """A closed form that no plan of the space is below, as a step of the chosen batch size."""
    beside: Callable[[], tuple[Candidate, ...]] = tuple
    """The function that looks for runners-up: as much work as the search itself, which few callers want."""
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
    instance: Instance
    """What was priced."""
    regrets: tuple[ScenarioRegret, ...]
    """Regrets of the chosen plan, and of the best one for the profile as it is, where the search was a robust one."""
    unlisted: Unlisted | None = None
    """Configurations that were bounded alone and may have a better plan."""
    reserve_gib: float = 0.0
    """The memory left free in the end: more than the request says where plans make more communicators than expected."""

    @cached_property
    def runners_up(self) -> tuple[Candidate, ...]:
        """The best plans that do something else, looked for when they are first read."""
        return self.beside()


def find_best(
    request: SearchRequest,
    model: Model,
    cluster: Cluster,
    profiles: Profiles,
    file: Path,
    report: Report,
    time_limit_s: float | None = None,
    demands: Demands = NO_DEMANDS,
) -> SearchAnswer | Infeasible:
    """Return the best plan of a request; `report` hears of the progress, `file` names the request in errors.

    Communicators are counted once plans are known. Where those of all near ones leave the rest too little, the search
    begins again with as much in reserve as the best one's take beyond the room that was left for them; a runner-up that
    fits is the answer where that finds nothing, or is stopped before it finds something better.

    Raises BadInput for a request that names no plan, and for profiles that do not fit it; RuntimeError where a time
    limit is given in another thread than the main one.
    """
    deadline = until(time_limit_s)
    request = with_spare(request, cluster, profiles)
    budgets, asked, left = budgets_of(request, cluster, file), request, list[SearchAnswer]()
    given = model, cluster, profiles
    once = partial(_once, given=given, file=file, report=report, deadline=deadline, budgets=budgets, demands=demands)
    while not isinstance(answer := _or_spare(once, asked, left), Infeasible):
        if (more := beyond_room(*answer.chosen, budgets, asked, profiles)) == 0:
            spare = _spare(left) if answer.stopped else None
            faster = spare is not None and spare.chosen.sample_s < answer.chosen.sample_s
            return replace(spare, stopped=True) if spare is not None and faster else answer
        left.append(answer)
        report(f"its communicators need {more} bytes more than was left for them: searching with as much in reserve")
        asked = replace(asked, reserve_gib=asked.reserve_gib + more / GIB)
    last = partial(once, deadline=0.0) if answer.stopped else once
    spare = _spare(left) if left else _with_min_room(last, request, given, budgets, answer)
    return answer if spare is None else spare


def _or_spare(
    once: Callable[..., SearchAnswer | Infeasible], request: SearchRequest, left: Sequence[SearchAnswer]
) -> SearchAnswer | Infeasible:
    """Return the answer to a request, or the spare one of those before where time or Ctrl-C leave no other."""
    try:
        return once(request, known=left[-1].instance if left else None)
    except (StoppedEarly, KeyboardInterrupt):
        if (spare := _spare(left)) is None:
            raise
        return replace(spare, stopped=True)


def _spare(answers: Sequence[SearchAnswer]) -> SearchAnswer | None:
    """Return the last of the answers that has a runner-up, with that in place of its plan; None: there is none."""
    return next((_with_runner_up(answer) for answer in reversed(answers) if answer.runners_up), None)


def _with_min_room(
    once: Callable[[SearchRequest], SearchAnswer | Infeasible],
    request: SearchRequest,
    given: _Given,
    budgets: Mapping[str, int],
    without: Infeasible,
) -> SearchAnswer | None:
    """Return the fastest plan that fits of those that are found with room for the fewest communicators alone."""
    _, cluster, profiles = given
    narrow = narrowed(request, cluster)
    spared_bytes = room_bytes(narrow, *given) - min_room_bytes(narrow, *given)
    asked = replace(request, reserve_gib=request.reserve_gib - spared_bytes / GIB)
    if spared_bytes == 0 or without.missing_bytes > spared_bytes + MIB or isinstance(answer := once(asked), Infeasible):
        return None
    if not beyond_room(*answer.chosen, budgets, asked, profiles):
        fitting = answer.chosen, *answer.runners_up
        answer = replace(answer, beside=lambda: fitting)
    return _with_runner_up(answer) if answer.runners_up else None


def _with_runner_up(answer: SearchAnswer) -> SearchAnswer:
    """Return the answer with its fastest runner-up in place of the chosen plan."""
    best = min(answer.runners_up, key=attrgetter("sample_s"))
    rest = tuple(each for each in answer.runners_up if each is not best)
    samples = best.plan.global_batch_size / answer.chosen.plan.global_batch_size
    return replace(
        answer,
        chosen=best,
        optimum_s=best.evaluation.estimate.objective_s,
        bound_s=answer.bound_s * samples,
        beside=lambda: rest,
    )


class _Choice(NamedTuple):
    """The plans that a search would choose, in this order, and what it knows beside them."""

    first: Best[Configuration]
    """The plan near the optimum of the least simulated time."""
    ranked: tuple[Best[Configuration], ...]
    near: int
    simulated: int = 0
    compared: tuple[Best[Configuration], ...] = ()
    """All plans that were simulated."""
    regrets: tuple[ScenarioRegret, ...] = ()


def _once(
    request: SearchRequest,
    given: _Given,
    file: Path,
    report: Report,
    deadline: float,
    budgets: Mapping[str, int],
    known: Instance | None = None,
    demands: Demands = NO_DEMANDS,
) -> SearchAnswer | Infeasible:
    space = listed(lambda: _listed(space_of(request, *given, file, known, demands)), file, deadline)
    if states_beyond_budget(space.instance) > 0:
        return _no_plan(space, deadline)
    optimum = _optimum_or_plain(space, deadline, report)
    if optimum.best is None:
        return _no_plan(space, deadline)
    report(f"{len(optimum.near)} plans within {NEAR:.0%} of the optimum: simulating them")
    # What follows a stopped search has little time, or none with a second Ctrl-C.
    after = soon(0.0 if optimum.stopped else deadline)
    choices = _choices(space, optimum) if request.robust is None else _robust(space, optimum, report)
    choice, whole = latest(choices, after)
    choice = choice or _Choice(optimum.best, (optimum.best,), len(optimum.near))

    def fits(candidate: Candidate) -> bool:
        return not beyond_room(*candidate, budgets, request, space.instance.costs.profiles)

    stopped = optimum.stopped or not whole
    return replace(_answer(space, optimum, choice, fits, deadline), stopped=stopped, reserve_gib=request.reserve_gib)


def listed(make: Callable[[], T], file: Path, deadline: float) -> T:
    """Return what is made with its configurations listed; raises StoppedEarly where that takes longer than allowed."""
    try:
        with stopped_at(soon(deadline)):
            return make()
    except Stopped:
        raise _too_early(file) from None


def _listed(space: SearchSpace) -> SearchSpace:
    """Return the space with all configurations listed, those that are only bounded among them."""
    if space.instance.request.robust is not None:
        space.check_listed("robust")
    _ = space.unlisted, space.targets
    return space


def _choices(space: SearchSpace, optimum: Optimum[Configuration]) -> Iterator[_Choice]:
    """Yield what is chosen of the plans near the optimum: the least simulated time, with others and changes better."""
    instance, near = space.instance, optimum.near
    ranked = simulated(instance, near[:MAX_NEAR])
    choice = _Choice(ranked[0].best, tuple(each.best for each in ranked), len(near), len(ranked))
    yield choice
    more = further(space, optimum, ranked)
    ranked = tuple(sorted((*ranked, *simulated(instance, more)), key=lambda each: each.score))
    close = tuple(each.best for each in ranked if any(each.best is other for other in near))
    for best in changed(instance, ranked):
        yield choice._replace(ranked=(best, *close), compared=tuple(each.best for each in ranked))


def _robust(space: SearchSpace, optimum: Optimum[Configuration], report: Report) -> Iterator[_Choice]:
    """Yield what is chosen by the largest regret over all scenarios."""
    assert space.instance.request.robust is not None
    ranked = simulated(space.instance, optimum.near[:MAX_NEAR])
    all_regrets = _all_regrets(space, optimum.near[:MAX_NEAR], space.instance.request.robust, report)
    nominal, near = ranked[0].best, all_regrets.least(NEAR)
    ranked = simulated(space.instance, near[:MAX_NEAR])
    plans, regrets = tuple(each.best for each in ranked), all_regrets.reported(ranked[0].best, nominal)
    yield _Choice(nominal, plans[:1], len(near), len(ranked), plans, regrets)


def _answer(
    space: SearchSpace,
    optimum: Optimum[Configuration],
    choice: _Choice,
    fits: Callable[[Candidate], bool],
    deadline: float,
) -> SearchAnswer:
    """Return the first of the ranked plans that fits, or the first of all, with what is proven."""
    assert optimum.best is not None
    instance, ranked = space.instance, choice.ranked
    chosen = next((each for each in ranked if len(ranked) > 1 and fits(candidate_of(instance, each))), ranked[0])
    left, scale = space.open_below(optimum.best.score), chosen.target.scale * 1e12
    candidate = candidate_of(instance, chosen, timeline=is_short(chosen.target.configuration))

    def beside() -> tuple[Candidate, ...]:
        known = (*best_elsewhere(space, optimum, choice.first, deadline), *choice.compared)
        return tuple(filter(fits, runners_up(instance, candidate.plan, known)))

    return SearchAnswer(
        chosen=candidate,
        optimum_s=optimum.best.score / scale,
        bound_s=min(optimum.bound, inf if left is None else left.bound) / scale,
        beside=beside,
        examined=optimum.looked_at,
        solved=optimum.solved,
        near=choice.near,
        simulated=choice.simulated,
        stopped=optimum.stopped,
        best=optimum.best,
        instance=instance,
        regrets=choice.regrets,
        unlisted=left,
    )


def _no_plan(space: SearchSpace, deadline: float) -> Infeasible:
    """Return what is lacking; raises BadInput where something that was only bounded may have a plan."""
    unlisted = space.unlisted
    if unlisted is not None and np.isfinite(unlisted.bound):
        raise unlisted.error(space.file)
    name = "even the leanest" if unlisted is None else "the leanest of equal widths"
    configurations = [target.configuration for target in space.targets]
    return infeasible(space.instance, configurations, space.file, name, soon(deadline))


def _all_regrets(space: SearchSpace, near: Sequence[Best[Configuration]], robust: Robust, report: Report) -> Regrets:
    """Return the regrets of the near plans of all scenarios; `near` are those of the profile as it is."""

    def search(scenario: str, other: Instance) -> tuple[Best[Configuration], ...]:
        report(f"scenario: {scenario}")
        return _optimum(SearchSpace(other, space.file, space.demands), None, report).near[:_MAX_NEAR_ELSEWHERE]

    return regrets_of(space.instance, near, robust, search)


def _optimum_or_plain(space: SearchSpace, deadline: float, report: Report) -> Optimum[Configuration]:
    """Return the optimum; where the search was stopped before it knew a plan, the best of some plain ones."""
    optimum = _optimum(space, deadline, report)
    if optimum.best is not None or not optimum.stopped:
        return optimum
    promising = [target for _, target in optimum.bounds]
    if (plain := space.plain(promising or space.targets)) is None:
        raise _too_early(space.file)
    return optimum._replace(best=plain, near=(plain,), bound=min(optimum.bound, plain.score))


def _too_early(file: Path) -> StoppedEarly:
    return StoppedEarly(file, "no plan was found before the search was stopped", "give it more time")


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
