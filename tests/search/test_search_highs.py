"""HiGHS, solver code of other people, against the search: they find equally good plans, and nothing better."""

import numpy as np
import pytest
from highs import HighsAnswer, solve
from middle_problems import middle_problem, solved
from msgspec.structs import replace
from random_problems import best_of, random_problem
from random_requests import FILE, random_world
from rest_long import rest_long

from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.problem import Problem, price
from shardwright_search.space.search_space import SearchSpace

NEAR = 1e-6
SECONDS = 60.0


def costlier(problem: Problem, solution_options: tuple[int, ...], element: int) -> Problem:
    """The option that one element has, slower by a tenth."""
    kind = problem.layers[element]
    place = problem.device_groups[0]
    times = place.options[kind].time_ps.copy()
    times[solution_options[element]] *= 1.1
    options = list(place.options)
    options[kind] = options[kind]._replace(time_ps=times)
    return replace(problem, device_groups=(replace(place, options=tuple(options)),))


@pytest.mark.parametrize("block", rest_long(1, range(2)))
def test_the_solver_and_highs_find_equally_good_plans_of_middle_sized_problems(block):
    for seed in range(5 * block, 5 * block + 5):
        problem = middle_problem(seed)
        ours, theirs = solved(problem).objective_ps, solve(problem, SECONDS)
        assert theirs.done and theirs.solution is not None, seed
        assert theirs.objective_ps == pytest.approx(ours, rel=NEAR), seed
        counted = price(problem, theirs.solution)
        assert counted.objective_ps == pytest.approx(theirs.objective_ps, rel=NEAR), seed
        assert max(counted.memory_bytes) <= problem.device_groups[0].budget_bytes, seed


def test_memory_binds_in_middle_sized_problems():
    """With no end of memory most of them have a faster plan."""
    binding = 0
    for seed in range(10):
        problem = middle_problem(seed)
        free = replace(problem, device_groups=(replace(problem.device_groups[0], budget_bytes=1 << 50),))
        binding += solved(free).objective_ps < solved(problem).objective_ps
    assert binding >= 8


@pytest.mark.parametrize("count", rest_long(1, (50, 120)))
def test_highs_finds_the_best_of_all_plans_of_tiny_problems_and_nothing_below_it(count):
    """Several places, places of which there are too few, ties, and cases that nothing fits in."""
    nothing = 0
    for seed in range(count):
        problem = random_problem(seed)
        best, answer = best_of(problem), solve(problem, SECONDS)
        assert answer.done, seed
        nothing += answer.solution is None
        assert answer.objective_ps == pytest.approx(best, rel=NEAR), seed
        if np.isfinite(best):
            assert price(problem, answer.solution).objective_ps == best, seed
            assert solve(problem, SECONDS, best - 0.5) == (None, np.inf, True), seed
    assert nothing > 0


def test_highs_notices_that_a_problem_was_changed():
    problem = middle_problem(15)
    found = solved(problem)
    changed = solve(costlier(problem, found.solution.options, 1), SECONDS)
    assert changed.done and changed.objective_ps > found.objective_ps * (1 + NEAR)


def test_highs_that_has_no_time_claims_nothing():
    answer = solve(middle_problem(0), 0.0)
    assert not answer.done


@pytest.mark.parametrize("seed", rest_long(3, range(300, 308)))
def test_highs_knows_no_better_plan_in_any_configuration_of_random_requests(seed):
    given = random_world(seed, most_layers=5)
    instance = given.instance
    targets = given.targets(instance)
    best = optimize(targets, SearchSpace(instance, FILE).solvable).best
    asked = [target for target in targets if target.configuration.num_chunks == 1]
    for target in asked:
        problem, limit_ps = instance.problem(target.configuration), target.time_ps(best.score)
        below_ps = limit_ps - NEAR * (limit_ps + target.offset_ps)
        answer = solve(problem, SECONDS, below_ps)
        # Its own tolerances are wider than a byte.
        assert answer.done and (answer.solution is None or _missing_bytes(problem, answer) > 0), target.configuration
    if best.target.configuration.num_chunks == 1:
        answer = solve(instance.problem(best.target.configuration), SECONDS)
        assert answer.objective_ps == pytest.approx(best.priced.objective_ps, rel=NEAR)
    assert asked


def _missing_bytes(problem: Problem, answer: HighsAnswer) -> int:
    used = price(problem, answer.solution).memory_bytes
    budgets = (problem.device_groups[group].budget_bytes for group in answer.solution.device_groups)
    return max(int(own - budget) for own, budget in zip(used, budgets, strict=True))
