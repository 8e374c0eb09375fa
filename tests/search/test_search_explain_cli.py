"""`explain` end to end: with a search file, with a second plan, and with files that do not belong together."""

import pytest
from msgspec.structs import replace
from test_search_cli import call, options, plan

from shardwright.io import read_document, write_document
from shardwright.types import Plan
from shardwright_search.explain import what_if
from shardwright_search.search import SearchAnswer
from shardwright_search.space.request import SearchRequest


@pytest.fixture
def inputs(make, files):
    model, cluster = make.model(4), make.cluster()
    return files(model, cluster, make.request(memory_gib=2.2 / 1024), make.profile(model))


@pytest.fixture
def searched(inputs, tmp_path):
    """A plan, and one of a search with more memory."""
    assert plan(inputs, tmp_path / "a.json").exit_code == 0
    return tmp_path / "a.json"


def explain(inputs, *arguments):
    return call("explain", *arguments, *options(inputs, "hardware", "profile"))


def test_with_the_search_file_it_tells_of_neighbouring_kinds_and_of_more_means(inputs, searched):
    result = explain(inputs, searched, "--search", inputs["search"])
    assert result.exit_code == 0, result.output
    for words in (
        "memory binds: layer ",
        "levers on the memory of stage ",
        "│ without recompute full ",
        "the best plan of each neighbouring kind",
        "│ no recomputation ",
        "│ ZeRO only ",
        "│ pp_size 1 ",
        "│ 4 microbatch(es) ",
        "what more would bring",
        "│ 10% more memory ",
        "│ links 2 times as fast ",
        "one more n node: no plan: ",
    ):
        assert words in result.stdout, words
    first, *progress = result.stderr.splitlines()
    assert first == "search 1 of 1: the runners-up"
    assert progress[0] == f"search 1 of {len(progress)}: no recomputation"
    assert progress[-1] == f"search {len(progress)} of {len(progress)}: one more n node"
    alone = explain(inputs, searched)
    assert "memory binds" in alone.stdout and "neighbouring kind" not in alone.stdout and not alone.stderr


@pytest.mark.parametrize("limit, searches", [((), 2), (("--time-limit", 600), 2), (("--time-limit", 0), None)])
def test_ctrl_c_ends_all_searches_and_a_time_limit_each(inputs, searched, monkeypatch, limit, searches):
    whole = what_if.find_best

    def stopped(request, *given):
        answer = whole(request, *given[:-1])
        return (
            replace(answer, stopped=True) if isinstance(answer, SearchAnswer) and not request.fine_grained else answer
        )

    monkeypatch.setattr(what_if, "find_best", stopped)
    result = explain(inputs, searched, "--search", inputs["search"], *limit)
    assert result.exit_code == 0 and "(the best so far)" in result.stdout
    _, *progress = result.stderr.splitlines()
    assert len(progress) == (searches or int(progress[0].split()[3][:-1]))


def test_with_a_second_plan_it_tells_how_they_differ(inputs, searched, make, tmp_path):
    write_document(inputs["search"], make.request(memory_gib=4 / 1024))
    other = tmp_path / "b.json"
    assert plan(inputs, other).exit_code == 0
    result = explain(inputs, searched, other)
    assert result.exit_code == 0, result.output
    here, there = read_document(searched, Plan), read_document(other, Plan)
    assert f"num_microbatches: {here.num_microbatches} → {there.num_microbatches}" in result.stdout
    assert "ms a step, of this plan, and what the other adds" in result.stdout
    same = explain(inputs, searched, searched)
    assert "differs in\n  nothing that is done" in same.stdout and "the other takes +0.0% time" in same.stdout


def test_a_second_plan_for_another_model_exits_with_2(inputs, searched, tmp_path):
    given = read_document(searched, Plan)
    other = replace(given, model=replace(given.model, name="another"))
    write_document(tmp_path / "b.json", other)
    result = explain(inputs, searched, tmp_path / "b.json")
    assert result.exit_code == 2 and result.stderr == (
        f"error: {tmp_path / 'b.json'}: is not for the model of a.json: compare plans for one model\n"
    )


def test_a_search_file_that_was_changed_exits_with_2(inputs, searched, make):
    write_document(inputs["search"], make.request(memory_gib=4 / 1024))
    result = explain(inputs, searched, "--search", inputs["search"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {inputs['search']}: is not the search file that made a.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "other"}, "requests another name than a.json has"),
        ({"gradient_reduction": "every_microbatch"}, "requests another gradient_reduction"),
        ({"precision": {"compute": "bfloat16"}}, "requests another precision"),
        ({"global_batch_size": 16}, "global_batch_size differs from a.json"),
    ],
)
def test_a_search_file_of_another_plan_is_told_by_what_it_asks(inputs, searched, make, change, words):
    """Where no prediction says which search file it was."""
    searched.with_suffix(".prediction.json").unlink()
    write_document(inputs["search"], make.request(**change))
    result = explain(inputs, searched, "--search", inputs["search"])
    assert result.exit_code == 2 and words in result.stderr and len(result.stderr.splitlines()) == 1


def test_without_a_prediction_the_budget_is_that_of_the_search_file(inputs, searched):
    searched.with_suffix(".prediction.json").unlink()
    result = explain(inputs, searched, "--search", inputs["search"], "--time-limit", 60)
    assert result.exit_code == 0, result.output
    gib = read_document(inputs["search"], SearchRequest).memory_gib
    row = next(line for line in result.stdout.splitlines() if line.startswith("│ budget"))
    assert f"{gib * 1024:.2f}" in row


def test_an_infeasible_plan_command_tells_every_remedy_in_its_one_line(inputs, make, tmp_path):
    write_document(inputs["search"], make.request(memory_gib=1.9 / 1024))
    result = plan(inputs, tmp_path / "x.json")
    *_, line = result.stderr.splitlines()
    assert result.exit_code == 3 and not (tmp_path / "x.json").exists()
    assert line.startswith(f"error: {inputs['search']}: no plan fits") and "raise memory_gib to at least" in line
    size = int(line.rsplit("lower global_batch_size to ", 1)[1].split(",")[0])
    write_document(inputs["search"], make.request(memory_gib=1.9 / 1024, global_batch_size=size))
    assert plan(inputs, tmp_path / "x.json").exit_code == 0
