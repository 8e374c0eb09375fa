"""The shuffled order is a permutation of each epoch, computed place by place."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_train.data.sampling import samples_at


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_has_every_sample_once(size: int, seed: int, epoch: int) -> None:
    order = samples_at(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    assert sorted(order.tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 300), st.lists(st.integers(0, 3000), min_size=1, max_size=20))
def test_a_place_is_the_same_however_it_is_asked_for(size: int, places: list[int]) -> None:
    together = samples_at(np.array(places), size, seed=5)
    assert together.tolist() == [int(samples_at(np.array([place]), size, seed=5)[0]) for place in places]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(samples_at(np.arange(e * 50, (e + 1) * 50), 50, seed)) for seed in range(40) for e in range(5)}
    assert len(orders) == 200


@pytest.mark.parametrize("size", [5, 16, 100])
def test_every_sample_comes_equally_often_at_every_place(size: int) -> None:
    seeds = 3000
    orders = np.stack([samples_at(np.arange(size), size, seed) for seed in range(seeds)])
    counts = np.stack([np.bincount(orders[:, place], minlength=size) for place in range(size)])
    expected = seeds / size
    # Of (size - 1)^2 degrees of freedom: five standard deviations.
    freedom = (size - 1) ** 2
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_do_not_stay_neighbours() -> None:
    size = 1000
    steps = np.concatenate([np.diff(samples_at(np.arange(size), size, seed)) % size for seed in range(50)])
    counts = np.bincount(steps, minlength=size)[1:]
    expected = len(steps) / (size - 1)
    assert abs(((counts - expected) ** 2 / expected).sum() - size) < 5 * np.sqrt(2 * size)


def test_a_million_million_samples_take_no_more_memory_than_those_that_are_asked_for() -> None:
    tracemalloc.start()
    samples_at(np.arange(100), 10**12 + 39, seed=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
