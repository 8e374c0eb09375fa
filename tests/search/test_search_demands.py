"""What a system demands of plans: the best plan that meets it is the best of those of the whole space that do."""

from pathlib import Path

import pytest
from random_requests import random_world
from rest_long import rest_long

from shardwright_search.search import SearchAnswer, find_best
from shardwright_search.solver.problem import Problem
from shardwright_search.space.configurations import Demands, Outer
from shardwright_search.space.search_space import NothingListed

FILE = Path("search.json")


# World 1 has 13,000 configurations.
@pytest.mark.parametrize("seed", rest_long(2, (0, 2, 3, 1, *range(4, 12))))
def test_what_is_demanded_holds_and_no_plan_without_it_is_slower(seed):
    request, *given = random_world(seed)
    free = find_best(request, *given, FILE, lambda _: None)
    try:
        bound = find_best(
            request, *given, FILE, lambda _: None, demands=Demands(outer=Outer.ALIKE, block_in_each_stage=True)
        )
    except NothingListed:
        return
    if not isinstance(bound, SearchAnswer):
        return
    assert isinstance(free, SearchAnswer)
    assert bound.chosen.plan.embedding == bound.chosen.plan.head
    assert all(low < high for stage in bound.chosen.plan.stages for low, high in stage.layers)
    samples = free.chosen.plan.global_batch_size, bound.chosen.plan.global_batch_size
    assert free.bound_s / samples[0] <= bound.optimum_s / samples[1] * (1 + 1e-9)


def test_a_stage_without_a_block_is_no_cut_where_each_needs_one():
    """Of embedding, three blocks and head, in three stages."""
    ends = [(1, 4), (2, 3), (2, 4), (3, 4), (2, 2)]
    for needed, cuts in ((False, [True, True, True, True, False]), (True, [False, True, False, False, False])):
        problem = Problem((0, 1, 1, 1, 2), (), (), {}, (1, 1, 1), 1, None, None, None, block_in_each_stage=needed)
        assert [problem.can_cut(each) for each in ends] == cuts
