"""`shardwright grid`: the plans of single searches, each answer kept, none that stops another."""

import re
import shutil
from functools import partial
from typing import Any

import pytest
from command_calls import call as call_app
from msgspec.structs import replace

from shardwright.io import read_document, write_document
from shardwright.types import Plan, Prediction
from shardwright_search import search
from shardwright_search.cli import APP
from shardwright_search.commands import grid as command
from shardwright_search.space.request import Grid, GridAnswers

call = partial(call_app, APP)


@pytest.fixture
def given(make, files, tmp_path):
    """Paths by role; of a grid of three cells: one with a plan, one that fits nothing, one that names no plan."""
    model, cluster = make.model(4), make.cluster()
    fits = make.request(name="fits", memory_gib=4 / 1024)
    cells = (fits, make.request(name="tiny", memory_gib=1 / 1024), make.request(name="none", tp_sizes=(3,)))
    paths = files(model, cluster, fits, make.profile(model))
    write_document(tmp_path / "grid.json", Grid(searches=cells))
    return paths | {"grid": tmp_path / "grid.json", "folder": tmp_path / "cells", "out": tmp_path / "answers.json"}


def searched(given, *more):
    roles = ("cluster", "model", "hardware", "profile", "folder", "out")
    return call("grid", given["grid"], *[part for role in roles for part in (f"--{role}", given[role])], *more)


def test_every_cell_is_answered_as_by_a_search_of_its_own(given, tmp_path):
    result = searched(given)
    assert (result.exit_code, result.output.count("3 cells: 1 plans, 2 without one; 0 were known")) == (0, 1)
    fits, tiny, none = read_document(given["out"], GridAnswers).cells
    assert (fits.name, tiny.name, none.name) == ("fits", "tiny", "none")
    roles = ("cluster", "model", "hardware", "profile", "search")
    alone = call("plan", *[x for role in roles for x in (f"--{role}", given[role])], "--out", tmp_path / "alone.json")
    assert alone.exit_code == 0
    assert (given["folder"] / f"{fits.key}.json").read_bytes() == (tmp_path / "alone.json").read_bytes()
    ours = read_document(given["folder"] / f"{fits.key}.prediction.json", Prediction)
    theirs = read_document(tmp_path / "alone.prediction.json", Prediction)
    assert (ours.estimate, ours.proof) == (theirs.estimate, theirs.proof)
    assert fits.reason is None and tiny.reason is not None and none.reason is not None
    assert tiny.reason.startswith("no plan fits") and "raise memory_gib" in tiny.reason
    assert none.reason.startswith("tp_sizes: 3 does not divide")


def test_cells_that_share_prices_are_answered_as_alone(given, make):
    sizes = [(batch, gib / 1024) for batch in (8, 16) for gib in (3, 4, 8)]
    cells = tuple(
        make.request(name=f"b{batch}-m{gib}-{len(dp)}", global_batch_size=batch, memory_gib=gib, data_parallel=dp)
        for batch, gib in sizes
        for dp in (("ddp", "zero3"), ("ddp",))
    )
    answers = list[Any]()
    for grid in (cells, *((cell,) for cell in cells)):
        shutil.rmtree(given["folder"], ignore_errors=True)
        write_document(given["grid"], Grid(searches=grid))
        assert searched(given).exit_code == 0
        for cell in read_document(given["out"], GridAnswers).cells:
            kept = given["folder"] / f"{cell.key}.prediction.json"
            prediction = read_document(kept, Prediction) if cell.reason is None else None
            answers.append(cell.reason if prediction is None else (prediction.estimate, prediction.proof.gap))
    together, alone = answers[: len(cells)], answers[len(cells) :]
    assert together == alone
    plans = [answer[0].simulated_step_time_s for answer in together if isinstance(answer, tuple)]
    assert len(set(plans)) >= 3, "cells with plans of their own"


def test_it_is_told_how_far_a_grid_is_and_how_long_it_may_still_take(given):
    told = searched(given).stderr.splitlines()
    found = [re.fullmatch(r"(\d) of 3 (\w+) in (\d+\.\d{3}) s, at most (\d+) s left", line) for line in told]
    assert [(row[1], row[2]) for row in found if row] == [("1", "fits"), ("2", "tiny"), ("3", "none")]
    assert found[2][4] == "0"


def test_what_is_known_is_not_searched_again_and_gives_the_same_list(given, make, monkeypatch):
    assert searched(given).exit_code == 0
    before = given["out"].read_bytes()

    def never(*_args, **_shared):
        raise AssertionError

    monkeypatch.setattr(command, "find_best", never)
    assert "3 were known" in searched(given).output
    assert given["out"].read_bytes() == before
    # A cell that is new is searched alone; one of other inputs is another one.
    asked = []

    def noted(request, *rest, **shared):
        asked.append(request.name)
        return search.find_best(request, *rest, **shared)

    monkeypatch.setattr(command, "find_best", noted)
    cells = read_document(given["grid"], Grid).searches
    write_document(given["grid"], Grid(searches=(*cells, make.request(name="new", memory_gib=5 / 1024))))
    assert searched(given).exit_code == 0 and asked == ["new"]
    write_document(given["cluster"], make.cluster(memory_bytes=2**40))
    assert searched(given).exit_code == 0 and asked == ["new", "fits", "tiny", "none", "new"]


def test_half_an_answer_is_none(given):
    assert searched(given).exit_code == 0
    (fits, *_) = read_document(given["out"], GridAnswers).cells
    prediction = given["folder"] / f"{fits.key}.prediction.json"
    prediction.unlink()
    assert "2 were known" in searched(given).output
    plan = read_document(prediction.with_name(f"{fits.key}.json"), Plan)
    assert plan.sha256 == read_document(prediction, Prediction).plan_sha256


def test_a_grid_that_is_interrupted_keeps_no_half_searched_plan(given, monkeypatch):
    def stopped(*args, **shared):
        found = search.find_best(*args, **shared)
        return found if isinstance(found, command.Infeasible) else replace(found, stopped=True)

    monkeypatch.setattr(command, "find_best", stopped)
    assert searched(given).exit_code == 130
    assert not given["out"].exists() and not list(given["folder"].glob("*.json"))


def test_a_cell_whose_time_was_up_before_a_plan_is_searched_again(given, monkeypatch):
    def too_late(*_args, **_shared):
        raise search.StoppedEarly("grid", "no plan was found before the search was stopped", "give it more time")

    monkeypatch.setattr(command, "find_best", too_late)
    assert searched(given, "--time-limit", "0").exit_code == 0
    (first, *_) = read_document(given["out"], GridAnswers).cells
    assert first.reason == "no plan was found before the search was stopped: give it more time"
    assert not list(given["folder"].glob("*"))
    # Without a time limit, or before it, it was Ctrl-C that stopped it.
    given["out"].unlink()
    for limit in ((), ("--time-limit", "600")):
        assert searched(given, *limit).exit_code == 130
        assert not given["out"].exists() and not list(given["folder"].glob("*"))


def test_a_reason_that_is_no_text_is_no_traceback(given):
    assert searched(given).exit_code == 0
    for path in given["folder"].glob("*.reason.txt"):
        path.write_bytes(b"\xff\xfe")
    assert searched(given).exit_code == 0


def test_two_cells_of_one_name_are_refused(given, make):
    raw = given["grid"].read_text().replace('"tiny"', '"fits"')
    given["grid"].write_text(raw)
    result = searched(given)
    assert result.exit_code == 2 and "two are named 'fits'" in result.stderr and not given["folder"].exists()
