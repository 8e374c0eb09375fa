"""What each lever on memory frees and costs: the price of the plan that has it, on as few layers as it takes."""

import pytest
from made_up import make_cluster, make_model, make_profiles, make_request
from msgspec.structs import replace
from random_requests import FILE, random_world

from shardwright.types import DataParallel, Offload, Recompute
from shardwright_search.cost_model.plan import cost_model_of, evaluate
from shardwright_search.explain import tables as module
from shardwright_search.explain.tables import levers
from shardwright_search.search import SearchAnswer, find_best

CHANGED = {
    **{f"without recompute {kind}": {"recompute": Recompute.NONE} for kind in Recompute},
    "without offload optimizer": {"offload": Offload.NONE},
    "zero2 for zero3": {"data_parallel": DataParallel.ZERO2},
    "ddp for zero2": {"data_parallel": DataParallel.DDP, "shard_size": 0},
    "recompute selective": {"recompute": Recompute.SELECTIVE},
    "recompute norms+activations": {"recompute": Recompute.NORMS_ACTIVATIONS},
    "recompute full": {"recompute": Recompute.FULL},
    "zero2 for ddp": {"data_parallel": DataParallel.ZERO2},
    "zero3 for zero2": {"data_parallel": DataParallel.ZERO3},
    "offload optimizer": {"offload": Offload.OPTIMIZER},
}


def _answers():
    for seed in range(12):
        world = random_world(seed, most_layers=5)
        found = find_best(world.request, world.model, world.cluster, world.profiles, FILE, lambda _: None)
        if isinstance(found, SearchAnswer):
            yield found.chosen.plan, world.profiles


def _changed(plan, lever, count):
    fields, layers = CHANGED[lever.name], list(plan.layers)
    for i in lever.layers[:count]:
        layers[i] = replace(layers[i], **fields)
    return replace(plan, layers=tuple(layers))


def test_a_lever_is_priced_as_its_plan_and_takes_no_more_layers_than_it_needs(monkeypatch):
    names, fewer = set(), 0
    for plan, profiles in _answers():
        for target in (1, 200_000, 2**30):
            monkeypatch.setattr(module, "TARGET_BYTES", target)
            before, costs = evaluate(plan, profiles), cost_model_of(plan, profiles)
            for stage in range(len(plan.stages)):
                budgets = [2**30 + number for number in range(len(plan.stages))]
                for lever in levers(plan, before, costs, stage, budgets):
                    after = evaluate(_changed(plan, lever, len(lever.layers)), profiles)
                    held = [each.estimate.stages[stage].memory_bytes for each in (before, after)]
                    assert lever.more_bytes == held[1] - held[0] != 0
                    assert lever.slower == after.objective_ps / before.objective_ps - 1
                    assert lever.left_bytes == budgets[stage] - held[1]
                    assert len(lever.layers) == lever.possible or abs(lever.more_bytes) >= target
                    if abs(lever.more_bytes) >= target and len(lever.layers) > 1:
                        without = evaluate(_changed(plan, lever, len(lever.layers) - 1), profiles)
                        assert abs(without.estimate.stages[stage].memory_bytes - held[0]) < target
                    names.add(lever.name)
                    fewer += len(lever.layers) < lever.possible
    assert len(names) >= 6 and fewer > 5


@pytest.mark.parametrize("rate", [None, 20e9])
def test_offloading_is_a_lever_where_copies_to_the_host_have_a_price(rate):
    model, cluster = make_model(4), make_cluster(2)
    if rate is not None:
        types = {name: replace(kind, host_bytes_per_s=rate) for name, kind in cluster.node_types.items()}
        cluster = replace(cluster, node_types=types)
    profiles = make_profiles(model, cluster)
    plan = find_best(make_request(), model, cluster, profiles, FILE, lambda _: None).chosen.plan
    found = {each.name: each for each in levers(plan, evaluate(plan, profiles), cost_model_of(plan, profiles), 0, None)}
    assert ("offload optimizer" in found) == (rate is not None)
    if rate is not None:
        assert found["offload optimizer"].more_bytes < 0 < found["offload optimizer"].slower
        assert found["offload optimizer"].left_bytes is None
