"""Plans of one configuration that are guessed, with little work, before anything is proven."""

from collections.abc import Callable

import numpy as np

from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.targets import Best, C, Solvable, Target

GUESSED = 0.05
"""Relative distance above a configuration's bound within which a plan is guessed, if a plan is already known."""
WIDE = (0.01, 0.02, GUESSED, 0.1, 0.2, 0.5, 1.0, 3.0)
"""Relative distances for loose bounds and many plans, tried after `GUESSED` one after another until a plan is found."""
AT_ONCE = 0.011
"""Share above its bound up to which a configuration is solved at once: labels grow fast with it."""


def guess(target: Target[C], bound: float, solvable: Callable[[C], Solvable]) -> Best[C] | None:
    """Return a guessed plan of a configuration with a known bound, improved until none better is found.

    None: none was found.
    """
    asked = solvable(target.configuration)
    least = max(bound, target.score(asked.lower_ps))
    plan = best_guess(asked, target.time_ps(least * (1 + GUESSED)))
    return None if plan is None else Best(target, plan, target.score(plan.objective_ps))


def best_guess(asked: Solvable, below_ps: float, enough_ps: float = -np.inf) -> PricedSolution | None:
    """Return the best of successive guesses, until none is better or one is good enough."""
    better = best = asked.guess(below_ps)
    # Below a nearer limit other labels are the promising ones.
    while better is not None and better.objective_ps > enough_ps:
        best, better = better, asked.guess(better.objective_ps)
    return better or best
