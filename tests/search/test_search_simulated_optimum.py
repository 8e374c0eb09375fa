"""The chosen plan against every plan of hostile worlds, all simulated; `make brute-force` does the same for 1,000."""

import numpy as np
import pytest
from simulated_optimum import WITHIN, excesses, hostile_world, simulated_steps

from shardwright_search import alternatives, search
from shardwright_search.cost_model.plan import simulated_step_ps

SEEDS = (0, 67, 103, 177)


def test_the_chosen_plan_is_near_the_best_simulated_one():
    assert {seed: more for seed, more in excesses((*range(10), *SEEDS)).items() if more > WITHIN} == {}


def test_plans_simulated_together_take_what_each_takes_alone():
    rng = np.random.default_rng(0)
    for seed in range(8):
        world = hostile_world(seed)
        instance = world.instance
        for target in world.targets(instance):
            for plans, times in simulated_steps(instance, target.configuration):
                number = int(rng.integers(len(times)))
                plan = instance.plan(target.configuration, plans.solution(number))
                assert simulated_step_ps(plan, instance.costs) == times[number], seed


def test_plans_that_are_not_changed_are_seen(monkeypatch):
    monkeypatch.setattr(search, "changed", lambda instance, ranked, deadline: ranked[0].best)
    assert max(excesses(SEEDS).values()) > WITHIN


@pytest.mark.parametrize("forgotten", ["cut", "option"])
def test_a_kind_of_change_that_is_forgotten_is_seen(monkeypatch, forgotten):
    moves = alternatives._moves

    def fewer(problem, solution):
        return (one for one in moves(problem, solution) if (one.ends == solution.ends) == (forgotten == "cut"))

    monkeypatch.setattr(alternatives, "_moves", fewer)
    assert max(excesses(SEEDS).values()) > WITHIN


def test_changes_that_forget_the_budget_are_seen(monkeypatch):
    monkeypatch.setattr(alternatives, "_fitting", lambda problem, solution: 0.0)
    assert min(excesses(range(12), tight=True).values()) < -WITHIN
