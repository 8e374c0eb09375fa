"""The mean time of a step on nodes that may be taken away, with a checkpoint after every k steps.

Interruptions are a Poisson process of the nodes' rate L, each node's added up; whatever was done since the last
checkpoint is lost, and the run goes on `restart_s` later unless it is interrupted again meanwhile. Work of length w
(k steps and the checkpoint) then takes on average exp(L restart_s) (exp(L w) - 1) / L (Daly 2006, A higher order
estimate of the optimum checkpoint interval for restart dumps, equation 13). Over k steps that falls and then rises: its
derivative by k has the sign of L k T exp(L w) - exp(L w) + 1, which only rises with k (Young's 1974 sqrt(2 checkpoint_s
/ L) is its first approximation).
"""

from math import exp, expm1, inf, nextafter
from typing import NamedTuple

_HOUR_S = 3600.0
_MAX_EXPONENT = 700.0
_MAX_STEPS = 2**53


class Expected(NamedTuple):
    """The mean time of one step, with its share of checkpoints, lost work and restarts."""

    step_s: float
    """Infinity: interruptions come so often that none is ever done."""
    checkpoint_steps: int | None
    """The best number of steps between checkpoints; None: nothing is ever interrupted."""


class Interruptions(NamedTuple):
    """The rate at which nodes are interrupted, all together, and what that costs."""

    per_hour: float
    checkpoint_s: float
    restart_s: float

    def step_s(self, step_s: float, steps: int) -> float:
        """Return the mean time of a step that takes so long by itself, with a checkpoint after so many."""
        rate = self.per_hour / _HOUR_S
        work = rate * (steps * step_s + self.checkpoint_s)
        if work + rate * self.restart_s > _MAX_EXPONENT:
            return inf
        return exp(rate * self.restart_s) * expm1(work) / (rate * steps)

    def expected(self, step_s: float) -> Expected:
        """Return the mean time with the best number of steps between checkpoints."""
        if self.per_hour == 0:
            return Expected(step_s, None)
        low, high = 1, 2
        while self._improves_after(step_s, high) and high < _MAX_STEPS:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._improves_after(step_s, middle) else (low, middle)
        steps = min((low, high), key=lambda number: (self.step_s(step_s, number), number))
        return Expected(self.step_s(step_s, steps), steps)

    def longest_within(self, expected_s: float) -> float:
        """Return the least time of a step that takes no less than so long on average: shorter ones take less."""
        if self.per_hour == 0 or expected_s == inf:
            return expected_s
        low, high = 0.0, expected_s  # interruptions only add
        while (middle := (low + high) / 2) not in (low, high):
            low, high = (middle, high) if self.expected(middle).step_s < expected_s else (low, middle)
        return nextafter(high, inf)

    def _improves_after(self, step_s: float, steps: int) -> bool:
        """Return whether more steps between checkpoints than so many would be better, if they need not be whole."""
        rate = self.per_hour / _HOUR_S
        done, work = rate * steps * step_s, rate * (steps * step_s + self.checkpoint_s)
        # With exp(-work) on both sides: done - 1 + exp(-work) < 0.
        return done + expm1(-work) < 0
