"""The solver and `evaluate` count alike: time and memory of any plan of random models, clusters and requests."""

from itertools import product

import numpy as np
import pytest
from interleaved_problems import every_interleaved, options_of
from msgspec.structs import replace
from random_requests import FILE, World, random_solution, random_world
from rest_long import rest_long

from shardwright.io import BadInput
from shardwright.types import Schedule
from shardwright_search.cost_model import plan as evaluation
from shardwright_search.cost_model.layer_cost import parts_of
from shardwright_search.cost_model.plan import evaluate
from shardwright_search.cost_model.time_model import TimeModel
from shardwright_search.search import NEAR, find_best
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.problem import Solution, price
from shardwright_search.solver.targets import Target
from shardwright_search.space.choices import LayerChoices
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.instance import Instance
from shardwright_search.space.search_space import SearchSpace

BLOCK = 12


def difference(instance: Instance, target: Target[Configuration], solution: Solution) -> str | None:
    """Where `evaluate` counts something else than the solver, for a plan of one chunk a stage."""
    problem = instance.problem(target.configuration)
    counted = price(problem, solution)
    found = evaluate(instance.plan(target.configuration, solution), instance.costs.profiles, instance.costs)
    process = instance.costs.profiles.process_bytes
    memory = [stage.memory_bytes - process for stage in found.estimate.stages]
    if found.objective_ps != counted.objective_ps + target.offset_ps:
        return f"{target.configuration}: {found.objective_ps} is not {counted.objective_ps} + {target.offset_ps}"
    if memory != list(counted.memory_bytes):
        return f"{target.configuration}: {memory} are not {counted.memory_bytes}"
    return None


def differences(world: World, seed: int) -> list[str]:
    """For a random plan of each of some cases."""
    rng, instance = np.random.default_rng(seed), world.instance
    targets = [target for target in world.targets(instance) if target.configuration.num_chunks == 1]
    some = [targets[i] for i in rng.permutation(len(targets))[:8]]
    found = (
        difference(instance, target, random_solution(rng, instance.problem(target.configuration))) for target in some
    )
    return [what for what in found if what is not None]


@pytest.mark.parametrize("block", rest_long(1, range(5)))
def test_any_plan_costs_the_same_to_the_solver_and_to_evaluate(block):
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        world = random_world(seed)
        assert differences(world.with_muon if seed % 3 == 0 else world, seed) == [], seed


@pytest.mark.parametrize("block", rest_long(1, range(3)))
def test_plans_of_interleaved_schedules_cost_the_same_to_the_solver_and_to_evaluate(block):
    """Every plan is enumerated by walking through the action list; evaluate is asked for some of them."""
    compared = 0
    for seed in range(1000 + BLOCK * block, 1000 + BLOCK * (block + 1)):
        rng, world = np.random.default_rng(seed), interleaved_world(seed)
        instance = world.instance
        for target in world.targets(instance):
            configuration = target.configuration
            if configuration.num_chunks == 1:
                continue
            problem = instance.interleaved_problem(configuration)
            if len(problem.positions) > 2:
                continue
            plans = every_interleaved(problem)
            for counted in (plans[i] for i in rng.permutation(len(plans))[:3]):
                options = options_of(problem, counted.options)
                solution = Solution((len(options),), options, (0,) * problem.pp_size)
                found = evaluate(instance.plan(configuration, solution), world.profiles, instance.costs)
                assert found.objective_ps == counted.time_ps + target.offset_ps, (seed, configuration)
                need = counted.memory_bytes + world.profiles.process_bytes
                assert found.estimate.memory_bytes == need, (seed, configuration)
                compared += 1
    assert compared > 20


def interleaved_world(seed: int) -> World:
    """Few strategies, and layers enough for chunks."""
    world = random_world(seed, devices=(2, 4))
    few = {"schedules": (Schedule.INTERLEAVED_1F1B, Schedule.ONE_F_ONE_B), "megatron_gather_buffer": False}
    kinds = {name: getattr(world.request, name)[:1] for name in ("data_parallel", "sequence_parallel")}
    layers = world.model.layers[:1] * int(np.random.default_rng(seed).choice([3, 4, 6, 7, 8]))
    return world._replace(
        request=replace(world.request, **few | kinds),
        model=replace(world.model, layers=layers),
    )


@pytest.mark.parametrize("block", rest_long(1, range(4)))
def test_the_best_and_near_plans_of_a_request_are_evaluated_as_they_were_solved(block):
    for seed in range(2000 + BLOCK * block, 2000 + BLOCK * (block + 1)):
        world = random_world(seed, most_layers=4)
        instance = world.instance
        answer = optimize(world.targets(instance), SearchSpace(instance, FILE).solvable, NEAR, 4)
        assert answer.best is not None and answer.bound == answer.best.score
        for one in answer.near:
            plan = instance.plan(one.target.configuration, one.priced.solution)
            found = evaluate(plan, world.profiles, instance.costs)
            assert found.objective_ps == one.priced.objective_ps + one.target.offset_ps, seed
            budget = instance.budgets["n"] + world.profiles.process_bytes
            assert found.estimate.memory_bytes <= budget, seed


def caught() -> bool:
    return any(differences(random_world(seed), seed) for seed in range(2 * BLOCK))


