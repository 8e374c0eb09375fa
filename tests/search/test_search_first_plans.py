"""The order in which plans of one strategy are looked for, for a search that is stopped soon."""

from functools import partial
from itertools import product

import numpy as np
import pytest

from shardwright.types import Schedule
from shardwright_search.first_plans import _moves, descended
from shardwright_search.space.configurations import Configuration

SIZES = (3, 10, 12)


def steps(here):
    """The places of a grid one step away."""
    for axis, size in enumerate(SIZES):
        for step in (1, -1):
            if 0 <= here[axis] + step < size:
                yield (*here[:axis], here[axis] + step, *here[axis + 1 :])


@pytest.fixture
def grid():
    return list(product(*map(range, SIZES)))


def test_whatever_the_bounds_each_is_computed_once_and_the_least_is_found(grid):
    rng, several = np.random.default_rng(0), 0
    for _ in range(50):
        bounds = dict(zip(grid, np.where(rng.random(len(grid)) < 0.3, np.inf, rng.random(len(grid))), strict=True))
        order, asked = [grid[place] for place in rng.permutation(len(grid))], list[tuple[int, ...]]()
        found = list(descended([order[5], *order], steps, partial(_asked, bounds, asked)))
        assert sorted(asked) == grid and asked[0] == order[5]
        scores = [bounds[place] for place, is_lowest in found if not is_lowest]
        assert scores == sorted({*scores}, reverse=True) and scores[-1] == min(bounds.values())
        minima = [place for place, is_lowest in found if is_lowest]
        assert all(bounds[place] <= bounds[other] for place in minima for other in steps(place))
        several += len(minima) > 1
    assert several > 40


def _asked(bounds, asked, place):
    asked.append(place)
    return bounds[place]


def test_a_slope_is_followed_to_its_end_before_anything_else_is_looked_at(grid):
    lowest, asked = (2, 7, 3), list[tuple[int, ...]]()
    bounds = {place: 1.0 + sum((a - b) ** 2 for a, b in zip(place, lowest, strict=True)) for place in grid}
    (first, _), *_, (last, is_lowest) = descended(grid, steps, partial(_asked, bounds, asked))
    assert (first, last, is_lowest) == (grid[0], lowest, True)
    assert len(asked) == len(grid)
    assert asked.index(lowest) < len(grid) / 6


def test_moves_change_one_thing_the_largest_first_and_reach_every_configuration():
    counts = 1, 2, 3, 4, 6, 12
    wholes = [Configuration(12, m, p, Schedule.ONE_F_ONE_B) for m in counts for p in (1, 2, 4, 8)]
    wholes += [Configuration(12, 4, 4, Schedule.INTERLEAVED_1F1B, 2, lacking) for lacking in ((0, 1), (1, 0))]
    moves = _moves(wholes)
    plain = Configuration(12, 4, 4, Schedule.ONE_F_ONE_B)
    assert list(moves(plain)) == [
        *wholes[-2:],
        *(plain._replace(num_microbatches=count) for count in (12, 2)),
        *(plain._replace(pp_size=size) for size in (8, 2)),
        *(plain._replace(num_microbatches=count) for count in (6, 3)),
    ]
    reached = {plain}
    for _ in wholes:
        reached |= {other for whole in reached for other in moves(whole)}
    assert reached == set(wholes)
