"""Guesses decide which limits a configuration is solved below, and never what is found."""

from collections.abc import Callable

import numpy as np
import pytest
from brute_force import mistakes, pipeline_of, solved
from random_problems import random_mixed, random_problem
from rest_long import rest_long

from shardwright_search.solver import partition
from shardwright_search.solver.branch_and_bound import optimize
from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.problem import Solution, price
from shardwright_search.solver.targets import Target

PLANS = (100.45, 100.49, 100.6, 103.0)
NEAREST_LIMIT = 100.0 * 1.001 * 1.0015 * 1.0025
"""The narrowest that holds the best of them."""


class Made:
    """A configuration with these plans and a lower bound of 100, which guesses what it is told to."""

    relaxed_bound_ps = lower_ps = 100.0

    def __init__(self, guesses: tuple[float, ...], labels: int = 0, plans: tuple[float, ...] = PLANS) -> None:
        self.guesses, self.labels, self.plans, self.limits = guesses, labels, plans, list[float]()

    def guess(self, below_ps: float) -> PricedSolution | None:
        return next((_found(plan) for plan in self.guesses if plan < below_ps), None)

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[PricedSolution, ...]:
        self.limits.append(below_ps)
        tick(self.labels)
        return tuple(_found(plan) for plan in self.plans if plan < below_ps)[:most]


def _found(time_ps: float) -> PricedSolution:
    return PricedSolution(time_ps, Solution((), (), ()))


@pytest.mark.parametrize(
    ("guesses", "tries"),
    [
        pytest.param((100.45,), 1, id="the best plan: at once below the limit that holds it"),
        pytest.param((103.0, 100.6, 100.45), 1, id="bettered below nearer limits"),
        pytest.param((100.6,), 1, id="a limit too wide: what is found is cut back"),
        pytest.param((103.0,), 3, id="far away: one limit after another"),
        pytest.param((), 3, id="none"),
    ],
)
def test_what_is_found_does_not_depend_on_the_guess(guesses, tries):
    made = Made(guesses)
    optimum = optimize([Target(0, 0.0, 1.0)], lambda _: made, near=0.0015, most=8)
    assert optimum.best is not None and optimum.best.score == optimum.bound == 100.45
    assert [best.score for best in optimum.near] == [100.45, 100.49, 100.6]
    assert len(made.limits) == tries + 1, "once more up to where plans are near"
    assert max(made.limits) < 100.0 * 1.0111


def test_plans_past_the_limit_of_the_best_are_left_out_where_they_are_much_work():
    made = Made((100.45,), labels=10**6)
    optimum = optimize([Target(0, 0.0, 1.0)], lambda _: made, near=0.0015, most=8)
    assert [best.score for best in optimum.near] == [100.45, 100.49] and len(made.limits) == 2
    assert not optimum.stopped


def test_a_configuration_without_a_plan_below_a_near_incumbent_is_ruled_out_at_once():
    worse = Made(())
    worse.solve_below = lambda below_ps, most, tick: worse.limits.append(below_ps) or ()
    found = {0: Made((100.45,)), 1: worse}
    optimum = optimize([Target(n, 0.0, 1.0) for n in found], found.__getitem__)
    assert optimum.best is not None and optimum.best.score == optimum.bound == 100.45
    assert worse.limits[0] == 100.45
    assert found[0].limits == [pytest.approx(NEAREST_LIMIT)] and np.isfinite(optimum.bound)


@pytest.mark.parametrize(("guesses", "answer"), [((103.0, 100.6), 100.6), ((180.0,), 180.0), ((), None)])
def test_a_search_that_is_stopped_answers_what_it_has_guessed(guesses, answer):
    optimum = optimize([Target(0, 0.0, 1.0)], lambda _: Made(guesses, labels=2), max_labels=1)
    assert optimum.stopped and [best.score for best in optimum.near] == ([] if answer is None else [answer])
    assert (None if optimum.best is None else optimum.best.score) == answer and optimum.bound == 100.0


def test_a_guess_that_is_better_than_the_plans_so_far_comes_before_them():
    known, guessed = Made((), plans=(101.0,)), Made((100.95,), labels=2)
    guessed.relaxed_bound_ps = guessed.lower_ps = 100.8
    found, heard = {0: known, 1: guessed}, list[float]()
    targets = [Target(n, 0.0, 1.0) for n in found]
    optimum = optimize(targets, found.__getitem__, report=lambda *said: heard.append(said[0]), max_labels=1)
    assert optimum.stopped and [best.score for best in optimum.near] == [100.95, 101.0]
    assert optimum.best is optimum.near[0] and (heard[0], heard[-1]) == (np.inf, 101.0)


def test_what_waits_is_bounded_before_a_search_that_is_stopped_says_its_bound():
    solved_first, waiting = Made((), labels=2), Made((), plans=())
    waiting.relaxed_bound_ps, waiting.lower_ps = 50.0, 99.0
    found = {0: solved_first, 1: waiting}
    targets = [Target(number, 0.0, 1.0) for number in found]
    optimum = optimize(targets, found.__getitem__, max_labels=1, waits=lambda number: number == 1)
    assert optimum.stopped and optimum.bound == 99.0 and not waiting.limits


@pytest.mark.parametrize("count", rest_long(1, (20, 40)))
@pytest.mark.parametrize("made", [random_problem, random_mixed])
def test_runs_that_are_paired_one_by_one_give_the_same_plans(monkeypatch, made, count):
    problems = [made(seed) for seed in range(count)]
    together = [solved(problem) for problem in problems]
    monkeypatch.setattr(partition, "_TOGETHER", 1)
    for problem, answer in zip(problems, together, strict=True):
        one_by_one = solved(problem)
        assert [best.priced for best in one_by_one.near] == [best.priced for best in answer.near]
        assert one_by_one.bound == answer.bound


@pytest.mark.parametrize("count", rest_long(1, (20, 60)))
@pytest.mark.parametrize("made", [random_problem, random_mixed])
def test_a_guess_of_few_labels_is_a_plan_and_the_best_is_found_all_the_same(monkeypatch, made, count):
    whole = [pipeline_of(made(seed)).guess(np.inf) for seed in range(60)]
    monkeypatch.setattr(partition, "_FEW_IN_ALL", 1)
    missed = 0
    for seed, best in enumerate(whole):
        found = pipeline_of(made(seed)).guess(np.inf)
        assert (
            found is None or found.objective_ps == price(made(seed), found.solution).objective_ps >= best.objective_ps
        )
        missed += best is not None and (found is None or found.objective_ps > best.objective_ps)
    assert missed > 5
    assert mistakes(range(count), made) == {}
