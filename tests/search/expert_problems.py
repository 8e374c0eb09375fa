"""Tiny random problems of the solver whose layers have experts beside the rest, as two parts that add up."""

from functools import lru_cache

import numpy as np
from msgspec.structs import replace
from random_problems import random_problem, with_tight_budgets

from shardwright_search.solver.problem import Options, Problem


@lru_cache(maxsize=2_000)
def random_with_experts(seed: int) -> Problem:
    """Such a problem whose blocks each have, in each of 2 or 3 ways, experts beside the rest, which add up to it."""
    problem, rng = random_problem(seed), np.random.default_rng([seed, 1])
    groups = []
    for group in problem.device_groups:
        blocks = (_beside_experts(rng, rest) if kind in (1, 2) else rest for kind, rest in enumerate(group.options))
        groups.append(replace(group, options=tuple(blocks)))
    return with_tight_budgets(rng, replace(problem, device_groups=tuple(groups)))


def _beside_experts(rng: np.random.Generator, rest: Options) -> Options:
    ways = int(rng.integers(2, 4))
    most = 1 + max(int(column.max()) for column in rest[:7])
    experts = [rng.integers(0, most, ways).astype(float) for _ in range(7)]
    experts[4] *= rest.sum_bytes.max() > 0
    numbers = [np.add.outer(a, b).ravel() for a, b in zip(rest[:6], experts[:6], strict=True)]
    workspace = np.maximum.outer(rest.workspace_bytes, experts[6]).ravel()
    return Options(
        *numbers,
        workspace,
        *np.zeros((2, len(workspace))),
        *(np.repeat(layout, ways) for layout in (rest.input_layout, rest.output_layout)),
    )
