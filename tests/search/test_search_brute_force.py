"""The solver against every plan of tiny random cases, counted with formulas written a second time.

`make brute-force` does the same for 10,000 problems of each kind.
"""

import interleaved_problems
import numpy as np
import pytest
from brute_force import mistakes, pipeline_of, solved
from expert_problems import random_with_experts
from interrupts import interrupted_after
from optimizer_problems import random_with_muon
from random_problems import best_of, every_plan, random_problem, with_budgets
from rest_long import rest_long

from shardwright_search.solver import branch_and_bound as optimize
from shardwright_search.solver import stage_labels as labels_of
from shardwright_search.solver.interleaved import Interleaved
from shardwright_search.solver.min_memory import min_memory
from shardwright_search.solver.problem import Problem, price
from shardwright_search.solver.targets import Target

BLOCK = 100


@pytest.mark.parametrize("block", rest_long(1, range(4)))
def test_solver_equals_brute_force_on_every_tiny_case(block):
    assert mistakes(range(BLOCK * block, BLOCK * (block + 1))) == {}


@pytest.mark.parametrize("block", rest_long(1, range(8)))
def test_experts_beside_the_rest_of_a_layer_leave_the_solver_exact(block):
    size = BLOCK // 5
    assert mistakes(range(size * block, size * (block + 1)), random_with_experts) == {}


@pytest.mark.parametrize("block", rest_long(1, range(4)))
def test_plans_with_muon_leave_the_solver_exact(block):
    size = BLOCK // 5
    assert mistakes(range(size * block, size * (block + 1)), random_with_muon) == {}


@pytest.mark.parametrize("sizes", [(4, 2, 3, 36), (5, 2, 3, 36), (5, 2, 5, 62), (6, 2, 7, 85)])
def test_a_middle_stage_of_an_interleaved_plan_that_holds_the_most_has_to_fit(sizes):
    """In a step of few microbatches a later stage has as many in flight as the second, and less of them is freed."""
    problem = interleaved_problems.bare_interleaved(*sizes)
    (plan,) = interleaved_problems.every_interleaved(problem)
    for budget_bytes in (plan.memory_bytes, plan.memory_bytes - 1):
        assert interleaved_problems.mistake(interleaved_problems.with_budget(problem, budget_bytes)) is None


@pytest.mark.parametrize("block", rest_long(1, range(8)))
def test_interleaved_solver_equals_brute_force_of_its_space(block):
    half = BLOCK // 2
    assert interleaved_problems.mistakes(range(half * block, half * (block + 1))) == {}


def test_labels_compared_across_layouts_leave_the_solver_exact(monkeypatch):
    """Tiny cases have few labels: too few to be compared without this."""
    monkeypatch.setattr(labels_of, "_FEW", 1)
    assert mistakes(range(5000, 5100)) == {}


@pytest.mark.parametrize("seeds", rest_long(1, (range(50), range(50, 150))))
def test_price_equals_the_enumeration(seeds):
    rng = np.random.default_rng(0)
    for seed in seeds:
        problem = random_problem(seed)
        for found in every_plan(problem):
            plan = int(rng.integers(len(found.times)))
            priced = price(problem, found.solution(plan))
            assert priced.objective_ps == found.times[plan], seed
            assert priced.memory_bytes == tuple(found.memory[:, plan]), seed


def least_lack(problem: Problem) -> int:
    """What the plan that lacks the least lacks in its scarcest stage."""
    lacks = (
        found.memory - np.array([[problem.device_groups[group].budget_bytes] for group in found.device_groups])
        for found in every_plan(problem)
    )
    return int(min(lack.max(0).min() for lack in lacks))


@pytest.mark.parametrize("seeds", rest_long(1, (range(80), range(80, 250))))
def test_least_memory_is_exact(seeds):
    for seed in seeds:
        problem = random_problem(seed)
        need = min_memory(problem)
        assert need.missing_bytes == least_lack(problem), seed
        budgets = {group.budget_bytes for group in problem.device_groups}
        assert need.memory_bytes - need.missing_bytes in budgets and 0 <= need.stage < problem.pp_size


@pytest.mark.parametrize("seeds", rest_long(1, (range(20), range(20, 60))))
def test_less_than_the_least_memory_has_no_plan(seeds):
    for seed in seeds:
        problem = random_problem(seed)
        missing = min_memory(problem).missing_bytes
        for more, fits in ((missing, True), (missing - 1, False)):
            given = with_budgets(problem, [group.budget_bytes + more for group in problem.device_groups])
            assert (solved(given).best is not None) == fits, seed


