"""How often a message is repeated, how long a sweep is expected to take, and what the clocks of overlap see."""

import threading
import time
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright_profile.hardware import overlap
from shardwright_profile.hardware.measurements import rate_tasks
from shardwright_profile.hardware.overlap import overlap_clock
from shardwright_profile.hardware.session import Stopwatch
from shardwright_profile.hardware.worker import Line, Workload, line_through

_CPU = torch.device("cpu")
_WORK = Workload(points=[1000, 2000], pairs=[1000], overlap=[1000], case_messages=8.0, min_repeats=6, warm_up_repeats=3)


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Series:
    """Makes up times, and remembers how many it was asked for."""

    def __init__(self, *times_s, pause_s=0.0):
        self.asked, self._times_s, self._pause_s = [], [cycle(series) for series in times_s], pause_s

    def __call__(self, repeats):
        self.asked.append(repeats)
        time.sleep(self._pause_s * repeats)
        return np.array([[next(series) for _ in range(repeats)] for series in self._times_s])


@pytest.mark.usefixtures("world_of_one")
def test_steady_times_are_repeated_as_little_as_possible():
    steady = _Series([1.0, 1.01])
    assert Stopwatch(_CPU).repeated(steady, 1e9, 100).shape == (1, 6)
    assert steady.asked == [6]


@pytest.mark.usefixtures("world_of_one")
def test_times_that_scatter_are_repeated_in_growing_rounds_to_the_most():
    wild = _Series([1.0, 1.01], [1.0, 2.0])
    assert Stopwatch(_CPU).repeated(wild, 1e9, 30).shape == (2, 30)
    assert wild.asked == [6, 6, 6, 9, 3]


@pytest.mark.usefixtures("world_of_one")
def test_times_that_scatter_a_little_are_repeated_until_their_median_is_known():
    # Of 6 and of 12 times the interval reaches the slow ones (the 10th of 12 is the third slow one), of 18 it does not.
    assert Stopwatch(_CPU).repeated(_Series([1.1, *[1.0] * 7, 1.1]), 1e9, 100).shape == (1, 18)


@pytest.mark.usefixtures("world_of_one")
def test_no_more_is_repeated_than_there_is_time_for():
    slow = _Series([1.0, 2.0], pause_s=0.005)
    assert slow.asked == []
    assert 6 <= Stopwatch(_CPU).repeated(slow, 0.06, 1000).shape[1] <= 12
    assert Stopwatch(_CPU).repeated(_Series([1.0, 2.0]), 0.0, 1000).shape == (1, 6)


@pytest.mark.usefixtures("world_of_one")
def test_the_most_repeats_hold_for_the_first_round_too():
    assert Stopwatch(_CPU).repeated(_Series([1.0, 2.0]), 1e9, 5).shape == (1, 5)


class _Made:
    """Made-up times, of which each thread has another, and messages and computations that take them."""

    def __init__(self):
        self._here, self._computing, self._arrived = threading.local(), threading.Event(), threading.Event()

    def now_s(self):
        return getattr(self._here, "now_s", 0.0)

    def message(self, time_s, after_computing=True):
        return lambda: SimpleNamespace(wait=partial(self._wait, time_s, after_computing))

    def computation(self, time_s, after_arrival=False):
        return partial(self._compute, time_s, after_arrival)

    def _wait(self, time_s, after_computing):
        assert not after_computing or self._computing.wait(60)
        self._here.now_s = time_s
        self._arrived.set()

    def _compute(self, time_s, after_arrival):
        self._computing.set()
        assert not after_arrival or self._arrived.wait(60)
        self._here.now_s = self.now_s() + time_s


def test_a_message_and_a_computation_are_timed_apart_whichever_ends_first(monkeypatch):
    """One begins while the other goes on, or this has no end."""
    for late, times in ((False, 3), (True, 5)):
        made = _Made()
        monkeypatch.setattr(overlap, "perf_counter", made.now_s)
        message, computation = made.message(0.25, after_computing=not late), made.computation(0.125, after_arrival=late)
        assert overlap_clock(_CPU)(message, computation, times) == (0.125 * times, 0.25)


def test_what_is_not_there_takes_no_time(monkeypatch):
    made, clock = _Made(), overlap_clock(_CPU)
    monkeypatch.setattr(overlap, "perf_counter", made.now_s)
    assert clock(None, made.computation(0.5), 2) == (1.0, 0.0)
    assert clock(lambda: None, lambda: None, 0) == (0.0, 0.0)
    assert clock(made.message(2.0, after_computing=False), made.computation(0.5), 0) == (0.0, 1.0)


def test_the_least_time_is_that_of_the_fewest_repeats_of_everything():
    line = line_through((1000, 0.25), (3000, 0.75))
    assert line == pytest.approx(Line(0.0, 0.25e-3))
    assert _WORK.min_s(line) == pytest.approx((6 + 3) * (0.25 + 0.5 + 0.25 + 8 * 0.25))
    assert line_through((1000, 0.5), (3000, 0.25)) == Line(0.5, 0.0)
    assert line_through((1000, 0.5), (1000, 0.75)) == Line(0.5, 0.0)


def test_the_estimate_says_what_there_is_what_is_kept_and_when_the_budget_is_short():
    assert _WORK.estimate(0, 12.3, 60.0) == (
        "hardware: 2 points, 1 rounds of pairs, 1 overlaps, at least 6 repeats each: about 12 s needed, 60 s given"
    )
    assert _WORK.estimate(7, 3.0, 0.5).endswith(
        "about 3 s needed, 0.5 s given: the small sizes are timed all the same; "
        "7 measurements of a killed sweep are kept"
    )


@pytest.mark.usefixtures("world_of_one")
def test_rates_are_of_random_numbers(monkeypatch):
    """A GPU computes products of ones, and may copy zeros, faster than what training has."""
    factors, sources = [], []
    monkeypatch.setattr(torch, "mm", lambda one, other, out: factors.extend([one, other]))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda target, source: sources.append(source))
    clock = SimpleNamespace(device=_CPU, rank_times_s=lambda call, repeats: call() or np.ones((1, repeats)))
    session = SimpleNamespace(
        stopwatch=clock,
        identity=SimpleNamespace(cluster=SimpleNamespace(num_devices=1, nodes=())),
        process_groups=None,
    )
    for task in rate_tasks(session):
        task.measure(1.0)
    overlap._layer(session)()
    timer = overlap._Timer(session)
    monkeypatch.setattr(timer, "_turns_s", lambda turns, _repeats: np.ones((1, 1)))
    for computation in timer._computations:
        computation.once()
    assert len(factors) >= 6 and sources
    assert all(len(factor.unique()) > factor.numel() // 2 for factor in factors)
    assert all(len(source[:65536].unique()) > 200 for source in sources)
