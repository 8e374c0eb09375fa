"""The simulation of whole plans, as they are evaluated."""

import pytest

from shardwright.types import LayerStrategy, PipelineStage, Plan, Schedule, Strategy
from shardwright_search.cost_model.plan import evaluate

F1B, INTERLEAVED = Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED_1F1B


def make_plan(make, ranges: list[list[list[int]]], schedule: Schedule, microbatches: int = 4) -> Plan:
    """Two ranks, and as many samples in a microbatch as ranks in a stage."""
    cluster, model, width = make.cluster(2), make.model(ranges[-1][-1][-1]), 2 // len(ranges)
    return Plan(
        name="some",
        model=model,
        cluster=cluster,
        global_batch_size=microbatches * width,
        num_microbatches=microbatches,
        schedule=schedule,
        stages=tuple(
            PipelineStage(
                ranks=tuple(range(i * width, (i + 1) * width)), layers=tuple((low, high) for low, high in own)
            )
            for i, own in enumerate(ranges)
        ),
        embedding=Strategy(tp_size=1, dp_size=width),
        head=Strategy(tp_size=1, dp_size=width),
        layers=tuple(LayerStrategy(type=name, tp_size=1, dp_size=width) for name in model.layers),
    )


def test_an_interleaved_plan_is_evaluated_range_by_range(make):
    """In us: forward 12, 120 and 84, twice that back; a send 24.096, of which each stage has three; optimizer 49.152
    for each of three elements; overhead 50. Activations in units of 2048 bytes: 4, 120 and 24.
    """
    plan = make_plan(make, [[[0, 1], [2, 3]], [[1, 2], [3, 4]]], INTERLEAVED)
    profiles = make.profiles(plan.model, plan.cluster)
    estimate = evaluate(plan, profiles).estimate
    first, last = estimate.stages
    assert first.time_s == pytest.approx((36 + 2 * 360 + 3 * 24.096) * 1e-6)
    assert last.time_s == pytest.approx((252 + 2 * 360 + 3 * 24.096) * 1e-6)
    filling_s = first.time_s / 2
    assert estimate.objective_s == pytest.approx(filling_s + 4 * last.time_s + (3 * 49.152 + 50) * 1e-6)
    # F0a F1a F0b F1b F2a B0b F3a: four microbatches in the embedding and layer 0, one in layer 2.
    # Every layer but the first keeps what it received, 4; the next stage has received two outputs, which are freed.
    assert first.memory_terms_bytes["activations"] == (4 * (4 + 120) + 4 + 120 - 2 * 4) * 2048
    # F0a F1a F0b: two in layer 1, of which one output is freed, one in layer 3 and the head.
    assert last.memory_terms_bytes["activations"] == (2 * (4 + 120) + 4 + 120 + 24 - 4) * 2048
    assert all(sum(stage.memory_terms_bytes.values()) == stage.memory_bytes for stage in estimate.stages)
    plain = evaluate(make_plan(make, [[[0, 2]], [[2, 4]]], F1B), profiles).estimate
    assert estimate.simulated_lower_bound_s <= estimate.simulated_step_time_s < plain.simulated_step_time_s


def test_several_ranges_in_a_single_stage_are_no_plan(make):
    with pytest.raises(ValueError, match="several layer ranges need several pipeline stages"):
        make_plan(make, [[[0, 1], [1, 4]]], INTERLEAVED)


def test_the_only_microbatch_takes_the_sum_of_all_ranges(make):
    plan = make_plan(make, [[[0, 1], [2, 3]], [[1, 2], [3, 4]]], INTERLEAVED, microbatches=1)
    estimate = evaluate(plan, make.profiles(plan.model, plan.cluster)).estimate
    assert estimate.simulated_step_time_s == estimate.simulated_lower_bound_s == estimate.objective_s
