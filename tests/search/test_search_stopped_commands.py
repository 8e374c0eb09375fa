"""Commands that are stopped behind their search: what it knew is written and told, and nothing untrue."""

import re
import signal
from functools import partial
from math import inf
from threading import Thread

import pytest
from command_calls import call as call_app
from msgspec.structs import replace

from shardwright.io import read_document, write_document
from shardwright.types import Plan, Prediction, Schedule
from shardwright_search.cli import APP
from shardwright_search.commands import plan as plan_command
from shardwright_search.search import find_best
from shardwright_search.solver.stopping import CpuSeconds, ended, until
from shardwright_search.space import budget
from shardwright_search.space.request import Grid, SearchRequest

call = partial(call_app, APP)
PROFILED = "cluster", "model", "hardware", "profile", "search"


def spin():
    while True:
        pass


def interrupted(*_):
    """Press Ctrl-C, as somebody does who waits for something without an end."""
    signal.raise_signal(signal.SIGINT)
    spin()


def terminated(*_):
    """End as a scheduler does."""
    signal.raise_signal(signal.SIGTERM)
    spin()


def plan(paths, out, *further):
    return call("plan", *(part for role in PROFILED for part in (f"--{role}", paths[role])), "--out", out, *further)


@pytest.fixture
def inputs(make, files):
    """The files of a search whose batch size the devices do not divide, so that others would be looked at."""

    def write(memory_gib):
        model, cluster = make.model(4), make.cluster()
        request = make.request(memory_gib=memory_gib, global_batch_size=7)
        return files(model, cluster, request, make.profile(model))

    return write


@pytest.mark.parametrize(
    "cause, limit", [(interrupted, ()), (terminated, ()), (lambda *_: spin(), ("--time-limit", "0.5"))]
)
def test_a_certificate_that_is_stopped_leaves_the_plan(inputs, tmp_path, monkeypatch, cause, limit):
    paths = inputs(4 / 1024)
    assert plan(paths, tmp_path / "whole.json").exit_code == 0
    monkeypatch.setattr(plan_command, "certified", cause)
    certificate = tmp_path / "certificate.json"
    told = plan(paths, tmp_path / "p.json", "--certificate", certificate, *limit)
    assert told.exit_code == 4, told.output
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    error = f"error: no certificate: it was stopped before it was made: {tmp_path / 'p.json'} is written without one\n"
    assert told.stderr.endswith(error) and "proof: closed form" in told.stdout and not certificate.exists()
    assert read_document(tmp_path / "p.json", Plan).stages == read_document(tmp_path / "whole.json", Plan).stages
    assert read_document(tmp_path / "p.prediction.json", Prediction).proof is not None


def test_a_bound_that_cannot_be_confirmed_leaves_the_plan(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_command, "certified", lambda *_: None)
    told = plan(inputs(4 / 1024), tmp_path / "p.json", "--certificate", tmp_path / "certificate.json")
    error = "error: no certificate: nothing near the search's bound could be confirmed"
    assert told.exit_code == 4 and told.stderr.endswith(f"{error}: {tmp_path / 'p.json'} is written without one\n")
    assert (tmp_path / "p.json").exists() and not (tmp_path / "certificate.json").exists()


LACKING = "how much memory is missing was not known when the search was stopped: give it more time"


@pytest.mark.parametrize("function", ["min_shortfall", "_of_chunks"])
def test_ctrl_c_while_the_missing_memory_is_sought_ends_the_command_with_what_is_known(
    inputs, tmp_path, monkeypatch, function
):
    paths = inputs(0.4 / 1024)
    lack = int(re.findall(r"exceeds the budget by (\d+) bytes a rank", plan(paths, tmp_path / "p.json").stderr)[0])
    if function == "_of_chunks":
        search = read_document(paths["search"], SearchRequest)
        write_document(paths["search"], replace(search, schedules=(Schedule.INTERLEAVED_1F1B,), global_batch_size=8))
    monkeypatch.setattr(budget, function, interrupted)
    monkeypatch.setattr(budget, "states_beyond_budget", lambda _: 0)
    told = plan(paths, tmp_path / "p.json")
    assert lack > 0 and told.exit_code == 3, told.output
    assert told.stderr.endswith(f"no plan fits: {LACKING}\n") and not (tmp_path / "p.json").exists()


def test_ctrl_c_in_a_cell_of_a_grid_that_has_no_plan_ends_the_grid(inputs, tmp_path, monkeypatch):
    """Nothing is kept of the cell: the next call looks again."""
    paths = inputs(0.4 / 1024)
    search = read_document(paths["search"], SearchRequest)
    write_document(tmp_path / "grid.json", Grid(searches=(search,)))
    monkeypatch.setattr(budget, "min_shortfall", interrupted)
    files = (part for role in PROFILED[:-1] for part in (f"--{role}", paths[role]))
    told = call("grid", tmp_path / "grid.json", *files, "--folder", tmp_path / "kept", "--out", tmp_path / "a.json")
    assert told.exit_code == 130 and [*(tmp_path / "kept").glob("*")] == [], told.output


def test_a_limit_in_another_thread_is_refused_in_words_and_a_search_without_one_is_not(make):
    model, cluster, results = make.model(3), make.cluster(), []
    given = make.request(), model, cluster, make.profiles(model, cluster), "s.json", lambda _: None

    def search(limit_s):
        try:
            results.append(find_best(*given, limit_s).chosen.plan)
        except RuntimeError as error:
            results.append(str(error))

    for limit_s in (60.0, None):
        thread = Thread(target=search, args=(limit_s,))
        thread.start()
        thread.join()
    refused = "a time limit works only in the main thread: search without one in other threads"
    assert results == [refused, find_best(*given).chosen.plan]


TIMERS = signal.ITIMER_REAL, signal.ITIMER_PROF
BOTH = ((CpuSeconds(0.05), 600.0), (0.05, CpuSeconds(600)))
ONE = ((0.05, 600.0), (CpuSeconds(0.05), CpuSeconds(600)))


@pytest.mark.parametrize("outer, inner", [*BOTH, (0.05, 600.0), (0.05, inf), (CpuSeconds(0.05), inf)])
def test_a_limit_that_stopped_an_inner_block_stops_the_outer_one_at_once(outer, inner):
    """Its own clock does not matter, nor whether the inner one has a limit."""
    ends = []

    def both():
        ends.append(ended(spin, inner if inner == inf else until(inner)))
        ends.append(min(filter(None, (signal.getitimer(timer)[0] for timer in TIMERS))))
        spin()

    assert not ended(both, until(outer))
    assert ends[0] is False and ends[1:] in ([], [pytest.approx(0, abs=0.5)])


@pytest.mark.parametrize("outer, inner", [*BOTH, *ONE, (0.05, inf), (CpuSeconds(0.05), inf)])
def test_work_whose_inner_block_ran_into_the_outer_limit_is_not_whole(outer, inner):
    """However soon it ends after that."""
    for _ in range(5):
        assert not ended(lambda: ended(spin, inner if inner == inf else until(inner)), until(outer))
