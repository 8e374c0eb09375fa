"""The action list of every pipeline stage, alone and against its neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright_formats.plan import Schedule
from shardwright_formats.schedule import Action, Pass, actions, in_flight

schedules = st.sampled_from([Schedule.GPIPE, Schedule.ONE_F_ONE_B])
stage_counts = st.integers(1, 8)
microbatch_counts = st.integers(1, 12)


def _play(lists: list[tuple[Action, ...]]) -> int:
    """Run every stage's list as soon as its inputs are there; returns the number of actions done."""
    position = [0] * len(lists)
    done: set[tuple[int, Action]] = set()
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(lists):
            if position[stage] == len(own):
                continue
            action = own[position[stage]]
            if not _needs(action, stage, len(lists)) <= done:
                continue
            done.add((stage, action))
            position[stage] += 1
            moved = True
    return len(done)


def _needs(action: Action, stage: int, num_stages: int) -> set[tuple[int, Action]]:
    """What must be done first: the neighbour's pass, and a backward pass's own forward pass."""
    if action.kind is Pass.FORWARD:
        return {(stage - 1, action)} if stage > 0 else set()
    needed = {(stage, Action(Pass.FORWARD, action.microbatch))}
    return needed | {(stage + 1, action)} if stage + 1 < num_stages else needed


@given(schedules, stage_counts, microbatch_counts)
def test_every_microbatch_goes_forward_once_and_then_backward_once(schedule: Schedule, p: int, m: int) -> None:
    for stage in range(p):
        own = actions(schedule, p, m, stage)
        assert sorted(own) == sorted(Action(kind, i) for kind in Pass for i in range(m))
        for i in range(m):
            assert own.index(Action(Pass.FORWARD, i)) < own.index(Action(Pass.BACKWARD, i))


@given(schedules, stage_counts, microbatch_counts)
def test_microbatches_keep_their_order_in_each_direction(schedule: Schedule, p: int, m: int) -> None:
    for stage in range(p):
        own = actions(schedule, p, m, stage)
        for kind in Pass:
            assert [action.microbatch for action in own if action.kind is kind] == list(range(m))


@given(schedules, stage_counts, microbatch_counts)
def test_no_pipeline_stage_waits_for_ever(schedule: Schedule, p: int, m: int) -> None:
    assert _play([actions(schedule, p, m, stage) for stage in range(p)]) == 2 * m * p


def test_the_token_game_sees_a_deadlock() -> None:
    lists = [actions(Schedule.GPIPE, 2, 2, stage) for stage in range(2)]
    assert _play([lists[0], tuple(reversed(lists[1]))]) < 8


@given(stage_counts, microbatch_counts)
def test_1f1b_holds_no_more_microbatches_than_there_are_stages_to_come(p: int, m: int) -> None:
    assert [in_flight(Schedule.ONE_F_ONE_B, p, m, i) for i in range(p)] == [min(m, p - i) for i in range(p)]


@given(stage_counts, microbatch_counts)
def test_gpipe_holds_every_microbatch(p: int, m: int) -> None:
    assert {in_flight(Schedule.GPIPE, p, m, i) for i in range(p)} == {m}


def test_the_interleaved_schedule_has_no_action_list() -> None:
    with pytest.raises(ValueError, match="interleaved_1f1b"):
        actions(Schedule.INTERLEAVED_1F1B, 2, 4, 0)
