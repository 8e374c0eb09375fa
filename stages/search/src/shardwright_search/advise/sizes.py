"""Answers for smaller memory budgets, for more or fewer GPUs, as many as time allows, and for each schedule."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.devices.table import read_devices
from shardwright.display.units import gib_text
from shardwright.io import BadInput
from shardwright.types import GIB, Estimate, Plan, Schedule
from shardwright_search.advise.question import Question, group_of, machines_of, question_of
from shardwright_search.candidates import Candidate
from shardwright_search.options import AdviseOptions
from shardwright_search.search import SearchAnswer, StoppedEarly
from shardwright_search.solver.stopping import CpuSeconds, left, until
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.configurations import is_solved

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes of clusters relative to the requested one."""
SHARES = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
"""Budgets relative to the requested one, which is the last."""

Searched = Callable[[Question, float], SearchAnswer | Infeasible]
"""A search: the question, and the CPU seconds until the best plan so far is taken."""


class Sized(NamedTuple):
    """The best plan for one cluster and memory budget, and what is proven about it."""

    question: Question
    plan: Plan
    estimate: Estimate
    gap: float | None
    """The largest share by which another plan may be faster; None: it is not known."""
    stopped: bool

    @classmethod
    def of_answer(cls, question: Question, answer: SearchAnswer) -> "Sized":
        """Return the plan of an answer, without the state of its search."""
        plan, evaluation = answer.chosen
        gap = answer.optimum_s / answer.bound_s - 1 if answer.bound_s else None
        return cls(question, plan, evaluation.estimate, gap, answer.stopped)


Outcome = Sized | str | None
"""An answer, the reason why there is no plan, or None: time was over before it was known."""


def outcomes_by_budget(asked: Sized, search: Searched, deadline: float) -> list[Outcome]:
    """Return the outcomes for `SHARES` of the budget; None for those not known at the deadline or at Ctrl-C."""
    known = dict[float, Outcome]()
    with suppress(KeyboardInterrupt):
        for share, outcome in _budgets(asked.question, asked, search, deadline):
            known[share] = outcome
    return [known.get(share) for share in SHARES]


def outcomes_by_cluster(
    options: AdviseOptions, asked: Sized, search: Searched, each_s: float
) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome for other numbers of GPUs and the same batch, by their --gpus; each has some CPU seconds."""
    for gpus in clusters_near(options):
        if gpus == options.gpus:
            yield gpus, asked
            continue
        try:
            question = question_of(replace(options, gpus=gpus, batch=asked.plan.global_batch_size))
        except BadInput as error:
            yield gpus, f"There is no such plan: {error.args[1]}."
            continue
        with suppress(KeyboardInterrupt):
            result = _searched(question, search, until(CpuSeconds(each_s)))
            yield gpus, _outcome(question, result)


def clusters_near(options: AdviseOptions) -> tuple[str, ...]:
    """Return the requested GPUs, and multiples and parts of them for which there are figures, ascending."""
    return tuple(dict.fromkeys(gpus for factor in _FACTORS for gpus in _resized(options, factor)))


def _resized(options: AdviseOptions, factor: float) -> Iterator[str]:
    """Yield the nodes times a factor, or fewer GPUs of a single node, if there are figures for them."""
    groups, table = options.gpus.split("+"), read_devices()
    scaled = [text for each in groups if (text := _scaled(group_of(each, table), factor, may_split=len(groups) == 1))]
    if len(scaled) == len(groups):
        gpus = options.gpus if factor == 1 else "+".join(scaled)
        with suppress(BadInput):  # no network is known of several nodes, or there are too many
            machines_of(replace(options, gpus=gpus), table)
            yield gpus


def _scaled(group: tuple[str, int, int], factor: float, *, may_split: bool) -> str | None:
    """Return a node group with a multiple of its nodes, or a part of one node's GPUs; None if that is impossible."""
    device, nodes, per_node = group
    if (nodes * factor).is_integer():
        return f"{int(nodes * factor)}x{per_node}:{device}"
    split = nodes * per_node * factor
    return f"1x{int(split)}:{device}" if may_split and split.is_integer() and split >= 1 else None


