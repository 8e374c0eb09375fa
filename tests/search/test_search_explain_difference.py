"""Two plans: what they decide differently, and what each term gains or loses by it."""

import pytest
from msgspec.structs import replace
from rich.console import Console

from shardwright.types import LayerStrategy, PipelineStage, Plan, Schedule, Strategy
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.explain.tables import difference, memory_changes, plan_differences, time_changes

ONE = Strategy(tp_size=1, dp_size=1)


@pytest.fixture
def plans(make) -> tuple[Plan, Plan]:
    """Two stages of two layers, the second recomputed; and one stage, data-parallel, zero3 in the middle."""
    model, cluster = make.model(4), make.cluster()
    plain = LayerStrategy(type="block", tp_size=1, dp_size=1)
    full = replace(plain, recompute="full")
    first = Plan(
        name="first", model=model, cluster=cluster, global_batch_size=8, num_microbatches=4,
        schedule=Schedule.ONE_F_ONE_B,
        stages=(PipelineStage(ranks=(0,), layers=((0, 2),)), PipelineStage(ranks=(1,), layers=((2, 4),))),
        embedding=ONE, head=ONE, layers=(plain, full, plain, plain),
    )  # fmt: skip
    wide = replace(plain, dp_size=2)
    zero3 = replace(wide, data_parallel="zero3")
    two = Strategy(tp_size=1, dp_size=2)
    second = replace(
        first, name="second", num_microbatches=2, stages=(PipelineStage(ranks=(0, 1), layers=((0, 4),)),),
        embedding=two, head=two, layers=(wide, zero3, zero3, wide),
    )  # fmt: skip
    return first, second


def _cut(plan, cuts):
    stages = tuple(replace(stage, layers=layers) for stage, layers in zip(plan.stages, cuts, strict=True))
    return replace(plan, stages=stages)


def test_each_difference_is_one_line(plans):
    assert plan_differences(*plans) == (
        "num_microbatches: 4 → 2",
        "pipeline stages: 2 → 1",
        "layers of a pipeline stage: 2 → 4",
        "embedding: tp1 x dp1 → tp1 x dp2 ddp",
        "head: tp1 x dp1 → tp1 x dp2 ddp",
        "layer 0: tp1 x dp1 → tp1 x dp2 ddp",
        "layer 1: tp1 x dp1 recompute full → tp1 x dp2 zero3",
        "layer 2: tp1 x dp1 → tp1 x dp2 zero3",
        "layer 3: tp1 x dp1 → tp1 x dp2 ddp",
    )


def test_neighbouring_layers_that_differ_alike_are_told_together(plans):
    _, plan = plans
    plain = replace(plan, layers=(plan.layers[0],) * 4)
    assert plan_differences(plan, plain) == ("layers 1-2: tp1 x dp2 zero3 → tp1 x dp2 ddp",)


def test_a_moved_cut_is_one_line_and_layers_on_both_sides_are_told_together(plans):
    plan = plans[0]
    moved = _cut(plan, (((0, 1),), ((1, 4),)))
    assert plan_differences(plan, moved) == ("layers of a pipeline stage: 2 → 1 + 3",)
    full = replace(moved, layers=(plan.layers[1],) * 4)
    assert plan_differences(plan, full)[1:] == tuple(
        f"{layers}: tp1 x dp1 → tp1 x dp1 recompute full" for layers in ("layer 0", "layers 2-3")
    )


def test_chunks_that_differ_are_told_by_their_layers(plans):
    plan = replace(plans[0], schedule=Schedule.INTERLEAVED_1F1B)
    cuts = ((0, 1), (2, 3)), ((1, 2), (3, 4))
    assert plan_differences(plan, _cut(plan, cuts)) == ("layers of a pipeline stage: 2 → 1, 1",)


def test_a_plan_differs_in_nothing_from_itself_and_from_another_spelling(plans):
    plan, _ = plans
    spelled = tuple(replace(layer, data_parallel="zero3", tp_consecutive=False) for layer in plan.layers)
    assert spelled != plan.layers
    assert plan_differences(plan, replace(plan, layers=spelled, name="other")) == ()


