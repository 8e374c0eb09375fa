"""Plans that are given, and the space that they are in or outside of: equal nodes, any widths, several node types."""

import numpy as np
import pytest
from mixed_worlds import mixed_world
from msgspec.structs import replace
from random_requests import FILE, random_solution, random_world
from rest_long import rest_long

from shardwright.types import Plan
from shardwright_search.commands.verify import outside
from shardwright_search.solver.problem import price
from shardwright_search.space.search_space import SearchSpace, space_of


def some_plans(space: SearchSpace, seed: int, count: int) -> list[Plan]:
    """Random plans of random configurations, if any; those with an option that stands for none are left out."""
    rng, instance, plans = np.random.default_rng(seed), space.instance, list[Plan]()
    single = [each.configuration for each in space.listed if each.configuration.num_chunks == 1]
    for number in rng.permutation(len(single))[:count]:
        problem = instance.problem(single[number])
        solution = random_solution(rng, problem)
        if max(price(problem, solution).memory_bytes) < 1 << 50:
            plans.append(instance.plan(single[number], solution))
    return plans


def checked(space: SearchSpace, seed: int) -> int:
    """Return how many plans were compared."""
    plans = some_plans(space, seed, 4)
    for plan in plans:
        assert outside(space, plan) is None
        assert outside(space, replace(plan, name="another")) is None
        assert outside(space, replace(plan, fused=("norm",))) is not None
    return len(plans)


@pytest.mark.parametrize("block", rest_long(1, range(4)))
def test_any_plan_of_a_space_is_known_to_be_in_it(block):
    for seed in range(10 * block, 10 * block + 10):
        assert checked(space_of(*random_world(seed), FILE), seed)


@pytest.mark.parametrize("block", rest_long(1, range(4)))
def test_any_plan_on_several_node_types_is_known_to_be_in_its_space(block):
    """Stages of any width, and some that span types."""
    compared = 0
    for seed in range(5 * block, 5 * block + 5):
        compared += checked(space_of(*mixed_world(seed, spans=seed % 2 == 0), FILE), seed)
    assert compared > 3


def test_what_a_narrower_space_leaves_out_is_outside():
    world = random_world(0, devices=(4,))
    whole = space_of(*world, FILE)
    fields = {"pp_sizes": (1,), "data_parallel": ("ddp",)}
    narrow = space_of(replace(world.request, **fields), *world[1:], FILE)
    reasons = [outside(narrow, plan) for plan in some_plans(whole, 0, 30)]
    assert any(reason is not None and reason.startswith("batch") for reason in reasons)
    assert any(reason is not None and " as tp" in reason for reason in reasons)
