"""What the report says first: the answer of each search on a card, and both in a sentence for everybody."""

import re

import msgspec
import pytest
from sample_results import write_sample_results

import report
from results import read_run, read_search
from summaries import first_sentences

MIB = 1024 * 1024


@pytest.fixture
def results(tmp_path):
    write_sample_results(tmp_path)
    return tmp_path


def _card(search):
    """The card of a search, by the names of its lines."""
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report.page([search], [])))


def _sure(search):
    return _card(search)["How sure"]


def test_the_page_begins_with_the_answer(results):
    search = read_search(results, "roomy")
    cards = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", report.page([search], [read_run(results, "demo")]))
    said = dict(cards)
    assert list(said) == ["Plan", "Time", "Memory", "Price", "How sure", "Why"]
    assert said["Plan"].startswith("demo on laptop, 8 ranks: pp2, 4 microbatch(es), 1f1b")
    assert said["Time"] == "210 ms a step, measured, 200 ms predicted: 152 samples/s"
    assert said["Memory"] == "60 MiB on the fullest device, measured, 57 MiB predicted: fits 64 MiB, 4 MiB to spare"
    assert "it was run, and took 1.05 × as long as predicted" in said["How sure"]
    page = report.page([search], [])
    order = (
        "<h1>",
        'class="first"',
        "<table>",
        "<h2>Details",
        "<nav",
        "<dt>Plan",
        "<dt>Why",
        'aria-label="the plan roomy"',
    )
    assert sorted(order, key=page.index) == list(order)
    tight = search._replace(prediction=msgspec.structs.replace(search.prediction, memory_budget_bytes=50 * MIB))
    assert "57 MiB predicted: does not fit 50 MiB, by 10 MiB" in report.page([tight], [])


def test_the_first_line_needs_no_knowledge_of_plans(results):
    search, run = read_search(results, "roomy"), read_run(results, "demo")
    assert re.findall(r'<p class="first">(.*?)</p>', report.page([search], [run])) == [
        "roomy: the best known way to train demo on the 8 devices of laptop takes 210 ms (200 ms predicted) for each "
        "step of 32 samples; the fullest device needs 60 MiB (57 MiB predicted) of the 64 MiB that it may use.",
        "The run demo trained demo for 100 steps, and its loss went from 7.60 to 1.70; a step took 210 ms (200 ms "
        "predicted).",
    ]
    alone = search._replace(comparisons=(search.comparisons[0]._replace(measured=None),))
    assert "takes 200 ms (predicted, not yet measured) for each step of 32 samples;" in report.page([alone], [])


def test_the_first_line_says_which_model_a_run_trained(results):
    """The first search may be about another model than the first run."""
    trained, run = read_search(results, "roomy"), read_run(results, "demo")
    other = trained.plan, msgspec.structs.replace(trained.plan.model, name="llama2-70b")
    planned = msgspec.structs.replace(other[0], model=other[1])
    first = trained._replace(plan=planned, comparisons=(trained.comparisons[0]._replace(plan=planned),))
    of_first, of_trained, of_run = first_sentences([first, trained], [run])
    assert "to train llama2-70b on" in of_first and "to train demo on" in of_trained
    assert of_run.startswith("The run demo trained demo for 100 steps")
    assert first_sentences([first], [run])[-1].startswith("The run demo trained a model for 100 steps")
    assert first_sentences([], []) == ["Nothing was searched, and nothing was trained."]


def test_the_card_says_so_where_a_runner_up_that_fits_was_measured_to_be_faster(results):
    search = read_search(results, "roomy")
    chosen, other, _ = search.comparisons
    assert "faster" not in _sure(search)
    ranks = tuple(msgspec.structs.replace(rank, step_s=(0.1,) * 3) for rank in other.measured.ranks)
    quick = msgspec.structs.replace(other.measured, ranks=ranks)
    faster = search._replace(comparisons=(chosen, other._replace(measured=quick)))
    assert (
        "runner-up 1 (pp2, 8 microbatch(es), 1f1b) was measured to be faster: 52.4% less time for a sample"
    ) in _sure(faster)
    tight = faster._replace(prediction=msgspec.structs.replace(search.prediction, memory_budget_bytes=50 * MIB))
    assert "faster" not in _sure(tight)


def test_it_is_told_why_a_plan_takes_as_long_as_it_does(results):
    search = read_search(results, "roomy")
    said = _card(search)["Why"]
    # 4 microbatches of 3 units on each of 2 stages, half a unit at the end, of 18 units.
    assert said == (
        "66.7% of a step are forward and backward passes of stage 0, the slowest, 16.7% filling and draining the "
        "pipeline, 2.8% reducing gradients and the optimizer, 13.9% what every step needs; stage 0 is the fullest, "
        "stage 1 needs 8 MiB less; the best plan of another configuration (pp2, 8 microbatch(es), 1f1b) takes 10.0% "
        "more time for a sample, predicted"
    )


def test_of_several_searches_the_first_is_told_and_drawn_before_the_next(results):
    write_sample_results(results, search="tight", budget_mib=50)
    page = report.page([read_search(results, name) for name in ("tight", "roomy")], [])
    order = ("<b>tight</b>", 'aria-label="the plan tight"', "<b>roomy</b>", 'aria-label="the plan roomy"')
    assert sorted(order, key=page.index) == list(order)
