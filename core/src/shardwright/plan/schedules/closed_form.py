"""The closed form of a step's time, which the search minimises: coefficients that all bounds and labels read.

A_i is the forward and backward pass of one microbatch in pipeline stage i, all its chunks and the sends at their ends;
C_i is the part of A_i that fills and drains the pipeline: the sends, and each pass times its `fill`. It equals A_i
unless some passes hide others, as weight gradients do in zero-bubble schedules (Qi et al. 2024).
U_i is what follows the stage's last backward pass, the exposed gradient sync and the optimizer.
"""

from collections.abc import Sequence
from operator import floordiv, mod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Times = TypeVar("Times", int, float, NDArray[np.float64])


class ClosedForm(NamedTuple):
    """Whole coefficients of a step's time: T = (fill sum C + steady max A + once max U + hidden max(A - C)) / parts."""

    fill: int
    """Coefficient of the sum of C over all stages, which one microbatch takes on its way."""
    steady: int
    """Coefficient of the slowest stage, for the microbatches that follow it."""
    once: int = 1
    """Coefficient of what comes at a step's end."""
    hidden: int = 0
    """Coefficient of the largest A - C, which the pipeline hides while it fills, and makes up for at its end."""
    parts: int = 1

    def time(self, total: Times, slowest: Times, exposed: Times, hidden: Times | int = 0) -> Times:
        """Return T of the sum of C and the largest A, U and A - C, all in one unit, rounded up to a whole one."""
        if self.parts == 1:
            return self.fill * total + self.steady * slowest + self.once * exposed + self.hidden * hidden
        # Whole times apart from parts of them, lest a float64 lose digits.
        whole, rest = (ClosedForm(*(divided(n, self.parts) for n in self[:4])) for divided in (floordiv, mod))
        given = total, slowest, exposed, hidden
        return whole.time(*given) - (-rest.time(*given) // self.parts)


def step_time(
    forms: Sequence[ClosedForm], total: Times, slowest: Times, exposed: Times, hidden: Times | int = 0
) -> Times:
    """Return the largest T of several closed forms."""
    first, *others = (form.time(total, slowest, exposed, hidden) for form in forms)
    for other in others:
        first = np.maximum(first, other) if isinstance(first, np.ndarray) else max(first, other)
    return first
