"""Time limits and Ctrl-C: they hold wherever a command is, and what is known then is told and true."""

import re
import signal
from contextlib import suppress
from cProfile import Profile
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic, process_time, sleep

import numpy as np
import pytest
from command_calls import call
from hypothesis import given, settings
from hypothesis import strategies as st
from interrupts import alarm_after
from msgspec.structs import replace
from random_problems import random_mixed, random_problem
from test_search_simulation import F1B, GPIPE, INTERLEAVED

from shardwright.types import GIB
from shardwright_search import candidates, search
from shardwright_search.cli import APP
from shardwright_search.commands import advise
from shardwright_search.search import SearchAnswer, StoppedEarly, find_best
from shardwright_search.simulation import simulator
from shardwright_search.simulation.simulator import StageTimes
from shardwright_search.solver.min_memory import least_missing_bytes, min_memory
from shardwright_search.solver.stopping import (
    GRACE_S,
    CpuSeconds,
    Stopped,
    ended,
    latest,
    left,
    soon,
    stopped_at,
    until,
)
from shardwright_search.space.budget import Infeasible
from shardwright_search.space.search_space import space_of

FILE = Path("s.json")
NEVER_S = 1e6
"""A limit after which the tests have long been ended."""


def spin():
    while True:
        pass


def armed_s():
    """When the next timer of either clock goes off."""
    return min(filter(None, (signal.getitimer(timer)[0] for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF))))


def test_work_without_an_end_is_stopped_and_leaves_others_their_timer():
    before = signal.getsignal(signal.SIGALRM)
    outer_s, again_s = signal.setitimer(signal.ITIMER_REAL, 50, 7)  # the tests have one
    assert not ended(spin, monotonic() + 0.05)
    assert ended(lambda: None, monotonic() + 60)
    left_s, left_again_s = signal.setitimer(signal.ITIMER_REAL, outer_s, again_s)
    assert 30 < left_s < 49.95 and left_again_s == 7 and signal.getsignal(signal.SIGALRM) is before


def test_of_nested_limits_the_first_one_counts():
    outer, inner = [], []
    with suppress(Stopped), stopped_at(monotonic() + 0.05):
        inner.append(ended(spin, monotonic() + NEVER_S))
        outer.append("goes on")
        spin()
    assert (inner, outer) == ([False], ["goes on"])
    with suppress(Stopped), stopped_at(monotonic() + NEVER_S):
        inner.append(ended(spin, monotonic() + 0.05))
        outer.append("has time")
    assert (inner, outer[1:]) == ([False, False], ["has time"])


@pytest.mark.parametrize("nested", [False, True])
def test_a_timer_that_fires_where_a_limit_begins_or_ends_hits_nobody_behind_it(nested):
    """At any of the calls and returns in turn."""
    before, heard = signal.signal(signal.SIGALRM, lambda *_: heard.append(1)), list[int]()
    outer = signal.getsignal(signal.SIGALRM)
    passes = partial(ended, lambda: None, monotonic() + 600)
    try:
        for moment in range(60):
            timer_s, _ = signal.getitimer(signal.ITIMER_REAL)
            with alarm_after(moment):
                ended(passes if nested else lambda: None, monotonic() + 600)
            left_s, _ = signal.getitimer(signal.ITIMER_REAL)
            assert signal.getsignal(signal.SIGALRM) is outer and timer_s - 10 < left_s <= timer_s, moment
    finally:
        signal.signal(signal.SIGALRM, before)
    assert 0 < len(heard) < 60


def test_a_limit_of_two_nested_blocks_ends_both_at_once():
    left_s = []
    for _ in range(20):
        with suppress(Stopped), stopped_at(deadline := monotonic() + 0.01):
            assert not ended(spin, deadline)
            left_s.append(signal.getitimer(signal.ITIMER_REAL)[0])
            spin()
    assert max(left_s, default=0.0) < 0.5


def test_a_limit_in_cpu_time_is_not_used_up_by_waiting():
    assert ended(partial(sleep, 0.3), until(CpuSeconds(0.1)))
    began = process_time()
    assert not ended(spin, until(CpuSeconds(0.1)))
    assert process_time() - began > 0.05


