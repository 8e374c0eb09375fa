"""Plans of one configuration that are guessed, with little work, before anything is proven."""

from collections.abc import Callable

import numpy as np

from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.targets import Best, C, Solvable, Target

GUESSED = 0.05
"""Share above its bound up to which a plan of a configuration is guessed where some plan is known."""


def guess(target: Target[C], bound: float, solvable: Callable[[C], Solvable]) -> Best[C] | None:
    """Return a plan of a configuration with a known bound, guessed until none is better; None: none was found."""
    asked = solvable(target.configuration)
    least = max(bound, target.score(asked.lower_ps))
    plan = best_guess(asked, target.time_ps(least * (1 + GUESSED)))
    return None if plan is None else Best(target, plan, target.score(plan.objective_ps))


def best_guess(asked: Solvable, below_ps: float, enough_ps: float = -np.inf) -> PricedSolution | None:
    """Return the best of guesses that are made until none is better, or one is good enough."""
    better = best = asked.guess(below_ps)
    # Below a nearer limit other labels are the promising ones.
    while better is not None and better.objective_ps > enough_ps:
        best, better = better, asked.guess(better.objective_ps)
    return better or best
