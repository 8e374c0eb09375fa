"""The action list of every pipeline stage, alone and against its neighbours."""

from collections import defaultdict, deque
from fractions import Fraction
from itertools import product
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.plan.schedules.passes import Action, Pass
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.schedule import step_time
from shardwright.types import Schedule

F1B, GPIPE, INTERLEAVED = Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED_1F1B

JOINT = Pass.FORWARD, Pass.BACKWARD
schedules = st.sampled_from([GPIPE, F1B])
stage_counts = st.integers(1, 8)
microbatch_counts = st.integers(1, 12)
SIZES = list(product(range(1, 7), range(1, 14), range(1, 5)))
"""Stages, microbatches and chunks for which the interleaved schedule is tried out."""


class _OutOfOrderError(Exception):
    """A stage took a message that was meant for another action."""


def _play(lists: list[tuple[Action, ...]]) -> int:
    """Run every stage's list with first-in first-out edges; returns the number of actions done.

    A send never blocks; a stage waits for the next message of its edge before an action that needs one. That a
    backward pass comes after its own forward pass is not looked at.
    """
    edges: defaultdict[tuple[Pass, int, int], deque[tuple[int, int]]] = defaultdict(deque)
    last_range = len(lists) * (1 + max(action.chunk for own in lists for action in own)) - 1
    position = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(lists):
            if position[stage] == len(own):
                continue
            kind, microbatch, chunk = own[position[stage]]
            here = chunk * len(lists) + stage
            step = 1 if kind is Pass.FORWARD else -1
            if 0 <= here - step <= last_range:
                edge = edges[kind, (here - step) % len(lists), stage]
                if not edge:
                    continue
                if edge.popleft() != (microbatch, here):
                    raise _OutOfOrderError
            if 0 <= here + step <= last_range:
                edges[kind, stage, (here + step) % len(lists)].append((microbatch, here + step))
            position[stage] += 1
            moved = True
    assert sum(position) < sum(len(own) for own in lists) or not any(edges.values())
    return sum(position)


def _lists(schedule: Schedule, p: int, m: int, v: int = 1) -> list[tuple[Action, ...]]:
    return [schedule_of(schedule).actions(p, m, stage, v) for stage in range(p)]


def _brief(own: tuple[Action, ...]) -> str:
    """`F0a B0a` and so on: pass, microbatch, and chunk 0 as a, 1 as b."""
    return " ".join(f"{kind[0].upper()}{microbatch}{'abcd'[chunk]}" for kind, microbatch, chunk in own)


@given(schedules, stage_counts, microbatch_counts)
def test_every_microbatch_goes_forward_once_and_then_backward_once(schedule: Schedule, p: int, m: int) -> None:
    for own in _lists(schedule, p, m):
        assert sorted(own) == sorted(Action(kind, i) for kind in schedule_of(schedule).kinds for i in range(m))
        for i in range(m):
            assert own.index(Action(Pass.FORWARD, i)) < own.index(Action(Pass.BACKWARD, i))


@given(schedules, stage_counts, microbatch_counts)
def test_microbatches_keep_their_order_in_each_direction(schedule: Schedule, p: int, m: int) -> None:
    for own in _lists(schedule, p, m):
        for kind in schedule_of(schedule).kinds:
            assert [action.microbatch for action in own if action.kind is kind] == list(range(m))


@given(schedules, stage_counts, microbatch_counts)
def test_no_pipeline_stage_waits_for_ever(schedule: Schedule, p: int, m: int) -> None:
    assert _play(_lists(schedule, p, m)) == 2 * m * p


def test_the_token_game_sees_a_deadlock() -> None:
    (one_at_a_time,), (_, last) = _lists(F1B, 1, 2), _lists(GPIPE, 2, 2)
    assert _play([one_at_a_time, last]) == 2


def test_the_token_game_sees_messages_in_another_order_than_they_are_taken() -> None:
    first, last = _lists(GPIPE, 2, 2)
    with pytest.raises(_OutOfOrderError):
        _play([first, (last[1], last[0], *last[2:])])


@given(stage_counts, microbatch_counts)
def test_1f1b_holds_no_more_microbatches_than_there_are_stages_to_come(p: int, m: int) -> None:
    assert [schedule_of(F1B).in_flight(p, m, i) for i in range(p)] == [min(m, p - i) for i in range(p)]


