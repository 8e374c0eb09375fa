"""Labels of stages that the parts of a configuration share are found once, and give the answers that new ones give."""

from collections.abc import Callable, Sequence
from functools import cache
from math import inf

import pytest
from brute_force import pipeline_of
from communicating_worlds import SPLIT, budgets_of_world, communicating_world, with_memory
from random_problems import best_of, random_mixed, random_problem, random_unequal
from random_requests import FILE, World

from shardwright_search import search
from shardwright_search.solver import known_labels
from shardwright_search.solver.configuration_bounds import TargetRun
from shardwright_search.solver.known_labels import KnownLabels
from shardwright_search.solver.partition import Pipeline
from shardwright_search.solver.problem import Problem
from shardwright_search.solver.quick_bounds import Relaxed
from shardwright_search.solver.stage_labels import RunLabels, StageLabels
from shardwright_search.solver.stage_options import GroupCosts
from shardwright_search.solver.targets import Optimum
from shardwright_search.space.configurations import Configuration
from shardwright_search.space.search_space import space_of


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    """The worlds within several budgets each."""
    found = [world for world in map(communicating_world, SPLIT) if world is not None]
    return [
        with_memory(world, budget + world.profiles.process_bytes)
        for world in found
        for budget in budgets_of_world(world, 4)
    ]


def _optimum(world: World) -> Optimum[Configuration]:
    return search._optimum(space_of(*world, FILE), None, lambda line: None)


def _answers(worlds: list[World]) -> list[tuple[float, list[float]]]:
    """The bound and the scores of the plans near the best one of each world."""
    optima = map(_optimum, worlds)
    return [(optimum.bound, [best.score for best in optimum.near]) for optimum in optima]


def _found_anew(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(KnownLabels, "reaching", lambda self, kind, stage, targets: stage.reaching(targets))


def test_answers_are_those_of_labels_found_anew(worlds: list[World], monkeypatch: pytest.MonkeyPatch) -> None:
    known = _answers(worlds)
    _found_anew(monkeypatch)
    assert known == _answers(worlds)


@pytest.mark.parametrize("made", [random_problem, random_mixed, random_unequal])
def test_a_lower_limit_needs_no_new_labels_and_a_higher_one_does(
    made: Callable[[int], Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, reaching = list[StageLabels](), StageLabels.reaching

    def noted(self: StageLabels, targets: Sequence[TargetRun]) -> dict[int, RunLabels]:
        found.append(self)
        return reaching(self, targets)

    monkeypatch.setattr(StageLabels, "reaching", noted)
    higher = 0
    for seed in range(20):
        problem = made(seed)
        known, best = pipeline_of(problem), best_of(problem)
        if best < inf:
            for limit, first in ((1.1 * best, True), (1.01 * best, False), (0.99 * best, False), (1.5 * best, True)):
                found.clear()
                plans = known.solve_below(limit, 8, lambda made: None)
                assert first or not found
                higher += first and len(found)
                anew = Pipeline(problem, cache(GroupCosts), Relaxed())
                assert plans == anew.solve_below(limit, 8, lambda made: None)
    assert higher > 20


def test_labels_that_are_taken_above_what_they_stayed_below_are_caught(
    worlds: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = _answers(worlds)
    monkeypatch.setattr(known_labels, "le", lambda cap, known: True)
    assert _answers(worlds) != right