@pytest.mark.parametrize("limit_s, alarm", [(CpuSeconds(0.1), signal.SIGPROF), (0.1, signal.SIGALRM)])
def test_a_timer_that_is_ahead_of_its_clock_stops_nothing_before_the_deadline(limit_s, alarm):
    """The timer of CPU time counts ticks: on some machines it was 4 % ahead, which looked as if Ctrl-C had come."""

    def work():
        with stopped_at(until(600.0)):
            signal.raise_signal(alarm)
            spin()

    deadline = until(limit_s)
    assert not ended(work, deadline)
    assert left(deadline) < 0.001


@pytest.mark.parametrize("outer, inner", [(CpuSeconds(0.05), 600.0), (0.05, CpuSeconds(600))])
def test_limits_of_both_clocks_hold_in_one_another(outer, inner):
    ends = []
    with suppress(Stopped), stopped_at(until(outer)):
        ends.append(ended(spin, until(inner)))
        ends.append("goes on")
        spin()
    assert ends == [False, "goes on"]


def test_what_is_left_of_a_limit_is_told_by_its_clock():
    assert left(until(None)) is None
    assert isinstance(left(until(CpuSeconds(5))), CpuSeconds) and 0 < left(until(CpuSeconds(5))) <= 5
    assert not isinstance(left(until(5)), CpuSeconds) and 0 < left(until(5)) <= 5
    assert isinstance(soon(0.0), CpuSeconds) and 0 < left(soon(0.0)) <= GRACE_S
    assert soon(later := until(500)) == later


def test_advice_is_proven_however_long_the_machine_makes_it_wait(monkeypatch):
    """The command gets no CPU for longer than its limit, as on a busy machine."""

    def late(*given):
        sleep(1.5)
        return space_of(*given)

    monkeypatch.setattr(search, "space_of", late)
    told = call(APP, "advise", "gpt2-xl", "--gpus", "1:H100-SXM", "--batch", 4, "--seq", 256, "--time-limit", 1.2)
    assert told.exit_code == 0 and "proven optimal under these estimates" in told.output and not told.stderr


def test_a_long_search_for_advice_tells_of_its_progress_on_standard_error(monkeypatch):
    command = APP, "advise", "gpt2-xl", "--gpus", "1:H100-SXM", "--batch", 4, "--seq", 256
    monkeypatch.setattr(advise, "_SELDOM_S", 0.0)
    told = call(*command)
    assert "bounding" in told.stderr and "bounding" not in told.stdout
    assert re.search(r"3 configurations left: no plan yet, bound [\d.]+ ms a sample", told.stderr)


class Finalized:
    def __del__(self):
        spin()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_was_dropped_in_a_finalizer_comes_again():
    def work():
        Finalized()
        spin()

    assert not ended(work, monotonic() + 0.05)


def test_parts_of_other_work_pass_a_stop_on():
    def interrupted():
        raise KeyboardInterrupt

    assert not ended(interrupted, inf)
    with pytest.raises(KeyboardInterrupt):
        ended(interrupted, None)
    with pytest.raises(Stopped), stopped_at(monotonic() + 0.05):
        ended(spin, None)


def test_the_last_value_before_the_limit_is_taken():
    def values():
        yield from (1, 2)
        spin()

    assert latest(values(), monotonic() + 0.05) == (2, False)
    assert latest(iter((1, 2)), inf) == (2, True)
    assert latest((), inf) == (None, True)


PHASES = (
    (search, "simulated"),
    (search, "further"),
    (search, "changed"),
    (candidates, "_improved"),
)


@pytest.mark.parametrize("module, name", PHASES)
@pytest.mark.parametrize("limit_s", [None, CpuSeconds(0.3)])
def test_whatever_has_no_end_behind_the_search_its_plan_is_the_answer(make, monkeypatch, module, name, limit_s):
    """Without a limit Ctrl-C ends it."""
    model, cluster = make.model(3), make.cluster()
    given = make.request(), model, cluster, make.profiles(model, cluster), FILE, lambda _: None
    whole, left_s = find_best(*given), list[float]()

    def endless(*_):
        if limit_s is None:
            signal.raise_signal(signal.SIGINT)
        left_s.append(armed_s())
        spin()

    monkeypatch.setattr(module, name, endless)
    answer = find_best(*given, limit_s)
    assert isinstance(answer, SearchAnswer) and answer.stopped
    assert (limit_s is None) == (left_s == []) and max(left_s, default=0) <= (limit_s or 0) + GRACE_S
    assert answer.optimum_s == whole.optimum_s and answer.bound_s == whole.bound_s


