"""NCCL's buffers: counted from the plan for its prediction, and left room for by the search."""

from collections.abc import Iterable
from itertools import pairwise
from math import ceil
from typing import Any

import numpy as np
import pytest
from communicating_worlds import BEYOND, best_within, budgets_of_world, communicating_world, with_memory
from made_up import make_cluster, make_model, make_profiles, make_request
from msgspec.structs import replace
from random_requests import FILE, World, random_solution, random_world
from rest_long import rest_long

from shardwright.estimate.notes import SPARE_SHARE
from shardwright.plan.communication import Cause, step_messages
from shardwright.plan.process_groups import Purpose, communicator_bytes, communicators, strategy_axes
from shardwright_search import search
from shardwright_search.commands.prediction import prediction_of_searched
from shardwright_search.cost_model import layer
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.budget import GIB, Infeasible, allowed_bytes, budgets_of, over_bytes
from shardwright_search.space.request import SearchRequest

MIB = 1 << 20


def searched(world: World) -> SearchAnswer | Infeasible:
    return find_best(world.request, world.model, world.cluster, world.profiles, FILE, lambda line: None)


def test_a_middle_rank_of_three_kinds_of_parallelism_has_seven_communicators() -> None:
    """One of all ranks, of tensor and of data parallelism, and an edge each way and pass to both neighbours."""
    model, cluster = make_model(8), make_cluster(16)
    request = make_request(
        global_batch_size=8, num_microbatches=[4], pp_sizes=[4], tp_sizes=[2], recompute=["none"], schedules=["1f1b"],
        data_parallel=["ddp"], sequence_parallel=["none"], tp_consecutive=[True],
    )  # fmt: skip
    profiles = make_profiles(model, cluster)._replace(communicator_bytes=4 * MIB)
    found = searched(World(request, model, cluster, profiles))
    assert isinstance(found, SearchAnswer)
    plan = found.chosen.plan
    counted = communicators(plan)
    grid = {Purpose.WORLD: 1, Purpose.TENSOR_PARALLEL: 1, Purpose.DATA_PARALLEL: 1}
    for stage, edges in enumerate((2, 4, 4, 2)):
        for rank in plan.stages[stage].ranks:
            assert counted[rank] == grid | {Purpose.EDGE: edges}
    assert sum(counted[plan.stages[1].ranks[0]].values()) == 7
    terms = [stage.memory_terms_bytes["communicators"] for stage in found.chosen.evaluation.estimate.stages]
    assert terms == [(3 * 4 + edges) * MIB for edges in (2, 4, 4, 2)], "an edge holds a quarter"
    without = evaluate(plan, profiles._replace(communicator_bytes=0)).estimate
    pairs = zip(found.chosen.evaluation.estimate.stages, without.stages, strict=True)
    assert [own.memory_bytes - other.memory_bytes for own, other in pairs] == terms