@given(stage_counts, microbatch_counts)
def test_gpipe_holds_every_microbatch(p: int, m: int) -> None:
    assert {schedule_of(GPIPE).in_flight(p, m, i) for i in range(p)} == {m}


def test_interleaved_lists_equal_those_written_by_hand() -> None:
    first, last = _lists(INTERLEAVED, 2, 4, 2)
    assert _brief(first) == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    assert _brief(last) == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


def test_microbatches_beyond_a_multiple_of_the_stages_make_the_first_groups_larger() -> None:
    _, last = _lists(INTERLEAVED, 2, 5, 2)
    assert _brief(last) == "F0a F1a F2a F0b B0b F1b B1b F2b B2b F3a B0a F4a B1a F3b B2a F4b B3b B4b B3a B4a"


def test_fewer_microbatches_than_stages_go_through_a_chunk_together() -> None:
    lists = _lists(INTERLEAVED, 4, 2, 2)
    assert _brief(lists[3]) == "F0a F1a F0b B0b F1b B1b B0a B1a"
    assert [_brief(own) for own in lists[:3]] == ["F0a F1a F0b F1b B0b B1b B0a B1a"] * 3


def test_interleaved_goes_through_every_chunk_forward_once_and_then_backward_once() -> None:
    for p, m, v in SIZES:
        for own in _lists(INTERLEAVED, p, m, v):
            assert sorted(own) == sorted(Action(kind, i, c) for kind in JOINT for i in range(m) for c in range(v))
            for i, c in product(range(m), range(v)):
                assert own.index(Action(Pass.FORWARD, i, c)) < own.index(Action(Pass.BACKWARD, i, c))


def test_interleaved_never_waits_for_ever_and_takes_messages_in_the_order_they_are_sent() -> None:
    for p, m, v in SIZES:
        assert _play(_lists(INTERLEAVED, p, m, v)) == 2 * m * v * p, (p, m, v)


def test_the_last_backward_pass_of_every_chunk_is_that_of_the_last_microbatch() -> None:
    for p, m, v in SIZES:
        for own in _lists(INTERLEAVED, p, m, v):
            last = {chunk: microbatch for kind, microbatch, chunk in own if kind is Pass.BACKWARD}
            assert last == dict.fromkeys(range(v), m - 1)


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    for p, m, _ in SIZES:
        assert _lists(INTERLEAVED, p, m) == _lists(F1B, p, m)


def test_interleaved_holds_a_group_for_each_chunk_and_two_chunks_for_each_later_stage() -> None:
    """v p + p - 1 in the first stage: Korthikanti et al. 2022."""
    for p, groups, v in product(range(1, 7), range(1, 4), range(2, 5)):
        m = groups * p
        held = [schedule_of(INTERLEAVED).in_flight(p, m, stage, v) for stage in range(p)]
        assert held == [min(m * v, (v - 1) * p + 2 * (p - 1 - stage) + 1) for stage in range(p)]
    assert schedule_of(INTERLEAVED).in_flight(4, 16, 0, 2) == 2 * 4 + 4 - 1


def test_several_chunks_need_the_interleaved_schedule() -> None:
    for schedule in (GPIPE, F1B):
        with pytest.raises(ValueError, match=f"2 chunks need an interleaved schedule, not {schedule}"):
            schedule_of(schedule).actions(2, 4, 0, 2)


@given(st.sampled_from(Schedule), microbatch_counts, st.integers(1, 4), st.lists(st.integers(0, 2**52), min_size=1))
def test_a_step_is_the_closed_form_rounded_up_to_whole_picoseconds(
    schedule: Schedule, m: int, v: int, times: list[int]
) -> None:
    chunks = 2 if schedule.turns else v if schedule.interleaves else 1
    total, slowest = Fraction(sum(times)), max(times)
    filled = (total - slowest) / chunks + m * slowest
    few = total + Fraction((m - 1) * slowest, chunks)
    forms = schedule_of(schedule).closed_forms(m, chunks)
    assert step_time(forms, sum(times), slowest, 7) == ceil(max(filled, few)) + 7
    small = [time % 2**36 for time in times]
    columns = (np.array([float(number)]) for number in (sum(small), max(small), 7))
    assert step_time(forms, *columns).tolist() == [step_time(forms, sum(small), max(small), 7)]


def test_every_schedule_has_an_object_of_its_name() -> None:
    assert [schedule_of(name).name for name in Schedule] == list(Schedule)