def test_a_search_that_is_stopped_knows_a_true_bound():
    """Five cases that are nearly equally good, interrupted behind any call within the search or to what it calls."""
    parts = ("run", "find_all", "tick", "_relax", "_end_wait", "_step", "_solve", "_guess", "_widen")
    told, methods = 0, [getattr(optimize.Search, name) for name in parts]
    for first in range(0, 60, 15):
        problems = [random_problem(seed) for seed in range(first, first + 5)]
        times = [best_of(problem) for problem in problems]
        targets = [Target(i, 0.0, (1 + i / 100) / time) for i, time in enumerate(times) if np.isfinite(time)]
        best = min(target.score(times[target.configuration]) for target in targets)
        for calls in (*range(0, 240, 24), 400, 800):
            solvable = [pipeline_of(problem) for problem in problems].__getitem__
            with interrupted_after(calls, methods):
                answer = optimize.optimize(targets, solvable, 0.01, 8, deadline=np.inf)
            assert answer.bound <= best, (first, calls)
            known = {target: bound for bound, target in answer.bounds}
            for target in targets[: answer.looked_at]:
                assert known[target] <= target.score(times[target.configuration]) * (1 + 1e-12), (first, calls)
            if answer.best is not None:
                assert answer.best.score >= best, (first, calls)
                told += answer.stopped and 0 < answer.bound
    assert told > 5, "stopped with a plan and a bound"


def test_a_search_stopped_among_interleaved_plans_has_the_best_of_all_others(monkeypatch):
    """Interrupted at the first solution of an interleaved problem, whatever the order of the bounds."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def is_interleaved(asked):
        return isinstance(asked, Interleaved)

    told = 0
    monkeypatch.setattr(Interleaved, "_levels", interrupted)
    for seed in range(0, 60, 2):
        plain, other = pipeline_of(random_problem(seed)), Interleaved(interleaved_problems.random_interleaved(seed))
        best, targets = best_of(random_problem(seed)), [Target(other, 0.0, 1.0), Target(plain, 0.0, 1.0)]
        answer = optimize.optimize(targets, lambda asked: asked, deadline=np.inf, waits=is_interleaved)
        assert (np.inf if answer.best is None else answer.best.score) == best, seed
        if np.isfinite(best) and other.lower_ps < best:
            assert answer.stopped and answer.bound <= other.lower_ps, seed
            told += 1
    assert told > 5


@pytest.mark.parametrize("labels", [0, np.inf])
def test_a_search_that_may_leave_a_gap_leaves_no_larger_one_and_knows_how_large(monkeypatch, labels):
    """Five nearly equal cases, also where nothing is looked for near the best plan."""
    monkeypatch.setattr(optimize, "_MAX_NEAR_LABELS", labels)
    gap, gaps = 0.01, []
    for first in range(0, 60, 5):
        problems = [random_problem(seed) for seed in range(first, first + 5)]
        times = [best_of(problem) for problem in problems]
        targets = [Target(i, 0.0, (1 + i / 500) / time) for i, time in enumerate(times) if np.isfinite(time)]
        if not targets:
            continue
        best = min(target.score(times[target.configuration]) for target in targets)
        solvable = [pipeline_of(problem) for problem in problems].__getitem__
        answer = optimize.optimize(targets[::-1], solvable, 0.02, 8, gap=gap)
        found = answer.best.score
        assert not answer.stopped and answer.bound <= best <= found <= answer.bound * (1 + gap) * (1 + 1e-12)
        assert answer.near[0] == answer.best and answer.bounds[0][0] == answer.bound
        gaps.append(found / answer.bound - 1)
    assert (max(gaps) > 0) == (labels == 0)


def test_a_search_stopped_before_it_began_bounds_nothing():
    answer = solved(random_problem(0), deadline=-1.0)
    assert (answer.best, answer.bound, answer.stopped) == (None, 0.0, True)


@pytest.mark.parametrize(("count", "at_least"), rest_long(1, ((150, 4), (400, 16))))
def test_plans_near_the_best_are_within_a_hundredth_and_differ(count, at_least):
    several = 0
    for seed in range(count):
        near = solved(random_problem(seed)).near
        solutions = [one.priced.solution for one in near]
        assert len(set(solutions)) == len(solutions), seed
        assert all(one.score <= near[0].score * 1.01 for one in near), seed
        assert [one.score for one in near] == sorted(one.score for one in near), seed
        several += len(near) > 1
    assert several >= at_least
