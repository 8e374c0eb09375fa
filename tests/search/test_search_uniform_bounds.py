"""One strategy for all layers: bounds of all at once, the best plan of all, and what a stopped search has of it."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from random_requests import random_world
from rest_long import rest_long
from uniform_problems import mistakes

from shardwright_search import search
from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.solver.targets import Optimum
from shardwright_search.space import uniform_bounds

FILE = Path("s.json")


@pytest.mark.parametrize("block", rest_long(1, range(8)))
def test_the_best_plan_of_one_strategy_is_that_of_all_and_none_is_below_its_bound(block):
    assert mistakes(range(9 * block, 9 * (block + 1))) == {}


@pytest.mark.parametrize("function", ["_sends_ps", "_some_stage_holds", "_most_layers", "_reached"])
def test_a_bound_that_counts_too_much_is_caught(monkeypatch, function):
    right = getattr(uniform_bounds, function)
    mistaken = {
        "_most_layers": lambda *given: right(*given) - 1,
        "_reached": lambda *given: right(*given) - 1,
        "_some_stage_holds": lambda most, layers: np.minimum(right(most, layers) + 1, layers),
    }
    monkeypatch.setattr(uniform_bounds, function, mistaken.get(function, lambda *given: 2 * right(*given) + 1))
    assert any(mistakes(range(seed, seed + 1)) for seed in range(40))


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_search_that_is_stopped_at_once_has_the_best_plan_of_one_strategy(monkeypatch, seed):
    request, *given = random_world(seed)
    request = replace(request, fine_grained=True, megatron_gather_buffer=False)
    best = find_best(replace(request, fine_grained=False), *given, FILE, lambda _: None)
    monkeypatch.setattr(search, "_optimum", lambda *_: Optimum(None, (), 0.0, (), 0, 0, True))
    stopped = find_best(request, *given, FILE, lambda _: None)
    assert isinstance(best, SearchAnswer) and isinstance(stopped, SearchAnswer)
    assert stopped.stopped and stopped.bound_s == 0.0
    assert np.isclose(stopped.optimum_s, best.optimum_s, rtol=0.02)
    assert stopped.best.target.configuration.layers is not None
