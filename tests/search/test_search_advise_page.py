"""`advise --html`: which budgets are searched beside, what is said of those that are not; the page stands alone."""

import re
from functools import partial
from html.parser import HTMLParser

import pytest
from hostile_names import NAME, PLAIN, Page, renamed
from msgspec.structs import replace

from shardwright.command.command_line import _exit_code
from shardwright.display.units import gib_text
from shardwright_search.advise import sizes
from shardwright_search.advise.page import advice_page
from shardwright_search.advise.question import question_of
from shardwright_search.advise.report import Advice
from shardwright_search.advise.sizes import SHARES, Sized, clusters_near, outcomes_by_budget, outcomes_by_cluster
from shardwright_search.cli import APP
from shardwright_search.commands.advise import _given
from shardwright_search.options import AdviseOptions
from shardwright_search.search import find_best
from shardwright_search.solver.stopping import CpuSeconds, until
from shardwright_search.space.budget import Infeasible

LIMIT_S = 600.0


@pytest.fixture
def asked(config):
    """Options, question and answer for a tiny model whose larger batches need most of the budget."""
    options = AdviseOptions(model=str(config), gpus="1:RTX-4090", batch=256, seq=256, uniform=True, budget_gib=6)
    question = question_of(options)
    return options, question, _search(question, LIMIT_S)


def _search(question, limit_s, count=None):
    if count is not None:
        count.append(question)
    return find_best(*_given(question), lambda _line: None, CpuSeconds(limit_s))


def _outcomes(asked, search=_search, limit_s=LIMIT_S):
    _, question, answer = asked
    return outcomes_by_budget(Sized.of_answer(question, answer), search, until(CpuSeconds(limit_s)))


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("8x8:H100", ["2x8:H100-SXM", "4x8:H100-SXM", "8x8:H100", "16x8:H100-SXM", "32x8:H100-SXM"]),
        ("8:H100-SXM", ["1x2:H100-SXM", "1x4:H100-SXM", "8:H100-SXM", "2x8:H100-SXM", "4x8:H100-SXM"]),
        ("1:A100-80", ["1:A100-80", "2x1:A100-80", "4x1:A100-80"]),
        ("4:RTX-4090", ["1x1:RTX-4090", "1x2:RTX-4090", "4:RTX-4090"]),
        ("2x8:A100-40+2x8:H100", [
            "1x8:A100-40+1x8:H100-SXM", "2x8:A100-40+2x8:H100", "4x8:A100-40+4x8:H100-SXM", "8x8:A100-40+8x8:H100-SXM",
        ]),
    ],
)  # fmt: skip
def test_other_clusters_are_multiples_and_parts_of_the_one_that_was_asked_where_there_are_figures(
    config, gpus, expected
):
    """Of several nodes of RTX-4090 no network is known; a mixed cluster keeps its mixture."""
    options = AdviseOptions(model=str(config), gpus=gpus, batch=8, seq=256)
    assert list(clusters_near(options)) == expected


def test_each_outcome_is_what_a_search_of_that_budget_gives(asked, monkeypatch):
    """With fewer of them, and without communicators: a plan is the best of all budgets that it fits."""
    options, _, _ = asked
    monkeypatch.setattr(sizes, "SHARES", (0.05, 0.1, 0.5, 0.6, 0.9, 1.0))
    count, kinds = [], set()
    outcomes = _outcomes(asked, partial(_search, count=count))
    for share, outcome in zip(sizes.SHARES, outcomes, strict=True):
        direct = _search(question_of(replace(options, budget_gib=6 * share)), LIMIT_S)
        kinds.add(type(outcome))
        if isinstance(direct, Infeasible):
            given, least = gib_text(6 * share * 2**30, 1), gib_text(direct.min_bytes, 1)
            assert outcome == f"No plan fits in {given} a GPU: even the leanest needs {least}."
        else:
            assert outcome.estimate.simulated_step_time_s == direct.chosen.evaluation.estimate.simulated_step_time_s
            assert outcome.question.fits(outcome.plan, outcome.estimate)
    assert kinds == {str, Sized} and len(count) < len(outcomes)


