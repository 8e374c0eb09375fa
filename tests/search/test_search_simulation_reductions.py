"""What holds of every simulated step, whatever its stages reduce beside their backward passes."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.types import Schedule
from shardwright_search.simulation.simulator import (
    Overlap,
    Reduction,
    StageTimes,
    backward_pass,
    lower_bound_ps,
    simulate,
    step_time_ps,
)

ALONE, FREELY = None, Overlap(1, 1)
elements = st.lists(st.builds(Reduction, st.integers(1, 60), st.integers(0, 90)), min_size=1, max_size=5).map(tuple)
overlaps = st.none() | st.builds(Overlap, st.floats(1, 3), st.floats(1, 3))


@st.composite
def configurations(draw, overlap=overlaps):
    """Ranges, schedule, number of microbatches and of chunks; the last pass and some of the others reduce."""
    schedule = draw(st.sampled_from([each for each in Schedule if not each.splits]))
    num_chunks = draw(st.integers(2, 3)) if schedule is Schedule.INTERLEAVED_1F1B else 1
    ranges = []
    for _ in range(draw(st.integers(2, 4)) * num_chunks):
        reductions = draw(elements)
        early = draw(st.sampled_from(((), reductions)))
        own = (*draw(st.tuples(*[st.integers(0, 40)] * 3)), reductions, early, draw(overlap))
        ranges.append(StageTimes(draw(st.integers(1, 60)), sum(e.backward_ps for e in reductions), *own))
    ranges[-1] = ranges[-1]._replace(send_ps=0)
    return ranges, schedule, draw(st.integers(1, 7)), num_chunks


def scaled(times: StageTimes, factor: int) -> StageTimes:
    lists = ([Reduction(*(factor * t for t in e)) for e in own] for own in (times.reductions, times.early_reductions))
    return StageTimes(*(factor * time for time in times[:5]), *map(tuple, lists), times.overlap)


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_a_step_takes_no_less_than_the_bound_and_no_less_than_any_stages_work(configuration):
    ranges, _, microbatches, chunks = configuration
    step_ps = simulate(*configuration).step_ps
    assert step_ps == step_time_ps(*configuration)
    bound = lower_bound_ps(ranges, microbatches, chunks)
    stages = len(ranges) // chunks
    work = [microbatches * sum(r.forward_ps + r.backward_ps for r in ranges[i::stages]) for i in range(stages)]
    assert max(work) <= bound <= step_ps


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_every_lane_does_one_thing_at_a_time_and_each_thing_once(configuration):
    ranges, _, microbatches, chunks = configuration
    stages = len(ranges) // chunks
    found = simulate(*configuration)
    lanes = defaultdict(list)
    for e in found.events:
        kind = e.kind if e.kind in ("send_forward", "send_backward", "gradient_sync") else "stage"
        lanes[e.stage, kind].append((e.start_ps, e.end_ps))
        assert 0 <= e.start_ps < e.end_ps <= found.step_ps
    for events in lanes.values():
        assert all(before[1] <= after[0] for before, after in pairwise(events))
    counted = Counter((e.stage, e.kind, e.microbatch, e.chunk) for e in found.events if e.kind != "gradient_sync")
    assert set(counted.values()) == {1}
    passes = [(e.kind, e.stage) for e in found.events if e.kind in ("forward", "backward")]
    assert Counter(passes) == {(k, i): microbatches * chunks for k in ("forward", "backward") for i in range(stages)}
    sent = Counter(e.kind for e in found.events)
    sending = sum(r.send_ps > 0 for r in ranges)
    assert sent["send_forward"] == sent["send_backward"] == sending * microbatches


@settings(max_examples=100, deadline=None)
@given(configurations(st.sampled_from((ALONE, FREELY))), st.integers(2, 9))
def test_scaling_all_times_scales_the_answer(configuration, factor):
    ranges, *rest = configuration
    larger = [scaled(times, factor) for times in ranges]
    assert step_time_ps(larger, *rest) == factor * step_time_ps(ranges, *rest)
    assert lower_bound_ps(larger, *rest[1:]) == factor * lower_bound_ps(ranges, *rest[1:])


@settings(max_examples=100, deadline=None)
@given(configurations(), st.integers(2, 9))
def test_rounding_slowed_times_to_picoseconds_moves_the_answer_by_next_to_nothing(configuration, factor):
    ranges, *rest = configuration
    fine = [scaled(times, 10**9) for times in ranges]
    larger = [scaled(times, factor * 10**9) for times in ranges]
    assert step_time_ps(larger, *rest) == pytest.approx(factor * step_time_ps(fine, *rest), rel=1e-8)


@settings(max_examples=100, deadline=None)
@given(configurations())
def test_reducing_beside_the_backward_pass_is_never_slower_where_nothing_slows_down(configuration):
    ranges, *rest = configuration
    behind, overlapped_time = ([r._replace(overlap=overlap) for r in ranges] for overlap in (ALONE, FREELY))
    assert step_time_ps(overlapped_time, *rest) <= step_time_ps(behind, *rest)


@settings(max_examples=100, deadline=None)
@given(elements, st.floats(1, 3), st.floats(1, 3), st.integers(0, 9))
def test_a_slowed_pass_lies_between_an_unhindered_one_and_one_that_is_always_slow(own, compute, message, behind):
    found = backward_pass(own, Overlap(compute, message), behind)
    freely = backward_pass(own, FREELY, behind)
    rounding = 2 * len(own)
    assert freely.gradient_ps <= found.gradient_ps <= compute * freely.gradient_ps + rounding
    assert freely.busy_ps <= found.busy_ps <= max(compute, message) * freely.busy_ps + rounding
    spent = sum(end - start for start, end in found.reductions_ps)
    alone = sum(e.sync_ps for e in own) + behind
    assert alone <= spent <= message * alone + rounding


def test_a_large_slowdown_makes_reducing_beside_the_backward_pass_worse_than_behind_it():
    own = (Reduction(10, 10), Reduction(10, 10))
    assert backward_pass(own, None).busy_ps == 40
    assert backward_pass(own, Overlap(3, 3)).busy_ps == 50


def test_layers_that_are_not_the_whole_backward_pass_are_refused():
    times = StageTimes(1, 10, 0, 0, 0, (Reduction(4, 1), Reduction(5, 1)))
    with pytest.raises(ValueError, match="the layers' backward passes take 9 ps, the range's 10"):
        simulate([times], Schedule.ONE_F_ONE_B, 1)
