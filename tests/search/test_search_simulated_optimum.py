"""The chosen plan against every plan of hostile worlds, all simulated; `make brute-force` does the same for 1,000."""

import numpy as np
import pytest
from rest_long import rest_long
from simulated_optimum import WITHIN, excesses, hostile_world, simulated_steps
from unlike_worlds import UNLIKE_SEEDS, unlike_excesses

from shardwright_search import candidates, search
from shardwright_search.cost_model.plan import simulated_step_ps

SEEDS = (0, 67, 103, 177)


@pytest.mark.parametrize("seeds", rest_long(1, ((*range(4), *SEEDS[1:]), range(4, 10))))
def test_the_chosen_plan_is_near_the_best_simulated_one(seeds):
    assert {seed: more for seed, more in excesses(seeds).items() if more > WITHIN} == {}


@pytest.mark.parametrize("seeds", rest_long(1, (UNLIKE_SEEDS, range(60))))
def test_the_chosen_plan_of_unlike_stages_is_near_the_best_simulated_one(seeds):
    """Stages of any width, on two node types, under ZeRO-3."""
    assert {seed: more for seed, more in unlike_excesses(seeds).items() if more > WITHIN} == {}


@pytest.mark.parametrize(
    ("name", "forgetful"),
    [
        ("_moved_cuts", lambda problem, solution: iter(())),
        ("_starts", lambda instance, ranked: ranked[: candidates._STARTS]),
        ("of_placements", lambda instance, bounds, best: iter(())),
    ],
)
def test_what_is_forgotten_of_unlike_stages_is_seen(monkeypatch, name, forgetful):
    monkeypatch.setattr(candidates, name, forgetful)
    assert any(more > WITHIN for seed in UNLIKE_SEEDS for more in unlike_excesses([seed]).values())


@pytest.mark.parametrize("seeds", rest_long(1, (range(3), range(3, 8))))
def test_plans_simulated_together_take_what_each_takes_alone(seeds):
    rng = np.random.default_rng(0)
    for seed in seeds:
        world = hostile_world(seed)
        instance = world.instance
        for target in world.targets(instance):
            for plans, times in simulated_steps(instance, target.configuration):
                number = int(rng.integers(len(times)))
                plan = instance.plan(target.configuration, plans.solution(number))
                assert simulated_step_ps(plan, instance.costs) == times[number], seed


def test_plans_that_are_not_changed_are_seen(monkeypatch):
    monkeypatch.setattr(search, "changed", lambda instance, ranked: [ranked[0].best])
    assert any(more > WITHIN for seed in SEEDS for more in excesses([seed]).values())


@pytest.mark.parametrize("forgotten", ["cut", "option"])
def test_a_kind_of_change_that_is_forgotten_is_seen(monkeypatch, forgotten):
    moves = candidates._moves

    def fewer(problem, solution):
        return (one for one in moves(problem, solution) if (one.ends == solution.ends) == (forgotten == "cut"))

    monkeypatch.setattr(candidates, "_moves", fewer)
    assert any(more > WITHIN for seed in SEEDS for more in excesses([seed]).values())


def test_changes_that_forget_the_budget_are_seen(monkeypatch):
    """A plan beyond the budget is not taken, but the search goes on with more in reserve and so past the best one."""
    seeds = (30,)
    assert max(excesses(seeds, tight=True).values()) <= WITHIN
    monkeypatch.setattr(candidates, "_fitting", lambda problem, solution: 0.0)
    assert any(more > WITHIN for seed in seeds for more in excesses([seed], tight=True).values())
