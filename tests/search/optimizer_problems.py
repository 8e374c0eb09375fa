"""Problems of tiny hostile worlds that are trained with Muon, which sends matrices to ranks that compute with them."""

from functools import lru_cache

import numpy as np
from msgspec.structs import replace
from random_problems import with_tight_budgets
from simulated_optimum import hostile_world

from shardwright_search.solver.problem import Problem


@lru_cache(maxsize=2_000)
def random_with_muon(seed: int) -> Problem:
    """One of the cases of a world, whose budget few or many of its plans fit in."""
    world, rng = hostile_world(seed), np.random.default_rng([seed, 2])
    instance = world._replace(request=replace(world.request, optimizer="muon")).instance
    targets = world.targets(instance)
    return with_tight_budgets(rng, instance.problem(targets[rng.integers(len(targets))].configuration))