def _tight(seed: int) -> World | None:
    """A world whose best plan hardly fits, where communicators take about as much as the rest; half train with Muon."""
    world = random_world(seed)
    world = world.with_muon if seed % 2 else world
    free = searched(world)
    if isinstance(free, Infeasible):
        return None
    held = max(stage.memory_bytes for stage in free.chosen.evaluation.estimate.stages) - world.profiles.process_bytes
    of_each = max(4, held // 2)
    profiles = world.profiles._replace(communicator_bytes=of_each)
    asked = held + profiles.process_bytes + 2 * of_each
    request = replace(world.request, memory_gib=asked / GIB, reserve_gib=0.0)
    return world._replace(request=request, profiles=profiles)


def _found(worlds: Iterable[World | None]) -> list[tuple[World, SearchAnswer]]:
    answers = ((world, searched(world)) for world in worlds if world is not None)
    return [(world, found) for world, found in answers if isinstance(found, SearchAnswer)]


@pytest.fixture(scope="module")
def tight() -> list[tuple[World, SearchAnswer]]:
    """Worlds that have a plan."""
    return _found(map(_tight, range(8, 16)))


@pytest.fixture(scope="module")
def begun_again() -> list[tuple[World, SearchAnswer, list[SearchAnswer | Infeasible]]]:
    """Worlds whose search begins again, as its plan does not fit, and what each round finds."""
    some = []
    for world in filter(None, map(communicating_world, BEYOND[:3])):
        for budget in budgets_of_world(world, 4):
            asked = with_memory(world, budget + world.profiles.process_bytes)
            rounds, once = list[SearchAnswer | Infeasible](), search._once
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(search, "_once", lambda *given, to=rounds, of=once: to.append(of(*given)) or to[-1])
                found = searched(asked)
            first = rounds[0]
            if isinstance(first, SearchAnswer) and first.over_bytes > 0 and isinstance(found, SearchAnswer):
                some.append((asked, found, rounds))
    return some


def test_every_plan_that_is_found_fits_with_the_communicators_that_it_makes(
    tight: list[tuple[World, SearchAnswer]],
) -> None:
    for world, found in tight:
        for plan, evaluation in (found.chosen, *found.runners_up):
            held = communicators(plan)
            budgets = allowed_bytes(plan, evaluation.estimate, budgets_of(world.request, world.cluster, FILE))
            for stage, own, most in zip(plan.stages, evaluation.estimate.stages, budgets, strict=True):
                of_ranks = [communicator_bytes(held[rank], world.profiles.communicator_bytes) for rank in stage.ranks]
                assert own.memory_terms_bytes.get("communicators", 0) == max(of_ranks)
                assert own.memory_bytes <= most
    assert len(tight) > 5


def test_the_bound_of_a_search_that_begins_again_stays_that_of_all_plans(
    begun_again: list[tuple[World, SearchAnswer, list[SearchAnswer | Infeasible]]],
) -> None:
    for world, found, rounds in begun_again:
        first = rounds[0]
        assert isinstance(first, SearchAnswer)
        samples = found.chosen.plan.global_batch_size / first.chosen.plan.global_batch_size
        assert found.bound_s <= first.bound_s * samples and found.bound_s <= found.optimum_s
        budgets = budgets_of(world.request, world.cluster, FILE)
        assert max(over_bytes(found.chosen.plan, found.chosen.evaluation.estimate, budgets)) <= 0
    assert begun_again


def test_a_search_with_more_left_free_prices_no_layer_again(
    begun_again: list[tuple[World, SearchAnswer, list[SearchAnswer | Infeasible]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    priced, rounds = [0], list[int]()
    once, slowest = search._once, layer.slowest_compute

    def counted(*given: Any) -> Any:
        priced[0] += 1
        return slowest(*given)

    def noted(*given: Any) -> Any:
        before = priced[0]
        answer = once(*given)
        rounds.append(priced[0] - before)
        return answer

    monkeypatch.setattr(layer, "slowest_compute", counted)
    monkeypatch.setattr(search, "_once", noted)
    monkeypatch.setattr(search, "_alike", lambda *_: None)
    searched(begun_again[0][0])
    first, *others = rounds
    assert first > 0 and others and not any(others)


def test_the_default_budget_leaves_room_for_communicators_and_an_explicit_one_has_none() -> None:
    """A plan whose communicators take of the spare is taken at once; with the same bytes said it is none."""
    model, cluster = make_model(2), make_cluster(4)
    profiles = make_profiles(model, cluster)._replace(communicator_bytes=40 * 1024)
    request = make_request(global_batch_size=4, pp_sizes=[1], recompute=["none"])
    found = searched(World(request, model, cluster, profiles))
    assert isinstance(found, SearchAnswer)
    plan, estimate = found.chosen.plan, found.chosen.evaluation.estimate
    (stage,) = estimate.stages
    without = stage.memory_bytes - stage.memory_terms_bytes["communicators"]
    device = replace(cluster.node_types["n"], memory_bytes=ceil(without / (1 - SPARE_SHARE)) + 2)
    default = budgets_of(with_memory_of(device.memory_bytes, request), cluster, FILE)["n"]
    on_it = replace(plan, cluster=replace(cluster, node_types={"n": device}))
    assert without <= default < stage.memory_bytes <= device.memory_bytes
    assert max(over_bytes(on_it, estimate, {"n": default})) <= 0
    told = prediction_of_searched(found, request, allowed_bytes(on_it, estimate, {"n": default}), {})
    assert stage.memory_bytes <= (told.memory_budget_bytes or 0) <= device.memory_bytes
    assert over_bytes(on_it, estimate, {"n": default - 1}) == (stage.memory_bytes - default + 1,)


def with_memory_of(device_bytes: int, request: SearchRequest) -> SearchRequest:
    return replace(request, memory_gib={"n": device_bytes / GIB * (1 - SPARE_SHARE)})


def test_a_plan_of_few_communicators_is_found_where_there_is_no_room_for_more() -> None:
    """All devices in one data-parallel group: two communicators, where room for three is more than there is."""
    model, cluster = make_model(2), make_cluster(4)
    profiles = make_profiles(model, cluster)._replace(communicator_bytes=64 * MIB)
    request = make_request(global_batch_size=4, pp_sizes=[1], memory_gib=0.16)
    found = searched(World(request, model, cluster, profiles))
    assert isinstance(found, SearchAnswer)
    (stage,) = found.chosen.evaluation.estimate.stages
    assert stage.memory_terms_bytes["communicators"] == 2 * 64 * MIB and stage.memory_bytes <= 0.16 * GIB
    too_little = searched(World(replace(request, memory_gib=0.12), model, cluster, profiles))
    assert isinstance(too_little, Infeasible)


@pytest.mark.parametrize("seeds", rest_long(1, ([0, *range(3, 8)], [1, 2, *range(8, 20)])))
def test_counting_from_the_plan_is_no_less_than_any_of_its_collectives_need(seeds: Iterable[int]) -> None:
    """Every kind of group that a random plan's step messages go over is counted."""
    kinds = {
        Cause.TENSOR_PARALLEL: Purpose.TENSOR_PARALLEL,
        Cause.ULYSSES: Purpose.EXCHANGE,
        Cause.REDISTRIBUTION: Purpose.EXCHANGE,
        Cause.PARAMETERS: Purpose.DATA_PARALLEL,
        Cause.GRADIENTS: Purpose.DATA_PARALLEL,
        Cause.PIPELINE: Purpose.EDGE,
        Cause.TIED_PARAMETERS: Purpose.TIED_PARAMETERS,
        Cause.NORM: Purpose.WORLD,
    }
    seen: set[Cause] = set()
    for seed in seeds:
        world = random_world(seed)
        found = searched(world)
        if isinstance(found, Infeasible):
            continue
        plan = found.chosen.plan
        counted = communicators(plan)
        for rank in np.random.default_rng(seed).permutation(plan.world_size)[:2].tolist():
            causes = {message.cause for message in step_messages(plan, rank) if message.group_size > 1}
            seen |= causes
            for cause in causes & kinds.keys():
                assert counted[rank][kinds[cause]] >= 1, (seed, rank, cause)
    assert len(seen & kinds.keys()) > 5


@pytest.mark.parametrize(
    "seeds", rest_long(1, ((*range(4), *BEYOND), *(range(first, first + 66) for first in range(4, 400, 66))))
)
def test_what_is_found_fits_and_no_plan_that_fits_is_below_the_bound(seeds: Iterable[int]) -> None:
    """Every plan of tiny worlds, counted with the communicators that it makes, within budgets from tight to ample."""
    possible, exact = 0, 0
    for seed in seeds:
        if (world := communicating_world(seed)) is not None:
            budgets = budgets_of_world(world, 4)
            for budget, best in zip(budgets, best_within(world, budgets), strict=True):
                asked = with_memory(world, budget + world.profiles.process_bytes)
                found, possible = searched(asked), possible + (best.plan is not None)
                if isinstance(found, Infeasible):
                    assert best.plan is None or not found.exact, (seed, budget)
                    continue
                limits, estimate = budgets_of(asked.request, asked.cluster, FILE), found.chosen.evaluation.estimate
                assert max(over_bytes(found.chosen.plan, estimate, limits)) <= 0, (seed, budget)
                scale = found.chosen_scale * 1e12
                # A time is the score over a batch size, and rounded.
                assert found.bound_s * scale <= best.score * (1 + 1e-12), (seed, budget)
                assert found.optimum_s * scale >= best.score * (1 - 1e-12), (seed, budget)
                exact += found.optimum_s * scale <= best.score * (1 + 1e-12)
    assert possible > 10 and exact > 0.9 * possible


@pytest.mark.parametrize("seed", range(4))
def test_no_more_is_counted_of_a_stage_than_each_of_its_ranks_makes(seed: int) -> None:
    world = random_world(seed, (4, 8), 4)
    rng, instance = np.random.default_rng(seed), world.instance
    configurations = [target.configuration for target in world.targets(instance)]
    for configuration in (each for each in configurations if each.num_chunks == 1):
        solution = random_solution(rng, instance.problem(configuration))
        plan = instance.plan(configuration, solution)
        layers = (plan.embedding, *plan.layers, plan.head)
        cuts = [0, *solution.ends]
        made = communicators(plan)
        for stage, (low, high) in zip(plan.stages, pairwise(cuts), strict=True):
            own = max(len(set(strategy_axes(each))) for each in layers[low:high])
            for rank in stage.ranks:
                edges = made[rank].get(Purpose.EDGE, 0)
                assert edges >= configuration.edges
                assert sum(made[rank].values()) - edges - 1 >= own
