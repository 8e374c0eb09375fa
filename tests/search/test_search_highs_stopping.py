"""HiGHS is stopped by a limit and by Ctrl-C, whatever it is doing."""

import gc
import signal
from functools import partial
from pathlib import Path
from threading import Event, Timer
from time import monotonic

import pytest
from interrupts import alarm_after

from shardwright_search.advise.question import question_of
from shardwright_search.options import AdviseOptions
from shardwright_search.solver import milp
from shardwright_search.solver.milp import solve
from shardwright_search.solver.stopping import Stopped, ended
from shardwright_search.space.search_space import space_of

pytest.importorskip("highspy")

FILE = Path("request.json")


def _long_problem():
    question = question_of(AdviseOptions(model="llama-2-7b", gpus="8:H100-SXM", batch=64))
    space = space_of(question.request, question.model, question.cluster, question.profiles, FILE)
    configurations = (target.configuration for target in space.targets)
    return next(map(space.instance.problem, (one for one in configurations if one[1:3] == (16, 4))))


@pytest.fixture
def uncollected():
    """No garbage is collected: hypothesis counts how long that takes, and an interrupt in its count is dropped."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_highs_is_cancelled_by_a_limit_and_by_ctrl_c():
    problem, began = _long_problem(), monotonic()
    assert not ended(partial(solve, problem, 600.0), monotonic() + 0.5)
    assert monotonic() - began < 60
    ctrl_c = Timer(0.5, signal.raise_signal, [signal.SIGINT])
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        solve(problem, 600.0)
    assert monotonic() - began < 120


class Endless:
    """HiGHS at work on what never ends, but that it is cancelled."""

    def __init__(self):
        self.cancelled, self.solving = Event(), 0

    def run(self):
        self.solving += 1
        self.cancelled.wait(60)
        self.solving -= 1

    def cancelSolve(self):
        self.cancelled.set()


def _stop(*_):
    raise Stopped


@pytest.mark.usefixtures("uncollected")
def test_a_limit_behind_any_call_of_what_lets_highs_solve_stops_it_and_leaves_no_thread_at_work(monkeypatch):
    monkeypatch.setattr(milp, "_WAIT_S", 0.001)
    before = signal.signal(signal.SIGALRM, _stop)
    try:
        for events in range(120):
            highs = Endless()
            with pytest.raises(Stopped), alarm_after(events):
                milp._run(highs)
            assert highs.solving == 0, events
    finally:
        signal.signal(signal.SIGALRM, before)
