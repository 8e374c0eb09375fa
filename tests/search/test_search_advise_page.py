"""`advise --html`: which sizes are searched, what is said of those that are not, and that the page stands alone."""

import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest
from hostile_names import NAME, PLAIN, Page, renamed
from msgspec.structs import replace

from shardwright.command.command_line import _exit_code
from shardwright_search.advise import sizes
from shardwright_search.advise.page import advice_page, counts_of
from shardwright_search.advise.question import question_of
from shardwright_search.advise.report import Advice
from shardwright_search.advise.sizes import Axes, Column, Sized, axes_of, column_of, outcomes_of
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


def _outcomes(asked, search=_search, limit_s=LIMIT_S, axes=None):
    options, question, answer = asked
    axes = axes or axes_of(options, question)
    given = Sized.of_answer(question, answer), search, lambda _line: None, until(CpuSeconds(limit_s))
    return axes, outcomes_of(options, axes, *given)


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
    assert list(axes_of(options, question_of(options)).gpus) == expected


def test_lengths_are_those_that_the_model_takes_and_images_have_one(asked):
    options, question, _ = asked
    axes = axes_of(options, question)
    assert (axes.batches, axes.lengths, axes.shares[-1]) == ((128, 256, 512), (128, 256, 512), 1.0)
    longest = replace(options, seq=512)
    assert axes_of(longest, question_of(longest)).lengths == (256, 512)
    images = AdviseOptions(model="vit-huge", gpus="8:H100", batch=8)
    assert axes_of(images, question_of(images)).lengths == (question_of(images).model.sequence_length,)


def test_each_outcome_is_what_a_search_of_that_size_gives(asked):
    """With fewer of them, and without communicators: a plan is the best of all budgets that it fits."""
    options, _, _ = asked
    count, column = [], Column("1:RTX-4090", 512, 512)
    axes = Axes(("1:RTX-4090",), (256, 512), (256, 512), (0.05, 0.1, 0.5, 0.6, 0.9, 1.0))
    _, outcomes = _outcomes(asked, partial(_search, count=count), axes=axes)
    kinds = set()
    for share in axes.shares:
        narrow = replace(options, batch=512, seq=512, budget_gib=6 * share)
        direct, outcome = _search(question_of(narrow), LIMIT_S), outcomes[column, share]
        kinds.add(type(outcome))
        if isinstance(direct, Infeasible):
            least_gib = direct.min_bytes / 2**30
            assert outcome == f"No plan fits in {6 * share:.1f} GiB a GPU: even the leanest needs {least_gib:.1f} GiB."
        else:
            assert outcome.estimate.simulated_step_time_s == direct.chosen.evaluation.estimate.simulated_step_time_s
            assert outcome.question.fits(outcome.plan, outcome.estimate)
    assert kinds == {str, Sized}
    assert len(outcomes) == 24 > len(count) + 4


def test_what_was_not_computed_in_time_is_counted_and_said(asked):
    options, question, answer = asked
    axes, outcomes = _outcomes(asked, limit_s=1e-6)
    cells = len(axes.gpus) * 3 * 3 * 6
    plans = sum(isinstance(each, Sized) for each in outcomes.values())
    assert plans >= 1 and set(map(type, outcomes.values())) == {Sized, type(None)}
    words = counts_of(axes, outcomes)
    assert f"Of {cells} combinations of the sliders {plans} have a plan" in words
    assert f"and {cells - plans} were not computed in time" in words
    page = advice_page(Advice(question, answer, (), ()), column_of(question, options.gpus), axes, outcomes)
    assert words in page and sum("This was not computed" in text for text in _grid(page)["texts"]) == 1


def test_names_are_texts_in_the_page_and_in_its_data(asked):
    """A model is named after its folder, and the answer printed beside it says what the user wrote."""
    options, question, answer = asked
    axes, outcomes = _outcomes(asked, limit_s=1e-6)
    column = column_of(question, options.gpus)

    def page(name):
        names = {question.model.name, question.cluster.name, *question.model.layers}
        model, cluster = (renamed(each, names, name) for each in (question.model, question.cluster))
        named = question._replace(model=model, cluster=cluster, assumed=(name,))
        chosen = answer.chosen._replace(plan=renamed(answer.chosen.plan, names, name))
        told = replace(answer, chosen=chosen)
        sized = {at: Sized.of_answer(named, told) if isinstance(each, Sized) else each for at, each in outcomes.items()}
        return advice_page(Advice(named, told, (), ()), column, axes, sized)

    before, after = page(PLAIN), page(NAME)
    assert Page(after).elements == Page(before).elements and NAME in Page(after).texts
    parts, plain_parts = _grid(after)["texts"], _grid(before)["texts"]
    assert [Page(part).elements for part in parts] == [Page(part).elements for part in plain_parts]


def test_ctrl_c_ends_the_other_sizes_and_keeps_what_is_known(asked):
    count = []

    def interrupted(question, limit_s):
        answer = _search(question, limit_s, count)
        return replace(answer, stopped=True) if len(count) == 3 else answer

    _, outcomes = _outcomes(asked, interrupted)
    assert len(count) == 3 and outcomes and None not in outcomes.values()


def test_a_size_without_a_search_has_the_reason(asked, monkeypatch):
    def fp8_question_of(options):
        return question_of(replace(options, precision="fp8"))

    monkeypatch.setattr(sizes, "question_of", fp8_question_of)
    axes = Axes(("1:RTX-4090", "1x2:A100-80"), (256,), (256,), (0.5, 1.0))
    _, outcomes = _outcomes(asked, axes=axes)
    reason = "There is no such plan: the table has no rate for fp8 products of A100-80."
    assert [outcomes[Column("1x2:A100-80", 256, 256), share] for share in axes.shares] == [reason] * 2


def _grid(page):
    return json.loads(page.partition('<script type="application/json" id="grid">')[2].partition("</script>")[0])


def test_the_command_writes_a_page_that_stands_alone(config, tmp_path, capsys):
    arguments = ["advise", str(config), "--gpus", "1:RTX-4090", "--batch", "16", "--seq", "256", "--uniform"]
    code = _exit_code(APP, [*arguments, "--html", str(tmp_path / "page.html"), "--time-limit", "600"])
    printed = capsys.readouterr()
    page = (tmp_path / "page.html").read_text()
    assert code == 0 and "other sizes: 0 of 9 done, at most 120 s of CPU time left" in printed.err
    assert not re.search(r"""\ssrc\s*=|href\s*=(?!"#)|@import|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)""", page)
    grid = _grid(page)
    assert len(grid["cells"]) == 1 * 3 * 3 * 6
    assert {number for numbers in grid["cells"].values() for number in numbers} == set(range(len(grid["texts"])))
    assert grid["texts"][grid["cells"]["0,1,1,5"][1]] in page
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

    for text in (page, *grid["texts"]):
        Balance().feed(text)
        assert opened == []


def test_a_page_that_cannot_be_written_is_one_line_before_anything_is_searched(config, tmp_path, capsys):
    code = _exit_code(APP, ["advise", str(config), "--gpus", "4:H100", "--html", str(tmp_path)])
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1
