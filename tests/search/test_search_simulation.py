"""The event simulation between its bounds."""

from fractions import Fraction
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.types import Schedule
from shardwright_search.simulation.simulator import StageTimes, lower_bound_ps, simulate

F1B, GPIPE, INTERLEAVED = Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED_1F1B


def closed_form(stages: list[StageTimes], microbatches: int) -> int:
    sends = [0, *(stage.send_ps for stage in stages)]
    times = [s.forward_ps + s.backward_ps + sends[i] + sends[i + 1] for i, s in enumerate(stages)]
    # The optimizer waits for every stage's gradients: the largest of both may be of different stages.
    end = max(s.gradient_sync_ps for s in stages) + max(s.optimizer_ps for s in stages)
    return sum(times) + (microbatches - 1) * max(times) + end


def test_one_stage_takes_the_sum_of_its_passes():
    stages = [StageTimes(3, 7, 0, 11, 13)]
    for schedule in (F1B, GPIPE):
        assert simulate(stages, schedule, 5).step_ps == 5 * 10 + 11 + 13 == closed_form(stages, 5)
        assert lower_bound_ps(stages, 5) == 5 * 10 + 11 + 13


@st.composite
def pipelines(draw: st.DrawFn, same_ratio: bool, num_chunks: int = 1) -> list[StageTimes]:
    """Ranges of any times, or such that share their ratio of passes and send no longer than the passes take."""
    count = draw(st.integers(1, 5)) * num_chunks
    ratio = draw(st.integers(1, 4))
    passes = []
    for _ in range(count):
        forward = draw(st.integers(1, 60))
        passes.append((forward, ratio * forward if same_ratio else draw(st.integers(1, 200))))
    longest = [min(f, b) if same_ratio else 99 for (f, _), (_, b) in pairwise(passes)]
    sends = [*(draw(st.integers(0, send)) for send in longest), 0]
    ends = st.tuples(st.integers(0, 50), st.integers(0, 50))
    return [StageTimes(*own, send, *draw(ends)) for own, send in zip(passes, sends, strict=True)]


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


def test_closed_form_is_no_upper_bound_where_messages_wait_for_a_link():
    """Four messages of 9 one after the other, forward and then back: no stage takes that long for a microbatch."""
    stages = [StageTimes(1, 1, 9, 0, 0), StageTimes(1, 1, 0, 0, 0)]
    assert simulate(stages, GPIPE, 4).step_ps == 1 + 4 * 9 + 1 + 1 + 4 * 9 + 1 == 76 > closed_form(stages, 4) == 55


def test_interleaving_divides_the_bubble_by_the_number_of_chunks():
    """Narayanan et al. 2021, section 2.2.2: (p - 1) / v microbatches of a stage; nothing can be faster."""
    for p, m, v in product(range(1, 7), range(1, 14), range(1, 5)):
        if m >= p:  # with m not a multiple of p too, for no group is smaller than p
            stage = 2 + 3
            ranges = [StageTimes(2, 3, 0, 0, 0)] * (p * v)
            found = simulate(ranges, INTERLEAVED, m, v).step_ps
            assert Fraction(found, v * stage) == m + Fraction(p - 1, v), (p, m, v)
            assert found == lower_bound_ps(ranges, m, v)


def test_interleaved_sends_keep_no_stage_waiting_between_its_first_backward_and_its_last_forward_pass():
    ranges = [StageTimes(10, 20, 5, 0, 0)] * 7 + [StageTimes(10, 20, 0, 0, 0)]
    for stage in range(4):
        events = simulate(ranges, INTERLEAVED, 16, 2).events
        own = [event for event in events if event.stage == stage and event.kind in ("forward", "backward")]
        kinds = [event.kind for event in own]
        steady = own[kinds.index("backward") : len(kinds) - kinds[::-1].index("forward")]
        assert len(steady) > 32
        assert all(after.start_ps == before.end_ps for before, after in pairwise(steady)), stage


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 4).flatmap(lambda v: st.tuples(pipelines(False, v), st.just(v))), st.integers(1, 9))
def test_no_interleaved_step_beats_the_lower_bound(cut, microbatches):
    ranges, chunks = cut
    assert lower_bound_ps(ranges, microbatches, chunks) <= simulate(ranges, INTERLEAVED, microbatches, chunks).step_ps
