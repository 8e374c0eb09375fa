"""What each schedule would bring: the best plan of each, searched by itself."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from shardwright.display.units import gib_text
from shardwright.io import BadInput
from shardwright.types import Schedule
from shardwright_search.advise.question import Question
from shardwright_search.candidates import Candidate
from shardwright_search.search import SearchAnswer
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.configurations import is_solved

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
    """The simulated time of a sample that no plan of a schedule that splits backward passes is below; 0: not known."""


def by_schedule(
    question: Question,
    search: Callable[[Question, float], SearchAnswer | Infeasible],
    tell: Callable[[str], None] = lambda line: None,
) -> Iterator[OfSchedule]:
    """Yield the best plan of each schedule; of split backward passes, the quickest by simulation near the best of 1F1B.

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
