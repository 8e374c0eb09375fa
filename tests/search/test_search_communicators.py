"""NCCL's buffers: counted from the plan for its prediction, and left room for by the search."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from communicating_worlds import SPLIT, best_within, budgets_of_world, communicating_world, with_memory
from made_up import make_cluster, make_model, make_profiles, make_request
from msgspec.structs import replace
from random_requests import FILE, World, random_solution, random_world
from rest_long import rest_long

from shardwright.plan.communication import Cause, step_messages
from shardwright.plan.process_groups import Purpose, communicator_bytes, communicators
from shardwright_search import search
from shardwright_search.commands.prediction import prediction_of_searched
from shardwright_search.cost_model import layer
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.space.budget import GIB, Infeasible, budgets_of, budgets_of_stages
from shardwright_search.space.room import is_divisible, stage_rooms
from shardwright_search.space.room_parts import stage_groups
from shardwright_search.space.search_space import space_of

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
    """A world whose best plan hardly fits, where communicators take about as much as the rest."""
    world = random_world(seed)
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


@pytest.fixture
def unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that splits no configuration, as of unequal widths and of several chunks."""
    monkeypatch.setattr(search, "parts_of", lambda instance, best: None)


@pytest.fixture(scope="module")
def begun_again() -> list[tuple[World, SearchAnswer]]:
    """Worlds whose search has to begin again where it splits no configuration."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(search, "parts_of", lambda instance, best: None)
        some = _found(
            with_memory(world, budget + world.profiles.process_bytes)
            for world in filter(None, map(communicating_world, SPLIT))
            for budget in budgets_of_world(world, 4)
        )
    return [(world, found) for world, found in some if found.reserve_gib > world.request.reserve_gib]


def test_every_plan_that_is_found_fits_with_the_communicators_that_it_makes(
    tight: list[tuple[World, SearchAnswer]],
) -> None:
    for world, found in tight:
        for plan, evaluation in (found.chosen, *found.runners_up):
            held = communicators(plan)
            budgets = budgets_of_stages(plan, budgets_of(world.request, world.cluster, FILE))
            for stage, own, most in zip(plan.stages, evaluation.estimate.stages, budgets, strict=True):
                of_ranks = [communicator_bytes(held[rank], world.profiles.communicator_bytes) for rank in stage.ranks]
                assert own.memory_terms_bytes.get("communicators", 0) == max(of_ranks)
                assert own.memory_bytes <= most
    assert len(tight) > 5


def test_where_plans_make_more_communicators_than_expected_more_is_left_free_and_that_is_said(
    begun_again: list[tuple[World, SearchAnswer]], unsplit: None
) -> None:
    assert all(found.bound_s <= found.optimum_s for _, found in begun_again)
    world, found = begun_again[0]
    budgets = budgets_of_stages(found.chosen.plan, budgets_of(world.request, world.cluster, FILE))
    prediction = prediction_of_searched(found, world.request, budgets, {})
    assert any("more than reserve_gib were left free" in warning for warning in prediction.warnings)


def test_a_search_with_more_left_free_prices_no_layer_again(
    begun_again: list[tuple[World, SearchAnswer]], unsplit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced, rounds = [0], list[int]()
    once, slowest = search._once, layer.slowest_compute

    def counted(*given: Any) -> Any:
        priced[0] += 1
        return slowest(*given)

    def noted(*given: Any, **named: Any) -> Any:
        before = priced[0]
        answer = once(*given, **named)
        rounds.append(priced[0] - before)
        return answer

    monkeypatch.setattr(layer, "slowest_compute", counted)
    monkeypatch.setattr(search, "_once", noted)
    searched(begun_again[0][0])
    first, *others = rounds
    assert first > 0 and others and not any(others)


def test_where_nothing_is_found_with_more_left_free_a_runner_up_that_fits_is_the_answer(
    begun_again: list[tuple[World, SearchAnswer]], unsplit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Infeasible("nothing", 1, 1, True)
    answers: list[SearchAnswer | Infeasible] = []
    for world, _ in begun_again:
        once, calls = search._once, iter((search._once, lambda *_, **__: nothing))
        monkeypatch.setattr(search, "_once", lambda *given, calls=calls, **named: next(calls)(*given, **named))
        answers.append(searched(world))
        monkeypatch.setattr(search, "_once", once)
        if isinstance(own := answers[-1], SearchAnswer):
            budgets = budgets_of_stages(own.chosen.plan, budgets_of(world.request, world.cluster, FILE))
            stages = own.chosen.evaluation.estimate.stages
            assert all(stage.memory_bytes <= most for stage, most in zip(stages, budgets, strict=True))
            assert own.optimum_s >= own.bound_s
    assert any(isinstance(own, SearchAnswer) for own in answers)


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


@pytest.mark.parametrize("seeds", rest_long(1, ((*range(4), *SPLIT), range(4, 400))))
def test_the_best_of_all_plans_that_fit_is_found_and_more_memory_never_makes_it_slower(seeds: Iterable[int]) -> None:
    """Every plan of tiny worlds, counted with the communicators that it makes, within budgets from tight to ample."""
    parts = 0
    for seed in seeds:
        if (world := communicating_world(seed)) is not None:
            budgets = budgets_of_world(world, 4)
            best = [plan.score for plan in best_within(world, budgets)]
            assert best == sorted(best, reverse=True), seed
            for budget, score in zip(budgets, best, strict=True):
                space = space_of(*with_memory(world, budget + world.profiles.process_bytes), FILE)
                optimum = search._optimum(space, None, lambda line: None)
                found = np.inf if optimum.best is None else optimum.best.score
                assert (found, optimum.bound) == (score, score), (seed, budget)
                parts += optimum.looked_at - len(space.targets)
    assert parts > 10


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_a_stage_are_those_of_its_first_rank(seed: int) -> None:
    world = random_world(seed, (4, 8), 4)
    rng, instance = np.random.default_rng(seed), world.instance
    for target in world.targets(instance):
        configuration = target.configuration
        if is_divisible(configuration) and not configuration.limits:
            solution = random_solution(rng, instance.problem(configuration))
            plan = instance.plan(configuration, solution)
            groups, counted = stage_groups(instance, configuration, solution), communicators(plan)
            for stage, room, has in zip(plan.stages, stage_rooms(configuration, world.model), groups, strict=True):
                named = {group: sum(each.purpose is group for each in has | room.required) for group in Purpose}
                named |= {Purpose.WORLD: 1, Purpose.EDGE: room.edges}
                assert counted[stage.ranks[0]] == {group: count for group, count in named.items() if count}