@pytest.mark.parametrize("limit_s", [None, CpuSeconds(0.3)])
def test_runners_up_without_an_end_are_none(make, monkeypatch, limit_s):
    left_s = list[float]()

    def endless(*_):
        if limit_s is None:
            signal.raise_signal(signal.SIGINT)
        left_s.append(armed_s())
        yield spin()

    monkeypatch.setattr(candidates, "other_configurations", endless)
    model, cluster = make.model(3), make.cluster()
    answer = find_best(make.request(), model, cluster, make.profiles(model, cluster), FILE, lambda _: None, limit_s)
    elsewhere = [one for one in answer.runners_up if len(one.plan.stages) != len(answer.chosen.plan.stages)]
    assert not elsewhere
    assert (limit_s is None) == (left_s == []) and max(left_s, default=0) <= (limit_s or 0) + GRACE_S


def _stopped_early():
    raise StoppedEarly(FILE, "no plan was found", "give it more time")


def _interrupted():
    raise KeyboardInterrupt


@pytest.mark.parametrize("second", [_stopped_early, _interrupted, None])
def test_where_a_second_round_is_stopped_the_fastest_plan_that_fits_is_the_answer(make, monkeypatch, second):
    """Before it knows a plan, by its limit and by Ctrl-C, and with one that is slower."""
    model, cluster = make.model(3), make.cluster()
    given = make.request(), model, cluster, make.profiles(model, cluster), FILE, lambda _: None
    first, rounds, whole = find_best(*given), [], search._once

    def once(*asked):
        rounds.append(asked)
        answer = whole(*asked)
        if len(rounds) == 1:
            return replace(answer, over_bytes=2**20)
        slowest = max(first.runners_up, key=lambda each: each.sample_s)
        return replace(answer, chosen=slowest, stopped=True) if second is None else second()

    monkeypatch.setattr(search, "_once", once)
    monkeypatch.setattr(search, "_alike", lambda *_: None)
    answer = find_best(*given)
    assert len(rounds) == 2 and answer.stopped and answer.chosen.plan == first.chosen.plan
    monkeypatch.setattr(search, "_once", lambda *asked: replace(whole(*asked), fits=False, over_bytes=2**20))
    beyond = find_best(*given)
    assert isinstance(beyond, Infeasible) and not beyond.exact and beyond.missing_bytes == 2**20


def test_a_space_whose_listing_has_no_end_is_given_up(make, monkeypatch):
    monkeypatch.setattr(search, "space_of", lambda *_: spin())
    model, cluster = make.model(3), make.cluster()
    with pytest.raises(StoppedEarly, match="no plan was found before the search was stopped: give it more time"):
        find_best(make.request(), model, cluster, make.profiles(model, cluster), FILE, lambda _: None, 0.1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([random_problem, random_mixed]))
def test_no_plan_lacks_less_than_the_bound_by_division(seed, problem_of):
    problem = problem_of(seed)
    plan = min_memory(problem)
    assert least_missing_bytes(problem) <= plan.missing_bytes
    assert min_memory(problem, plan.missing_bytes) == plan
    assert min_memory(problem, plan.missing_bytes - 1) is None


def search_words(pattern, told):
    (found,) = re.findall(pattern, told.stderr)
    return found


def test_what_cannot_fit_is_answered_at_once_by_the_byte(monkeypatch):
    monkeypatch.setattr("shardwright_search.advise.ways_out._LIMIT_S", 0.0)
    with Profile() as calls:
        told = call(APP, "advise", "llama-3-405b", "--gpus", "8x8:H100-SXM", "--batch", 512, "--time-limit", 60)
    # 8 million calls take half a second without the count; it was 105 s.
    assert told.exit_code == 3 and sum(each.callcount for each in calls.getstats()) < 30_000_000
    assert search_words(
        r"even the leanest exceeds it by more than ([\d.]+) GiB a rank: .*\n  GPUs of more than [\d.]+ GiB", told
    )


