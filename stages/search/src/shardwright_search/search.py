"""The best plan of the requested space: all configurations are bounded, the promising ones solved and compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from math import ceil, inf
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.types import GIB, Cluster, Model
from shardwright_search.candidates import (
    MAX_NEAR,
    NEAR,
    Candidate,
    best_alike,
    best_elsewhere,
    candidate_of,
    changed,
    further,
    is_short,
    runners_up,
    simulated,
)
from shardwright_search.cost_model.profiles import Profiles
from shardwright_search.first_plans import first_plans
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.stopping import CpuSeconds, Stopped, expired, latest, left, soon, stopped_at, until
from shardwright_search.solver.targets import Best, Optimum, Target
from shardwright_search.space.budget import (
    Infeasible,
    budgets_of,
    infeasible,
    over_bytes,
    states_beyond_budget,
    with_spare,
)
from shardwright_search.space.configurations import NO_DEMANDS, Configuration, Demands
from shardwright_search.space.instance import Instance
from shardwright_search.space.request import Objective, SearchRequest, of_each_optimizer
from shardwright_search.space.search_space import NothingListed, SearchSpace, Unlisted, space_of
from shardwright_search.split_backward import Split, asks_for_split, best_split

# Sentences about what a search has proven.


MOST_PROVEN = 0.001
"""The largest gap of a plan that is called optimal."""
_ROUNDING = 1e-12
"""Relative: seconds are fractions of whole picoseconds, so two equal times may differ by this share."""


def proof_words(optimum_s: float, bound_s: float, within: str = "") -> str:
    """Return, in words, what a bound proves about a plan; `within`: the limits of the plans; bound 0: no bound."""
    if not bound_s:
        return "not proven: how much faster another plan may be is not known"
    gap = optimum_s / bound_s - 1
    if gap > MOST_PROVEN:
        return f"not proven: up to {gap * 100:.1f} % may be left"
    return f"proven optimal{within} under these estimates (gap {gap * 100:.2f} %)"


def split_words(time_s: float, bound_s: float, kind: str = "with split backward passes") -> str:
    """Return, in words, what is proven of all plans of a kind, compared with a plan's simulated seconds.

    A bound of 0 proves nothing.
    """
    if not bound_s:
        return f"how much faster another plan {kind} may be is not known"
    if bound_s * (1 + _ROUNDING) >= time_s:
        return f"no plan {kind} is faster by simulation, proven"
    more = ceil((time_s / bound_s - 1) * 1e4) / 100
    return f"no plan {kind} is more than {more:.2f} % faster by simulation, proven"


_FIRST_SHARE = 0.6
"""The largest share of a time limit that is spent on first plans: bounds, and so proofs, come after them."""
_LATE_S = 1.5
"""CPU seconds that the first plan of all may take past a limit: a plan that is a little late is better than none."""
_MAX_RUNNERS_UP = 5
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
    """Number of known plans within `NEAR` of the optimum."""
    simulated: int
    """Number of them that were simulated."""
    stopped: bool
    """Whether the search ended before it was done."""
    best: Best[Configuration]
    """The plan of the least closed form."""
    tolerance: float = 0.0
    """The share of the bound within which the simplest plan was chosen; 0: the chosen plan is the fastest."""
    instance: Instance
    """The request that was searched, with the prices computed for it."""
    bounds: tuple[tuple[float, Target[Configuration]], ...] = ()
    """A lower bound of the score of each configuration, the least first."""
    unlisted: Unlisted | None = None
    """Configurations that were only bounded and may have a better plan."""
    fits: bool = True
    """Whether the chosen plan fits with its communicators."""
    split: int | None = None
    """Number of plans that were simulated with split backward passes; None: they were not requested."""
    split_plan: Candidate | None = None
    """The quickest plan with split backward passes that was found."""
    split_over_bytes: int = 0
    """Bytes by which the leanest of them exceeds its budget, if none fits."""
    split_bound: float = 0.0
    """A score by simulation that no plan with split backward passes is below; 0: nothing is proven of them."""
    over_bytes: int = 0
    """Bytes by which the plan of the least closed form exceeds its budget with its communicators; 0: it fits."""

    @property
    def chosen_scale(self) -> float:
        """Return the factor from a time of a step of the chosen batch size to the score that is minimised."""
        return self.instance.score_scale(self.chosen.plan.global_batch_size)

    @property
    def split_bound_s(self) -> float:
        """Return a simulated time that no plan with split backward passes is below, as a step of the chosen batch."""
        return self.split_bound * 1e-12 / self.chosen_scale

    @cached_property
    def runners_up(self) -> tuple[Candidate, ...]:
        """Return the best plans with other decisions, searched when first read."""
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
    priced: Instance | None = None,
) -> SearchAnswer | Infeasible:
    """Return the best plan of a request; `report` receives progress messages, `file` names the request in errors.

    `priced`: the prices of a request that differs only in the batch size or the budget; they are reused, and no plans
    of one strategy are searched first.

    The solver counts the least communicators that each stage makes. If the plan that it finds exceeds the budget with
    all its communicators, it searches again with that much more in reserve. The answer is the fastest plan found that
    fits, and the bound holds for all plans.

    Raises BadInput for a request that no plan meets, and for profiles that do not fit it; RuntimeError if a time limit
    is given in another thread than the main one.
    """
    if len(each := of_each_optimizer(request)) > 1:
        several = [(f"optimizer {one.optimizer}", one, demands) for one in each]
        return best_of_requests(several, (model, cluster, profiles), file, report, time_limit_s)
    deadline = until(time_limit_s)
    request = with_spare(request, cluster, profiles)
    budgets, given = budgets_of(request, cluster, file), (model, cluster, profiles)
    answers, reserve = list[SearchAnswer](), 0
    while reserve < min(budgets.values()):
        known = answers[-1].instance if answers else priced
        asked = replace(request, reserve_gib=request.reserve_gib + reserve / GIB)
        try:
            answer = _once(asked, given, file, report, deadline, budgets, known, demands)
        except (StoppedEarly, KeyboardInterrupt):
            if any(each.fits for each in answers):
                return replace(_fastest(answers), stopped=True)
            raise
        if isinstance(answer, Infeasible):
            if not answers:
                return answer
            break
        answers.append(answer)
        if answer.over_bytes == 0 or (answer.stopped and answer.fits):
            break
        if reserve == 0 and (alike := _alike(answer, budgets, deadline)) is not None:
            answers.append(alike)
            if alike.optimum_s <= answer.bound_s * (1 + NEAR):
                break
        # At least twice as much each time, so that the same plan is not found again and again.
        reserve += max(answer.over_bytes, reserve)
        report(f"its communicators exceed the budget by {answer.over_bytes} bytes: searching with more in reserve")
    return _fastest(answers) if any(each.fits for each in answers) else _beyond(budgets, answers)


def best_of_requests(
    asked: Sequence[tuple[str, SearchRequest, Demands]],
    given: _Given,
    file: Path,
    report: Report,
    time_limit_s: float | None = None,
) -> SearchAnswer | Infeasible:
    """Return the best answer to several requests, each with its words and demands and an equal share of the time left.

    Raises StoppedEarly if no plan was found in time, and NothingListed if no request has a plan at all.
    """
    deadline, answers, lacking = until(time_limit_s), list[SearchAnswer](), list[Infeasible]()
    late, unlisted = list[StoppedEarly](), list[NothingListed]()
    for number, (words, request, demands) in enumerate(asked):
        report(words)
        try:
            answer = find_best(request, *given, file, report, _share(deadline, len(asked) - number), demands)
        except NothingListed as error:
            unlisted.append(error)
        except StoppedEarly as error:
            late.append(error)
        else:
            (lacking if isinstance(answer, Infeasible) else answers).append(answer)  # type: ignore[arg-type]
    if answers:
        return best_of(answers, late)
    if late or not lacking:
        raise (late or unlisted)[0]
    return min(lacking, key=lambda each: each.missing_bytes)


def _share(deadline: float, parts: int) -> float | None:
    """Return an equal part of the time until a deadline, on its clock; None: there is no deadline."""
    left_s = left(deadline)
    if left_s is None:
        return None
    return CpuSeconds(left_s / parts) if isinstance(deadline, CpuSeconds) else left_s / parts


def best_of(answers: Sequence[SearchAnswer], late: Sequence[StoppedEarly]) -> SearchAnswer:
    """Return the fastest answer, with the proof for all; no proof if a search was stopped too early."""
    best, *others = sorted(answers, key=lambda answer: answer.chosen.sample_s)

    def beside() -> tuple[Candidate, ...]:
        plans = sorted((*best.runners_up, *(other.chosen for other in others)), key=lambda each: each.sample_s)
        return tuple(plans[:_MAX_RUNNERS_UP])

    def least(times_s: Callable[[SearchAnswer], float]) -> float:
        samples = best.chosen.plan.global_batch_size
        return min(times_s(answer) * samples / answer.chosen.plan.global_batch_size for answer in answers)

    return replace(
        best,
        beside=beside,
        optimum_s=least(attrgetter("optimum_s")),
        bound_s=0.0 if late else least(attrgetter("bound_s")),
        split_bound=0.0 if late else min(answer.split_bound for answer in answers),
        examined=sum(answer.examined for answer in answers),
        solved=sum(answer.solved for answer in answers),
        stopped=bool(late) or any(answer.stopped for answer in answers),
    )


def _alike(answer: SearchAnswer, budgets: Mapping[str, int], deadline: float) -> SearchAnswer | None:
    """Return the answer with the best plan whose stages have one set of process groups, so that it is known to fit.

    None: no such plan was found.
    """
    instance = answer.instance
    best, whole = latest(best_alike(instance, answer.bounds, inf), soon(deadline))
    if best is None or not _is_within(candidate := candidate_of(instance, best), budgets):
        return None
    scale = instance.score_scale(candidate.plan.global_batch_size)
    return replace(
        answer,
        chosen=candidate,
        best=best,
        optimum_s=best.score * 1e-12 / scale,
        bound_s=answer.bound_s * answer.chosen_scale / scale,
        beside=tuple,
        stopped=answer.stopped or not whole,
        fits=True,
    )


def _fastest(answers: Sequence[SearchAnswer]) -> SearchAnswer:
    """Return the fastest of the answers that fit, with the bound of the first, which had no additional reserve."""
    first, best = answers[0], min((each for each in answers if each.fits), key=lambda each: each.chosen.sample_s)
    as_best = first.chosen_scale / best.chosen_scale
    stopped = any(answer.stopped for answer in answers)
    bound_s = min(best.bound_s, first.bound_s * as_best)
    return replace(best, bound_s=bound_s, split_bound=min(best.split_bound, first.split_bound), stopped=stopped)


def _beyond(budgets: Mapping[str, int], answers: Sequence[SearchAnswer]) -> Infeasible:
    """Return by how many bytes the leanest plan of answers, none of which fits, exceeds its budget."""
    least = min(each.over_bytes for each in answers)
    min_bytes = min(budgets.values()) + least
    reason = (
        f"no plan fits: the communicators of the leanest that was found exceed the budget by {least} bytes: "
        f"raise memory_gib to {ceil(min_bytes / GIB * 1e6) / 1e6:.6f}"
    )
    return Infeasible(reason, least, min_bytes, False)


class _Choice(NamedTuple):
    """Plans in the order in which a search would choose them, and what is known about others."""

    first: Best[Configuration]
    """The plan with the least simulated time of those near the optimum."""
    ranked: tuple[Best[Configuration], ...]
    near: int
    simulated: int = 0
    compared: tuple[Best[Configuration], ...] = ()
    """All plans that were simulated."""


def _once(
    request: SearchRequest,
    given: _Given,
    file: Path,
    report: Report,
    deadline: float,
    budgets: Mapping[str, int],
    known: Instance | None,
    demands: Demands,
) -> SearchAnswer | Infeasible:
    space = listed(lambda: _listed(space_of(request, *given, file, known, demands)), file, deadline)
    if states_beyond_budget(space.instance) > 0:
        return _no_plan(space, deadline)
    first, whole = (None, True) if known is not None else _first(space, deadline)
    optimum = _optimum_or_first(space, deadline if whole else 0.0, report, first, budgets)
    if optimum.best is None:
        return _no_plan(space, deadline)
    report(f"{len(optimum.near)} plans within {NEAR:.0%} of the optimum: simulating them")
    # What follows a stopped search has little time, or none with a second Ctrl-C.
    after = soon(0.0 if optimum.stopped else deadline)
    choice, whole = latest(_choices(space, optimum), after)
    choice = choice or _Choice(optimum.best, (optimum.best,), len(optimum.near))
    answer = _answer(space, optimum, choice, budgets, deadline)
    if asks_for_split(request.schedules):
        joint = answer.chosen if answer.fits else None
        answer = _with_split(answer, best_split(space, optimum, choice.compared, budgets, joint, after))
    return replace(answer, stopped=optimum.stopped or not whole)


def _with_split(answer: SearchAnswer, split: Split) -> SearchAnswer:
    """Return the answer with the plan of split backward passes, if that is faster by simulation or only that fits."""
    if split.best is None or (answer.fits and answer.chosen.sample_s <= split.best.sample_s):
        fields = {"split_over_bytes": split.over_bytes, "split_bound": split.bound}
        return replace(answer, split=split.tried, split_plan=split.best, **fields)
    factor = answer.chosen_scale / answer.instance.score_scale(split.best.plan.global_batch_size)
    return replace(
        answer,
        chosen=split.best,
        optimum_s=answer.optimum_s * factor,
        bound_s=answer.bound_s * factor,
        fits=True,
        split=split.tried,
        split_plan=split.best,
        split_bound=split.bound,
    )


def listed(make: Callable[[], T], file: Path, deadline: float) -> T:
    """Return the result of listing configurations; raise StoppedEarly if that exceeds the time limit."""
    try:
        with stopped_at(soon(deadline)):
            return make()
    except Stopped:
        raise _too_early(file) from None


def _listed(space: SearchSpace) -> SearchSpace:
    """Return the space with all configurations listed, including those that are only bounded."""
    _ = space.unlisted, space.targets
    return space


def _choices(space: SearchSpace, optimum: Optimum[Configuration]) -> Iterator[_Choice]:
    """Yield choices among the plans near the optimum, by least simulated time; later ones consider more plans."""
    instance, near = space.instance, optimum.near
    ranked = simulated(instance, near[:MAX_NEAR])
    choice = _Choice(ranked[0].best, tuple(each.best for each in ranked), len(near), len(ranked))
    yield choice
    more = further(space, optimum, ranked)
    ranked = tuple(sorted((*ranked, *simulated(instance, more)), key=lambda each: each.score))
    close = tuple(each.best for each in ranked if any(each.best is other for other in near))
    for best in changed(instance, ranked):
        yield choice._replace(ranked=(best, *close), compared=tuple(each.best for each in ranked))


def _answer(
    space: SearchSpace,
    optimum: Optimum[Configuration],
    choice: _Choice,
    budgets: Mapping[str, int],
    deadline: float,
) -> SearchAnswer:
    """Return the first of the ranked plans that fits, or the first of all, with what is proven."""
    assert optimum.best is not None
    instance, ranked = space.instance, choice.ranked

    is_within = partial(_is_within, budgets=budgets)
    chosen = next((each for each in ranked if len(ranked) > 1 and is_within(candidate_of(instance, each))), ranked[0])
    configuration, scale = chosen.target.configuration, chosen.target.scale * 1e12
    candidate = candidate_of(instance, chosen, timeline=is_short(configuration))
    fastest = candidate_of(instance, optimum.best)
    best = optimum.best if is_within(fastest) else chosen
    left = space.open_below(best.score)

    def beside() -> tuple[Candidate, ...]:
        known = (*best_elsewhere(space, optimum, choice.first, deadline), *choice.compared)
        return tuple(filter(is_within, runners_up(instance, candidate.plan, known)))

    return SearchAnswer(
        chosen=candidate,
        optimum_s=best.score / scale,
        bound_s=min(optimum.bound, inf if left is None else left.bound) / scale,
        beside=beside,
        examined=optimum.looked_at,
        solved=optimum.solved,
        near=choice.near,
        simulated=choice.simulated,
        stopped=optimum.stopped,
        best=best,
        instance=instance,
        bounds=optimum.bounds,
        unlisted=left,
        fits=is_within(candidate),
        over_bytes=max(0, *over_bytes(fastest.plan, fastest.evaluation.estimate, budgets)),
    )


def _no_plan(space: SearchSpace, deadline: float) -> Infeasible:
    """Return by how much no plan fits; raise BadInput if a part of the space that is only bounded may have a plan."""
    unlisted = space.unlisted
    if unlisted is not None and np.isfinite(unlisted.bound):
        raise unlisted.error(space.file)
    name = "even the leanest" if unlisted is None else "the leanest of equal widths"
    configurations = [target.configuration for target in space.targets]
    return infeasible(space.instance, configurations, space.file, name, soon(deadline))


def _first(space: SearchSpace, deadline: float) -> tuple[Best[Configuration] | None, bool]:
    """Return the best plan found in the share of the time that first plans get, and whether the search may go on."""
    left_s = left(deadline)
    share = deadline if left_s is None else deadline - left_s * (1 - _FIRST_SHARE)
    share = CpuSeconds(share) if isinstance(deadline, CpuSeconds) else share
    first, whole = latest(first_plans(space), share)
    # With time left, it was Ctrl-C that ended them.
    in_time = not expired(share)
    if first is None and not whole and not in_time:
        until_late = deadline if (left(deadline) or 0.0) > _LATE_S else until(CpuSeconds(_LATE_S))
        first, _ = latest(islice(first_plans(space), 1), until_late)
    return first, whole or not in_time


def _is_within(candidate: Candidate, budgets: Mapping[str, int]) -> bool:
    return max(over_bytes(candidate.plan, candidate.evaluation.estimate, budgets)) <= 0


def _optimum_or_first(
    space: SearchSpace,
    deadline: float,
    report: Report,
    first: Best[Configuration] | None,
    budgets: Mapping[str, int],
) -> Optimum[Configuration]:
    """Return the optimum; if the search was stopped before it had a better plan, the first or a uniform one.

    Communicators of a large cluster take seconds to count: only a first plan that is better than the optimum needs it.
    """
    optimum = _optimum(space, deadline, report)
    if first is None and optimum.best is None and optimum.stopped:
        promising = [target for _, target in optimum.bounds]
        first = space.plain(promising or space.targets)
    if first is not None and optimum.best is not None:
        better = first.score < optimum.best.score
        first = first if better and _is_within(candidate_of(space.instance, first), budgets) else None
    if first is not None:
        return optimum._replace(best=first, near=(first,), bound=min(optimum.bound, first.score))
    if optimum.best is None and optimum.stopped:
        raise _too_early(space.file)
    return optimum


def _too_early(file: Path) -> StoppedEarly:
    return StoppedEarly(file, "no plan was found before the search was stopped", "give it more time")


def _optimum(space: SearchSpace, deadline: float, report: Report) -> Optimum[Configuration]:
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
        gap=MOST_PROVEN,
    )
