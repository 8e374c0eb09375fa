"""Sends that block: a timeline drawn by hand, and steps that are never shorter for them."""

import numpy as np
import pytest

from shardwright_formats.types import Schedule
from shardwright_search.simulation.simulator import Sends, StageTimes, simulate

F1B, GPIPE, INTERLEAVED = Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED_1F1B
RANGES = [StageTimes(2, 4, 1, 0, 0), StageTimes(3, 5, 0, 0, 2)]


def drawn(sends: Sends) -> tuple[dict[tuple[int, str, int | None], tuple[int, int]], int]:
    events, step = simulate(RANGES, F1B, 2, sends=sends)
    return {(e.stage, e.kind, e.microbatch): (e.start_ps, e.end_ps) for e in events}, step


def test_a_step_whose_sends_block_is_as_drawn_by_hand():
    """Stage 0 waits for its first message to be taken, and for both the second and the first gradient."""
    events, step = drawn(Sends.BLOCKING)
    forward, backward = "forward", "backward"
    assert [events[0, forward, i] for i in range(2)] == [(0, 2), (3, 5)]
    assert [events[1, forward, i] for i in range(2)] == [(3, 6), (12, 15)]
    assert [events[1, backward, i] for i in range(2)] == [(6, 11), (15, 20)]
    assert [events[0, backward, i] for i in range(2)] == [(12, 16), (21, 25)]
    assert [events[0, "send_forward", i] for i in range(2)] == [(2, 3), (11, 12)]
    assert [events[1, "send_backward", i] for i in range(2)] == [(11, 12), (20, 21)]
    assert step == 27


def test_the_same_step_whose_sends_do_not_block_is_shorter():
    events, step = drawn(Sends.ASYNCHRONOUS)
    assert events[0, "forward", 1] == (2, 4) and events[1, "forward", 1] == (11, 14) and step == 26


@pytest.mark.parametrize("schedule", [F1B, GPIPE])
def test_sends_that_block_never_make_a_step_shorter(schedule):
    rng, longer = np.random.default_rng(0), 0
    for _ in range(150):
        p, m = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        ranges = [StageTimes(*rng.integers(1, 20, 2).tolist(), int(rng.integers(0, 9)), 0, 1) for _ in range(p)]
        both = [simulate(ranges, schedule, m, sends=sends).step_ps for sends in Sends]
        assert both[0] <= both[1]
        assert p > 1 or both[0] == both[1]
        longer += both[0] < both[1]
    assert longer > 60


def test_stages_that_would_wait_for_one_another_are_refused():
    """Two stages of two chunks: with three microbatches each message meets its receive, with four it does not."""
    ranges = [StageTimes(1, 2, 1, 0, 0)] * 4
    assert simulate(ranges, INTERLEAVED, 3, 2, Sends.BLOCKING).step_ps > 0
    with pytest.raises(ValueError, match="wait for one another"):
        simulate(ranges, INTERLEAVED, 4, 2, Sends.BLOCKING)
