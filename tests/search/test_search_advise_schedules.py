"""`advise --schedules`: the best plan of each schedule, or why there is none."""

from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shardwright.command.command_line import _exit_code
from shardwright.types import Schedule
from shardwright_search.advise.question import question_of
from shardwright_search.advise.sizes import by_schedule
from shardwright_search.cli import APP
from shardwright_search.commands.advise import side_search
from shardwright_search.options import AdviseOptions
from shardwright_search.search import find_best

OPTIONS = AdviseOptions(model="llama-3-8b", gpus="2x8:A100-40", batch=32, seq=2048)


def _by_schedule(options, **changes):
    question = question_of(options)
    question = question._replace(request=replace(question.request, **changes))
    return question, {each.schedule: each for each in by_schedule(question, side_search(options))}


def test_each_schedule_has_the_plan_of_a_search_of_it_alone():
    question, found = _by_schedule(OPTIONS, pp_sizes=(2, 4), fine_grained=False)
    assert [*found] == [*Schedule]
    given = question.model, question.cluster, question.profiles, Path("--batch")
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B):
        alone = find_best(replace(question.request, schedules=(schedule,)), *given, lambda _: None)
        assert found[schedule].best.plan == alone.chosen.plan
        assert found[schedule].best.plan.schedule is schedule
    split = found[Schedule.ZERO_BUBBLE].best
    assert split.plan.schedule is Schedule.ZERO_BUBBLE and len(split.plan.stages) in (2, 4)
    assert question.fits(split.plan, split.evaluation.estimate)


def test_a_schedule_without_a_plan_says_why():
    _, found = _by_schedule(OPTIONS, pp_sizes=(1,))
    assert found[Schedule.ONE_F_ONE_B].best is not None
    assert found[Schedule.ZERO_BUBBLE][:3] == (Schedule.ZERO_BUBBLE, None, "no pipeline is near the best plan")
    assert found[Schedule.INTERLEAVED_1F1B].best is None and found[Schedule.INTERLEAVED_1F1B].why
    _, found = _by_schedule(replace(OPTIONS, gpus="1x1:A100-40"))
    assert {each.why for each in found.values() if each.best is None} >= {"no plan fits"}


def test_the_answer_shows_them_against_its_plan_where_they_are_asked(capsys):
    asked = ["advise", "llama-3-8b", "--gpus", "2x8:A100-40", "--batch", "32", "--seq", "2048", "--time-limit", "600"]
    called = partial(_exit_code, APP)
    assert called([*asked, "--schedules"]) == 0
    told = capsys.readouterr().out
    rows = [line for line in told.splitlines() if line.startswith(tuple(f"│ {each} " for each in Schedule))]
    assert len(rows) == len(Schedule) and any(" 1.00 " in row for row in rows)
    told = " ".join(told.split())
    assert "beside the answer no plan under zero_bubble is" in told
    unbounded = "interleaved_zero_bubble, zero_bubble_v, v_half, v_min"
    assert f"how much faster others under {unbounded} may be is not known" in told
    assert called(asked) == 0 and "the best plan of each schedule" not in capsys.readouterr().out
