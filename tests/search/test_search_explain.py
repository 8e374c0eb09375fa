"""What binds a plan: the parts of its step, and the faster choices that memory keeps out."""

import pytest
from msgspec.structs import replace
from random_requests import FILE, random_world

from shardwright.display.plan_words import strategy_words
from shardwright.io import BadInput
from shardwright.types import GIB, DataParallel, Recompute, Schedule
from shardwright_search.cost_model.plan import cost_model_of, evaluate, offset_ps
from shardwright_search.explain.binding import LayerAlternatives, binding_lines, faster_changes, step_parts
from shardwright_search.search import find_best
from shardwright_search.space.budget import Infeasible


def quiet(_: str) -> None:
    pass


def best(request, model, cluster, profiles):
    return find_best(request, model, cluster, profiles, FILE, quiet)


def test_the_parts_of_a_step_are_those_of_the_closed_form(make):
    model, cluster = make.model(4), make.cluster()
    profiles = make.profiles(model, cluster)
    request = make.request(num_microbatches=[4], pp_sizes=[2])
    plan, found = best(request, model, cluster, profiles).chosen
    parts, stages = step_parts(plan, found.estimate), found.estimate.stages
    assert parts.slowest == 1 and stages[1].time_s > stages[0].time_s
    assert parts.bottleneck_s == pytest.approx(4 * stages[1].time_s)
    assert parts.fill_s == pytest.approx(stages[0].time_s)
    ends = [stage.time_terms_s["gradient_sync"] + stage.time_terms_s["optimizer"] for stage in stages]
    assert parts.end_s == pytest.approx(max(ends)) and min(ends) > 0
    assert parts.always_s == pytest.approx(50e-6)  # the profile's step_overhead_s


@pytest.mark.parametrize("schedule", [each for each in Schedule if not each.splits])
def test_the_parts_of_a_step_add_up_whatever_the_schedule(make, schedule):
    model, cluster = make.model(8), make.cluster(4)
    profiles = make.profiles(model, cluster)
    for count in (2, 8):
        request = make.request(schedules=[schedule], num_microbatches=[count], pp_sizes=[4])
        plan, found = best(request, model, cluster, profiles).chosen
        _, *parts = step_parts(plan, found.estimate)
        assert sum(parts) == pytest.approx(found.estimate.objective_s, rel=1e-9)
        costs = cost_model_of(plan, profiles)
        always_ps = offset_ps(costs, [stage.ranks for stage in plan.stages])
        assert parts[-1] == pytest.approx(always_ps * 1e-12) and min(parts) > 0


def test_more_chunks_make_filling_shorter(make):
    model, cluster = make.model(8), make.cluster(2)
    profiles = make.profiles(model, cluster)
    fills = []
    for schedule in ("1f1b", "interleaved_1f1b"):
        request = make.request(schedules=[schedule], num_microbatches=[8], pp_sizes=[2], recompute=["none"])
        plan, found = best(request, model, cluster, profiles).chosen
        stages = found.estimate.stages
        others = sum(stage.time_s for stage in stages) - max(stage.time_s for stage in stages)
        fills.append(step_parts(plan, found.estimate).fill_s / others)
    assert fills == pytest.approx([1, 0.5], rel=1e-6)


def choices_of(request) -> LayerAlternatives:
    return LayerAlternatives(request.data_parallel, request.recompute, not request.fine_grained)


def on_every_stage(plan, budget):
    return (budget,) * len(plan.stages)


def changes_of(request, world, found):
    costs = cost_model_of(found.plan, world.profiles)
    budget = int(request.memory_gib * GIB)
    return faster_changes(found.plan, found.evaluation, costs, on_every_stage(found.plan, budget), choices_of(request))


def tight_world(seed: int):
    """A random world whose budget is a little more than some plan needs."""
    world = random_world(seed, most_layers=4)
    request = replace(world.request, megatron_gather_buffer=False)
    none = best(replace(request, memory_gib=2**20 / GIB), world.model, world.cluster, world.profiles)
    assert isinstance(none, Infeasible)
    return replace(request, memory_gib=1.1 * none.min_bytes / GIB), world


@pytest.fixture(scope="module")
def tight():
    """Requests, worlds and answers."""
    worlds = map(tight_world, range(8))
    return [(request, world, best(request, world.model, world.cluster, world.profiles)) for request, world in worlds]


