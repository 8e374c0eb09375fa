"""Objects that a search compares: configurations that can be solved, their scores, plans, guesses and bounds."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from shardwright_search.solver.partition import PricedSolution


class Solvable(Protocol):
    """A configuration that can be bounded, and solved below a limit."""

    @property
    def relaxed_bound_ps(self) -> float:
        """Return a lower bound on the step time T that is quick to compute."""

    @property
    def lower_ps(self) -> float:
        """Return a lower bound on the step time T."""

    def guess(self, below_ps: float) -> PricedSolution | None:
        """Return a good plan with T < below_ps, found with little work; None: none was found."""

    def solve_below(self, below_ps: float, most: int, tick: Callable[[int], None]) -> tuple[PricedSolution, ...]:
        """Return plans with T < below_ps, the best one first and up to `most`, as `Pipeline.solve_below` does."""


C = TypeVar("C")


class Target(NamedTuple, Generic[C]):
    """A configuration and how its T becomes the number that configurations are compared by: (T + offset_ps) * scale."""

    configuration: C
    offset_ps: float
    scale: float

    def score(self, time_ps: float) -> float:
        """Return the score, which is minimized."""
        return (time_ps + self.offset_ps) * self.scale

    def time_ps(self, score: float) -> float:
        """Return the T of a score."""
        return score / self.scale - self.offset_ps


class Best(NamedTuple, Generic[C]):
    """A plan of a configuration, and its score."""

    target: Target[C]
    priced: PricedSolution
    score: float


class Optimum(NamedTuple, Generic[C]):
    """The result of a search: the best plan, plans near it, and bounds."""

    best: Best[C] | None
    near: tuple[Best[C], ...]
    """Plans whose score is within the requested share of the best score, the best first."""
    bound: float
    """No plan of any configuration has a lower score."""
    bounds: tuple[tuple[float, Target[C]], ...]
    """Every configuration that a plan may fit in, with a lower bound of its least score, the least first."""
    looked_at: int
    solved: int
    stopped: bool


# Guesses: plans of one configuration that are found with little work, before anything is proven.


GUESSED = 0.05
"""Relative distance above a configuration's bound within which a plan is guessed, if a plan is already known."""
WIDE = (0.01, 0.02, GUESSED, 0.1, 0.2, 0.5, 1.0, 3.0)
"""Such distances that are tried one after another until a plan is found, if bounds are loose or no plan is known."""
AT_ONCE = 0.011
"""Share above a configuration's bound up to which it is solved at once: the number of labels grows fast with it."""


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
    # Below a lower limit other labels are the promising ones.
    while better is not None and better.objective_ps > enough_ps:
        best, better = better, asked.guess(better.objective_ps)
    return better or best