def test_what_was_not_computed_in_time_is_said(asked):
    options, question, answer = asked
    outcomes = _outcomes(asked, limit_s=0.0)
    late = [f"{share:.0%}" for share, each in zip(SHARES, outcomes, strict=True) if each is None]
    assert isinstance(outcomes[-1], Sized) and late
    page = advice_page(Advice(question, answer, (), ()), options.gpus, outcomes)
    assert f"Not computed in time (--html-limit): {', '.join(late)} of the budget." in page


def test_names_are_texts_in_the_page(asked):
    """A model is named after its folder, and the answer printed beside it says what the user wrote."""
    _, question, answer = asked
    outcomes = _outcomes(asked, limit_s=0.0)

    def page(name):
        names = {question.model.name, question.cluster.name, *question.model.layers}
        model, cluster = (renamed(each, names, name) for each in (question.model, question.cluster))
        named = question._replace(model=model, cluster=cluster, assumed=(name,))
        told = replace(answer, chosen=answer.chosen._replace(plan=renamed(answer.chosen.plan, names, name)))
        sized = [Sized.of_answer(named, told) if isinstance(each, Sized) else each for each in outcomes]
        return advice_page(Advice(named, told, (), ()), name, sized)

    before, after = page(PLAIN), page(NAME)
    assert Page(after).elements == Page(before).elements and NAME in Page(after).texts


def test_ctrl_c_ends_the_other_budgets_and_keeps_what_is_known(asked):
    count = []

    def interrupted(question, limit_s):
        answer = _search(question, limit_s, count)
        return answer if isinstance(answer, Infeasible) else replace(answer, stopped=True)

    outcomes = _outcomes(asked, interrupted)
    assert len(count) == 1 and isinstance(outcomes[-1], Sized) and None in outcomes


def test_other_clusters_have_the_same_batch_and_one_without_a_search_the_reason(asked, monkeypatch):
    options, question, answer = asked

    def fp8_question_of(options):
        return question_of(replace(options, precision="fp8"))

    monkeypatch.setattr(sizes, "question_of", fp8_question_of)
    monkeypatch.setattr(sizes, "clusters_near", lambda _: ("1:RTX-4090", "1:RTX-5090", "1x2:A100-80"))
    outcomes = dict(outcomes_by_cluster(options, Sized.of_answer(question, answer), _search, LIMIT_S))
    assert outcomes["1:RTX-4090"].plan == answer.chosen.plan
    assert outcomes["1:RTX-5090"].plan.global_batch_size == 256
    assert outcomes["1x2:A100-80"] == "There is no such plan: the table has no rate for fp8 products of A100-80."


def test_the_command_writes_a_page_that_stands_alone(config, tmp_path, capsys):
    arguments = ["advise", str(config), "--gpus", "1:RTX-4090", "--batch", "16", "--seq", "256", "--uniform"]
    code = _exit_code(APP, [*arguments, "--html", str(tmp_path / "page.html"), "--time-limit", "600"])
    printed = capsys.readouterr()
    page = (tmp_path / "page.html").read_text()
    assert code == 0 and "smaller budgets: at most 30 s of CPU time" in printed.err
    assert not re.search(r"""\ssrc\s*=|href\s*=(?!"#)|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert "<script" not in page
    first = re.search(r'<p class="first">(.*?)</p>', page)[1]
    assert re.match(
        r"\S+ \(0\.00\d+ billion parameters\) would train on 1 GPU at [\d,]+ tokens \([\d,.]+ samples\) a second: ",
        first,
    )
    assert f"{printed.out.splitlines()[0]}" in page
    opened = []

    class Balance(HTMLParser):
        def handle_starttag(self, tag, attributes):
            opened.extend([tag] if tag != "meta" else [])

        def handle_endtag(self, tag):
            assert opened.pop() == tag

        def handle_startendtag(self, tag, attributes):
            pass

    Balance().feed(page)
    assert opened == []


def test_a_page_that_cannot_be_written_is_one_line_before_anything_is_searched(config, tmp_path, capsys):
    code = _exit_code(APP, ["advise", str(config), "--gpus", "4:H100", "--html", str(tmp_path)])
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
