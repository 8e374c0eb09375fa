"""Filters of labels against a comparison of each row with each other."""

from unittest.mock import Mock

import numpy as np
import pytest
from brute_force import mistakes, solved
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem
from rest_long import rest_long

from shardwright_search.solver import stage_labels
from shardwright_search.step import pareto

SHAPES = st.tuples(*(st.integers(0, 40),) * 2, st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32 - 1))


@pytest.fixture(params=[0, pareto._SWEPT], ids=["swept", "compared"])
def pairs_swept(request, monkeypatch):
    monkeypatch.setattr(pareto, "_SWEPT", request.param)


@pytest.mark.usefixtures("pairs_swept")
def test_rows_are_beaten_by_those_of_their_key_that_are_no_larger():
    @settings(max_examples=300, deadline=None)
    @given(SHAPES)
    def holds(shape):
        first, second, columns, largest, seed = shape
        rng = np.random.default_rng(seed)
        front, block = (rng.integers(0, largest, (rows, columns)).astype(float) for rows in (first, second))
        keys = rng.integers(0, 3, first), rng.integers(0, 3, second)
        no_worse = [[bool((one <= other).all()) for one in front] for other in block]
        assert pareto.beaten(front, block).tolist() == list(map(any, no_worse))
        alike = [
            any(found and key == own for found, key in zip(row, keys[0], strict=True))
            for row, own in zip(no_worse, keys[1], strict=True)
        ]
        assert pareto.beaten_alike(front, block, keys).tolist() == alike

    holds()


@pytest.mark.parametrize("count", rest_long(1, (20, 100)))
def test_labels_that_are_swept_give_the_same_plans(monkeypatch, count):
    monkeypatch.setattr(stage_labels, "_FEW", 0)
    compared = [solved(random_problem(seed)) for seed in range(2 * count)]
    monkeypatch.setattr(pareto, "_SWEPT", 0)
    sweep = Mock(wraps=pareto._beaten_of_three)
    monkeypatch.setattr(pareto, "_beaten_of_three", sweep)
    for seed, answer in enumerate(compared):
        swept = solved(random_problem(seed))
        assert [best.priced for best in swept.near] == [best.priced for best in answer.near]
        assert swept.bound == answer.bound
    assert sweep.call_count > count // 2
    assert mistakes(range(count), random_problem) == {}