def test_all_other_decisions_are_told(plans, make):
    plan, _ = plans
    changed = replace(
        plan, global_batch_size=16, schedule=Schedule.GPIPE, gradient_reduction="every_microbatch",
        attention="eager", cluster=replace(plan.cluster, name="elsewhere"),
        precision=replace(plan.precision, compute="bfloat16"),
    )  # fmt: skip
    assert plan_differences(plan, changed) == (
        "cluster: some of 2 devices → elsewhere of 2 devices",
        "global_batch_size: 8 → 16",
        "schedule: 1f1b → gpipe",
        "gradient_reduction: deferred → every_microbatch",
        "precision: float32/float32/float32 → float32/bfloat16/float32",
        "attention: auto → eager",
    )
    with pytest.raises(ValueError, match="models"):
        plan_differences(plan, replace(plan, model=replace(plan.model, name="another")))


def test_terms_add_up_to_what_the_plans_differ_in(plans, make):
    first, second = plans
    profiles = make.profiles(first.model, first.cluster)
    here, there = (evaluate(plan, profiles).estimate for plan in plans)
    time, memory = time_changes(first, here, second, there), memory_changes(here, there)
    assert [change.term for change in time] == list(here.stages[0].time_terms_s)
    assert [change.term for change in memory] == list(here.stages[0].memory_terms_bytes)

    def step_s(plan, stage):
        once = stage.time_terms_s["gradient_sync"] + stage.time_terms_s["optimizer"]
        return plan.num_microbatches * stage.time_s + once

    together = sum(step_s(second, s) for s in there.stages) - sum(step_s(first, s) for s in here.stages)
    assert sum(change.together.gain for change in time) == pytest.approx(together)
    slowest = max(here.stages, key=lambda stage: stage.time_s)
    assert slowest is here.stages[1] or slowest is here.stages[0]
    assert sum(change.binding.here for change in time) == pytest.approx(step_s(first, slowest))
    assert sum(change.binding.there for change in time) == pytest.approx(step_s(second, there.stages[0]))
    assert sum(change.binding.gain for change in memory) == there.memory_bytes - here.memory_bytes
    totals = [sum(stage.memory_bytes for stage in each.stages) for each in (here, there)]
    assert sum(change.together.gain for change in memory) == totals[1] - totals[0]


def test_terms_are_those_of_the_slowest_and_of_the_fullest_stage(plans, make):
    """1F1B holds most in the first stage; the head makes the last one the slowest."""
    first, second = plans
    plain = replace(first, layers=(first.layers[0],) * 4)
    profiles = make.profiles(first.model, first.cluster)
    here, there = (evaluate(plan, profiles).estimate for plan in (plain, second))
    times, resident = [s.time_s for s in here.stages], [s.memory_bytes for s in here.stages]
    assert times[1] > times[0] and resident[0] > resident[1]
    forward, *_ = time_changes(plain, here, second, there)
    assert forward.binding.here == 4 * here.stages[1].time_terms_s["forward"]
    assert forward.binding.there == 2 * there.stages[0].time_terms_s["forward"]
    activations = next(c for c in memory_changes(here, there) if c.term == "activations")
    assert activations.binding.here == here.stages[0].memory_terms_bytes["activations"]


def test_the_report_has_both_step_times_and_the_gains(plans, make):
    first, second = plans
    profiles = make.profiles(first.model, first.cluster)
    here, there = (evaluate(plan, profiles).estimate for plan in plans)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(difference(first, here, second, there))
    shown = captured.get()
    for each in (here, there):
        assert f"{each.simulated_step_time_s * 1e3:.3f} ms a step" in shown
    gain = there.simulated_step_time_s / here.simulated_step_time_s - 1
    assert f"the other takes {gain:+.1%} time a sample" in shown
    optimizer = time_changes(first, here, second, there)[-1]
    row = next(line for line in shown.splitlines() if line.startswith("│ optimizer"))
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [
        f"{value * 1e3:{sign}.3f}"
        for pair in optimizer[1:]
        for value, sign in ((pair.here, ""), (pair.there - pair.here, "+"))
    ]
