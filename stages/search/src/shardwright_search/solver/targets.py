"""Objects that a search compares: configurations that can be solved, their scores, plans and bounds."""

from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

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
    """Plans of a score within the asked share of the best, the best first."""
    bound: float
    """No plan of any configuration has a lower score."""
    bounds: tuple[tuple[float, Target[C]], ...]
    """Every configuration that a plan may fit in, with what is known of its least score, the least first."""
    looked_at: int
    solved: int
    stopped: bool