def test_what_cannot_fit_is_answered_by_division_where_the_time_is_up(monkeypatch):
    monkeypatch.setattr("shardwright_search.solver.min_memory.min_memory", lambda *_: spin())
    told = call(APP, "advise", "llama-3-405b", "--gpus", "8x8:H100-SXM", "--batch", 512, "--time-limit", 0)
    lack = float(search_words(r"even the leanest exceeds it by more than ([\d.]+) GiB a rank", told))
    budget = float(search_words(r"no plan fits in ([\d.]+) GiB a GPU", told))
    # Beside the states a process has its own memory, and its communicators'.
    assert told.exit_code == 3 and 0 < lack + budget - 405_853_388_800 * 16 / 64 / GIB < 4


@pytest.mark.parametrize("batch", [1_000_003, pytest.param(2**22, marks=pytest.mark.long)])
def test_batches_of_a_million_microbatches_have_an_answer_soon(batch):
    with Profile() as calls:
        told = call(APP, "advise", "llama-2-7b", "--gpus", "8:H100-SXM", "--batch", batch, "--time-limit", 100)
    assert told.exit_code == 0 and "the best plan" in told.output
    # 17 million calls take 6 s; it was more than 100 s.
    assert sum(each.callcount for each in calls.getstats()) < 26_000_000


def random_ranges(rng, count):
    passes = rng.integers(1, 100_000, (count, 2)).tolist()
    return [StageTimes(*both, int(rng.integers(0, 25_000)) * (i < count - 1), 30, 7) for i, both in enumerate(passes)]


@pytest.mark.parametrize("schedule, chunks", [(F1B, 1), (GPIPE, 1), (INTERLEAVED, 2)])
def test_many_microbatches_take_what_they_take_when_all_are_played(monkeypatch, schedule, chunks):
    """Stages of random times soon repeat themselves: the rest is known to the picosecond."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        ranges, microbatches = random_ranges(rng, chunks * int(rng.integers(1, 7))), int(rng.integers(400, 460))
        monkeypatch.setattr(simulator, "_MAX_PASSES", 2**40)
        whole = simulator.step_time_ps(ranges, schedule, microbatches, chunks)
        monkeypatch.setattr(simulator, "_MAX_PASSES", 2 * len(ranges) * 120)
        assert simulator.num_played(len(ranges), len(ranges) // chunks, microbatches) < microbatches
        assert simulator.step_time_ps(ranges, schedule, microbatches, chunks) == whole


def test_rules_of_thumb_that_take_too_long_are_left_out_and_this_is_told(monkeypatch):
    whole = advise.plan_of_rule
    monkeypatch.setattr(advise, "plan_of_rule", lambda name, *more: whole(name, *more) if name == "tp8" else spin())
    told = call(APP, "advise", "llama-2-7b", "--gpus", "8:H100-SXM", "--batch", 64, "--time-limit", 0)
    assert told.exit_code == 0
    assert "rule:tp8" in told.stdout and "rule:smallest" not in told.stdout
    assert "some rules of thumb were not priced within the time limit" in told.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "model, gpus, batch, share, most",
    [("llama-3.1-405b", "2048x8:H100-SXM", 2048, 0.3, 1.1), ("deepseek-v3", "256x8:H100-SXM", 16384, 0.06, 1.5)],
)
def test_a_search_of_a_large_cluster_that_is_cut_short_has_a_good_plan(model, gpus, batch, share, most):
    """The first plans of one strategy, and what the rest of the time adds, beside the search that ends by itself.

    `share`: of what that one takes of the processor, since machines differ in speed.
    """
    steps_s, limit = [], 120.0
    for _ in range(2):
        begun_s = process_time()
        asked = "advise", model, "--gpus", gpus, "--batch", batch, "--seq", 4096, "--tolerance", 0
        told = call(APP, *asked, "--time-limit", limit)
        assert told.exit_code == 0, told.output
        limit = share * (process_time() - begun_s)
        steps_s.append(float(re.search(r"predicted ([\d.]+) s a step", told.stdout)[1]))
    assert steps_s[0] * 0.999 <= steps_s[1] <= steps_s[0] * most, steps_s
