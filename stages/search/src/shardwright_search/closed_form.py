"""The closed form of a step's time: what the search minimises."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["step_time"]

Times = TypeVar("Times", int, NDArray[np.int64])


def step_time(total: Times, slowest: Times, gradient_sync: Times, optimizer: Times, num_microbatches: int) -> Times:
    """T = sum A' + (m - 1) max A' + max U + max O, for GPipe and 1F1B alike.

    A'_i: forward and backward of one microbatch in pipeline stage i with the sends at both of its ends; `total` is
    their sum and `slowest` their maximum. `gradient_sync` and `optimizer` are the maxima of what follows the last
    backward pass; the optimizer waits for every stage, for clipping needs the norm of all gradients. All in one unit.
    For stages that share their ratio of forward to backward it is never below the event simulation.
    """
    return total + (num_microbatches - 1) * slowest + gradient_sync + optimizer