def test_a_change_saves_and_lacks_what_its_plan_does(tight):
    kept_out = 0
    for request, world, answer in tight:
        found = answer.chosen
        budget = int(request.memory_gib * GIB)
        for change in changes_of(request, world, found):
            layers = [
                replace(change.strategy, type=layer.type) if change.low <= i < change.high else layer
                for i, layer in enumerate(found.plan.layers)
            ]
            after = evaluate(replace(found.plan, layers=tuple(layers)), world.profiles)
            assert after.objective_ps == found.evaluation.objective_ps - change.saved_ps < found.evaluation.objective_ps
            assert after.estimate.memory_bytes == budget + change.lacks_bytes
            assert after.estimate.stages[change.stage].memory_bytes == after.estimate.memory_bytes
            kept_out += change.lacks_bytes > 0
    assert kept_out > 5


def test_of_the_plan_that_is_proven_best_no_faster_change_fits(tight):
    """Chunks are proven with the same strategies at each position only, so that one layer alone may be better."""
    compared = 0
    for request, world, found in tight:
        optimal = found.chosen.evaluation.objective_ps == round(found.optimum_s * 1e12)
        if optimal and len(found.chosen.plan.stages[0].layers) == 1:
            changes = changes_of(request, world, found.chosen)
            assert all(change.lacks_bytes > 0 for change in changes), request
            compared += len(changes)
    assert compared > 2


def test_memory_binds_until_the_next_change_fits(make):
    model, cluster = make.model(4), make.cluster()
    profiles = make.profiles(model, cluster)
    request = make.request(num_microbatches=[2], pp_sizes=[1], tp_sizes=[1], memory_gib=3.5 / 1024)

    def lines(plan, found, budget):
        budgets = on_every_stage(plan, budget)
        changes = faster_changes(plan, found, cost_model_of(plan, profiles), budgets, choices_of(request))
        return changes, binding_lines(plan, found.estimate, budgets, changes)

    plan, found = best(request, model, cluster, profiles).chosen
    budget = int(request.memory_gib * GIB)
    changes, told = lines(plan, found, budget)
    least = min(changes, key=lambda change: change.lacks_bytes)
    assert (
        told[-1].startswith("memory binds: layer ")
        and f"exceeds the budget by {least.lacks_bytes} bytes a rank" in told[-1]
    )
    assert strategy_words(least.strategy) in told[-1]
    _, told = lines(plan, found, budget + least.lacks_bytes - 1)
    assert told[-1].startswith("memory binds") and "exceeds the budget by 1 bytes" in told[-1]
    _, told = lines(plan, found, budget + least.lacks_bytes)
    assert told[-1].startswith("faster by the closed form, and fits: layer ")
    ample, there = best(replace(request, memory_gib=None), model, cluster, profiles).chosen
    changes, told = lines(ample, there, 1 << 30)
    assert changes == () and told[-1].startswith("memory does not bind")


def test_layers_that_share_a_strategy_change_together(make):
    model, cluster = make.model(3), make.cluster()
    profiles = make.profiles(model, cluster)
    request = make.request(fine_grained=False, recompute=["full"], tp_sizes=[1], pp_sizes=[1], data_parallel=["zero3"])
    plan, found = best(request, model, cluster, profiles).chosen
    own = LayerAlternatives((DataParallel.ZERO3,), (Recompute.NONE, Recompute.FULL), together=True)
    (change,) = faster_changes(plan, found, cost_model_of(plan, profiles), on_every_stage(plan, 1 << 30), own)
    assert (change.low, change.high, change.strategy.recompute) == (0, 3, Recompute.NONE)
    budgets = on_every_stage(plan, 1 << 30)
    apart = faster_changes(plan, found, cost_model_of(plan, profiles), budgets, own._replace(together=False))
    assert [(one.low, one.high) for one in apart] == [(0, 1), (1, 2), (2, 3)]


def test_what_the_profile_has_no_times_for_is_no_choice(make):
    """No point has recomputation of attention."""
    model, cluster = make.model(3), make.cluster()
    profiles = make.profiles(model, cluster)
    plan, found = best(make.request(recompute=["full"], pp_sizes=[1]), model, cluster, profiles).chosen
    costs = cost_model_of(plan, profiles)
    other = replace(plan.layers[0], recompute=Recompute.ATTENTION)
    with pytest.raises(BadInput, match="no point"):
        evaluate(replace(plan, layers=(other, *plan.layers[1:])), profiles, costs)
    changes = faster_changes(plan, found, costs, on_every_stage(plan, 1 << 30), LayerAlternatives())
    assert changes and all(change.strategy.recompute is not Recompute.ATTENTION for change in changes)
