"""The event simulation against timelines drawn by hand, and between its bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_formats.plan import Schedule
from shardwright_search.closed_form import step_time
from shardwright_search.simulate import Simulation, StageTimes, lower_bound_ps, simulate

F1B, GPIPE = Schedule.ONE_F_ONE_B, Schedule.GPIPE


def passes(simulation: Simulation, stage: int) -> str:
    """`F0 0-2` and so on, for one pipeline stage."""
    return " ".join(
        f"{event.kind[0].upper()}{event.microbatch} {event.start_ps}-{event.end_ps}"
        for event in simulation.events
        if event.stage == stage and event.microbatch is not None
    )


def closed_form(stages: list[StageTimes], microbatches: int) -> int:
    sends = [0, *(stage.send_ps for stage in stages)]
    times = [s.forward_ps + s.backward_ps + sends[i] + sends[i + 1] for i, s in enumerate(stages)]
    sync, optimizer = max(s.gradient_sync_ps for s in stages), max(s.optimizer_ps for s in stages)
    return step_time(sum(times), max(times), sync, optimizer, microbatches)


def test_1f1b_equals_a_timeline_drawn_by_hand():
    stages = [StageTimes(2, 4, 1, 5, 1), StageTimes(3, 5, 0, 2, 3)]
    found = simulate(stages, F1B, 3)
    assert passes(found, 0) == "F0 0-2 F1 2-4 B0 12-16 F2 16-18 B1 20-24 B2 28-32"
    assert passes(found, 1) == "F0 3-6 B0 6-11 F1 11-14 B1 14-19 F2 19-22 B2 22-27"
    ends = [(e.stage, e.kind, e.start_ps, e.end_ps) for e in found.events if e.microbatch is None]
    assert ends[:2] == [(1, "gradient_sync", 27, 29), (0, "gradient_sync", 32, 37)]
    assert ends[2:] == [(0, "optimizer", 37, 38), (1, "optimizer", 37, 40)]
    assert found.step_ps == 40


def test_gpipe_equals_a_timeline_drawn_by_hand():
    found = simulate([StageTimes(2, 4, 1, 0, 0), StageTimes(3, 5, 0, 0, 0)], GPIPE, 2)
    assert passes(found, 0) == "F0 0-2 F1 2-4 B0 15-19 B1 20-24"
    assert passes(found, 1) == "F0 3-6 F1 6-9 B0 9-14 B1 14-19"


def test_one_stage_takes_the_sum_of_its_passes():
    stages = [StageTimes(3, 7, 0, 11, 13)]
    for schedule in (F1B, GPIPE):
        assert simulate(stages, schedule, 5).step_ps == 5 * 10 + 11 + 13 == closed_form(stages, 5)
        assert lower_bound_ps(stages, 5) == 5 * 10 + 11 + 13


@st.composite
def pipelines(draw: st.DrawFn, same_ratio: bool) -> list[StageTimes]:
    count = draw(st.integers(1, 5))
    ratio = draw(st.integers(1, 4))
    stages = []
    for i in range(count):
        forward = draw(st.integers(1, 60))
        backward = ratio * forward if same_ratio else draw(st.integers(1, 200))
        send = draw(st.integers(0, 20)) if i < count - 1 else 0
        stages.append(StageTimes(forward, backward, send, draw(st.integers(0, 50)), draw(st.integers(0, 50))))
    return stages


@settings(max_examples=150, deadline=None)
@given(pipelines(same_ratio=True), st.integers(1, 9), st.sampled_from([F1B, GPIPE]))
def test_simulated_time_lies_between_lower_bound_and_closed_form(stages, microbatches, schedule):
    simulated = simulate(stages, schedule, microbatches).step_ps
    assert lower_bound_ps(stages, microbatches) <= simulated <= closed_form(stages, microbatches)


@settings(max_examples=150, deadline=None)
@given(pipelines(same_ratio=False), st.integers(1, 9), st.sampled_from([F1B, GPIPE]))
def test_no_simulated_time_beats_the_lower_bound(stages, microbatches, schedule):
    assert lower_bound_ps(stages, microbatches) <= simulate(stages, schedule, microbatches).step_ps


def test_closed_form_is_no_upper_bound_where_stages_differ_in_their_ratio_of_passes():
    """A stage with long forward passes before one with long backward passes: the two do not overlap as they would."""
    stages = [StageTimes(10, 1, 0, 0, 0), StageTimes(1, 10, 0, 0, 0), StageTimes(1, 1, 0, 0, 0)]
    assert simulate(stages, F1B, 2).step_ps == 42 > closed_form(stages, 2) == 35