def _budgets(question: Question, best: Sized, search: Searched, deadline: float) -> Iterator[tuple[float, Outcome]]:
    """Yield the outcome for each budget, descending; a plan that fits a smaller budget is the best there, too."""
    known: Sized | None = best
    lacking: Infeasible | None = None
    for share in sorted(SHARES, reverse=True):
        narrow = _narrowed(question, share)
        if known is not None and narrow.fits(known.plan, known.estimate):
            yield share, known._replace(question=narrow)
        elif lacking is not None:
            yield share, _reason(narrow, lacking)
        else:
            result = _searched(narrow, search, deadline)
            outcome = _outcome(narrow, result)
            lacking = result if isinstance(result, Infeasible) else None
            known = outcome if isinstance(outcome, Sized) else None if lacking is not None else known
            yield share, outcome


def _outcome(question: Question, result: SearchAnswer | Infeasible | str | None) -> Outcome:
    if isinstance(result, SearchAnswer):
        return Sized.of_answer(question, result)
    return _reason(question, result) if isinstance(result, Infeasible) else result


def _searched(question: Question, search: Searched, deadline: float) -> SearchAnswer | Infeasible | str | None:
    """Return the answer, why no plan fits (Infeasible), why there is none (a sentence), or None if the time is over.

    Raises KeyboardInterrupt if Ctrl-C ended the search.
    """
    answer, left_s = None, left(deadline) or 0.0
    if left_s <= 0:
        return None
    try:
        answer = search(question, CpuSeconds(left_s))
    except StoppedEarly:
        pass
    except BadInput as error:
        return f"There is no such plan: {error.args[1]}."
    if (answer is None or answer.stopped) and (left(deadline) or 0.0) > 0:
        raise KeyboardInterrupt
    return answer


def _narrowed(question: Question, share: float) -> Question:
    """Return a question with a share of its budgets."""
    memory_gib = question.request.memory_gib
    assert isinstance(memory_gib, dict)
    request = replace(question.request, memory_gib={name: gib * share for name, gib in memory_gib.items()})
    budgets = {name: int(gib * share * GIB) for name, gib in memory_gib.items()}
    return question._replace(request=request, budgets=budgets)


def _reason(question: Question, lacking: Infeasible) -> str:
    more = "" if lacking.exact else "more than "
    return f"No plan fits in {question.budget_words}: even the leanest needs {more}{gib_text(lacking.min_bytes, 1)}."


# The best plan of each schedule, searched separately.


LIMIT_S = 5.0
"""CPU seconds in which the plan of each schedule is searched."""
SPLIT_LIMIT_S = 10.0
"""CPU seconds for a schedule that splits backward passes: the plans of 1F1B are searched, and then a bound."""


class OfSchedule(NamedTuple):
    """The best plan of a schedule that was found, or why there is none."""

    schedule: Schedule
    best: Candidate | None
    why: str = ""
    bound_sample_s: float | None = None
    """If the schedule splits backward passes: simulated seconds of a sample that no plan is below; 0: not known."""


def by_schedule(
    question: Question,
    search: Searched,
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[OfSchedule]:
    """Yield the best plan of each schedule; if it splits backward passes, the quickest one near the best 1F1B plan.

    `search` searches a changed question within some CPU seconds; `tell` receives a line of progress for each.
    """
    for schedule in Schedule:
        asked = (schedule,) if is_solved(schedule) else (Schedule.ONE_F_ONE_B, schedule)
        tell(f"schedule {schedule}")
        changed = question._replace(request=replace(question.request, schedules=asked))
        try:
            result = search(changed, LIMIT_S if is_solved(schedule) else SPLIT_LIMIT_S)
        except BadInput as error:
            yield OfSchedule(schedule, None, str(error.args[1]))
            continue
        if isinstance(result, Infeasible):
            yield OfSchedule(schedule, None, "no plan fits")
            continue
        if is_solved(schedule):
            yield OfSchedule(schedule, result.chosen)
            continue
        bound_s, why = result.split_bound_s / result.chosen.plan.global_batch_size, "no pipeline is near the best plan"
        if result.split:
            lacking = f"the leanest exceeds the budget by {gib_text(result.split_over_bytes)}"
            why = f"none of {result.split} plans near the best fits: {lacking}"
        yield OfSchedule(schedule, result.split_plan, why, bound_s)
