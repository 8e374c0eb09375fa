"""Plans of one configuration that are guessed, with little work, before anything is proven."""

from collections.abc import Callable

import numpy as np

from shardwright_search.solver.partition import PricedSolution
from shardwright_search.solver.targets import Best, C, Solvable, Target

GUESSED = 0.05
"""Share above its bound up to which a plan of a configuration is guessed where some plan is known."""
WIDE = (0.01, 0.02, GUESSED, 0.1, 0.2, 0.5, 1.0, 3.0)
"""Shares where bounds may be loose and plans are many, and past `GUESSED` where no plan is known yet: one
after another, until a plan is found."""
AT_ONCE = 0.011
"""Share above its bound up to which a configuration is solved at once: labels grow fast with it."""
_MAX_ROOMS = 8
"""Times that a guess is made again with more room."""


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


def guess_with_room(
    best: Best[C], limit: float, solvable: Callable[[C], Solvable], with_room: Callable[[Best[C]], C | None]
) -> Best[C] | None:
    """Return a guess of a part of a configuration, with room for what the guess of the whole needs beside.

    `with_room`: the part with the room that a plan needs; None where it has that. None: no such plan was found.
    """
    for _ in range(_MAX_ROOMS):
        if (part := with_room(best)) is None:
            return best
        target, asked = best.target._replace(configuration=part), solvable(part)
        limits = (target.time_ps(min(limit, best.score * (1 + above))) for above in WIDE)
        plans = filter(None, (best_guess(asked, below_ps) for below_ps in limits))
        if (plan := next(plans, None)) is None:
            return None
        best = Best(target, plan, target.score(plan.objective_ps))
    return None