def test_an_evaluation_that_ignores_middle_stages_is_caught(monkeypatch):
    def ignoring(plan, stages):
        times = [stage.microbatch_ps for stage in stages]
        end = max(stage.sum_of("sync_ps") + stage.sum_of("optimizer_ps") for stage in stages)
        return sum(times) + (plan.num_microbatches - 1) * max(times[0], times[-1]) + end

    monkeypatch.setattr(evaluation, "_closed_form_ps", ignoring)
    assert caught()


@pytest.mark.parametrize("name", ["redistribution", "send"])
def test_an_evaluation_without_a_message_is_caught(monkeypatch, name):
    """The solver's numbers are made first, the plan is evaluated after the change."""

    def both(seed: int) -> list[str]:
        world, rng = random_world(seed), np.random.default_rng(seed)
        instance = world.instance
        targets = [target for target in world.targets(instance) if target.configuration.num_chunks == 1]
        problems = [(target, instance.problem(target.configuration)) for target in targets[:8]]
        cost = getattr(instance.costs, name)
        monkeypatch.setitem(vars(instance.costs), name, lambda *a: cost(*a)._replace(time_ps=0))
        found = []
        for target, problem in problems:
            solution = random_solution(rng, problem)
            priced = evaluate(
                instance.plan(target.configuration, solution), world.profiles, instance.costs
            ).objective_ps
            found.append(priced != price(problem, solution).objective_ps + target.offset_ps)
        return found

    assert any(any(both(seed)) for seed in range(2 * BLOCK))


def test_a_batch_that_is_floored_is_caught(monkeypatch):
    """56 samples in 8 microbatches over 8 ranks: 7 samples are no whole number for any of 2, 4 or 8 ranks."""
    world = random_world(0, devices=(8,))
    request = replace(
        world.request,
        global_batch_size=56,
        num_microbatches=(8,),
        megatron_gather_buffer=False,
        pp_sizes=(1,),
        tp_sizes=(2, 4),
        cp_sizes=(1,),
    )
    with pytest.raises(BadInput, match="no strategy divides the batch"):
        world._replace(request=request).targets(world._replace(request=request).instance)
    monkeypatch.setattr(LayerChoices, "_possible", lambda *_: True)
    instance = world._replace(request=request).instance
    (target, *_) = world.targets(instance)
    answer = optimize([target], SearchSpace(instance, FILE).solvable)
    with pytest.raises(ValueError, match="does not divide the 7 samples of a microbatch"):
        instance.plan(target.configuration, answer.best.priced.solution)


def test_a_time_model_prices_a_plan_as_it_prices_its_case():
    """Where the profile has no curves its points serve, with a warning."""
    world = random_world(3)
    world = world._replace(request=replace(world.request, time_model=TimeModel.BATCH))
    assert differences(world, 0) == []
    instance = world.instance
    target = next(target for target in world.targets(instance) if target.configuration.num_chunks == 1)
    plan = instance.plan(
        target.configuration, random_solution(np.random.default_rng(0), instance.problem(target.configuration))
    )
    assert any("no batch curve" in warning for warning in evaluate(plan, world.profiles, instance.costs).warnings)


@pytest.mark.parametrize("seed", range(2))
def test_strategies_that_are_priced_at_once_cost_what_each_of_them_does(seed: int) -> None:
    """Of every layer type, on stages of every topology, whether there is one micro-batch or more."""
    world, compared = random_world(seed, (4, 8), 4), 0
    instance = world.instance
    for configuration in (target.configuration for target in world.targets(instance)):
        choice = instance.choices.choice(configuration)
        for topology, name, single in product(
            instance.choices.placed(configuration).topologies, instance.prices.types, (False, True)
        ):
            own = choice.of_type(name)
            given = topology, own.samples, single, own.turns
            strategies = instance.prices.layers.shardings(own).of_type(name, topology.size)
            if strategies:
                each = [instance.costs.layer(name, strategy, *given) for strategy in strategies]
                alone = [
                    (
                        *(o.microbatch_ps, o.exposed_ps, o.state_bytes, o.memory.gradients, o.memory.gradient_sums),
                        *(o.activation_bytes, o.workspace_bytes, o.memory.host, o.host_activation_bytes),
                    )
                    for o in each
                ]
                assert (instance.costs.layers(name, parts_of(strategies), *given).T == np.array(alone)).all()
                compared += len(strategies)
    assert compared


def test_what_was_priced_for_another_batch_and_budget_gives_the_same_answer(make):
    """`priced` only spares work: plan, optimum and bound are those of a search that begins with nothing."""
    model, cluster = make.model(4), make.cluster(4)
    given = model, cluster, make.profiles(model, cluster), FILE, lambda _: None
    first = find_best(make.request(memory_gib=4 / 1024), *given)
    for changes in ({"global_batch_size": 32}, {"global_batch_size": 24, "memory_gib": 5 / 1024}):
        asked = make.request(**({"memory_gib": 4 / 1024} | changes))
        alone, sharing = find_best(asked, *given), find_best(asked, *given, priced=first.instance)
        assert sharing.chosen.plan == alone.chosen.plan and sharing.chosen.evaluation == alone.chosen.evaluation
        assert (sharing.optimum_s, sharing.bound_s) == (alone.optimum_s, alone.bound_s)
