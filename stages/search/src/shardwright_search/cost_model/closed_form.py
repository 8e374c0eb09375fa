"""The closed form of a step's time: what the search minimises."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["interleaved_step_time", "step_time"]

Times = TypeVar("Times", int, float, NDArray[np.float64])


def step_time(total: Times, slowest: Times, end: Times, num_microbatches: int) -> Times:
    """T = sum A' + (m - 1) max A' + max U, for GPipe and 1F1B alike.

    A'_i: forward and backward of one microbatch in pipeline stage i with the sends at both of its ends; `total` is
    their sum and `slowest` their maximum. U_i: what follows the last backward pass, the rest of the gradients'
    reduction and the optimizer; `end` is its maximum. All in one unit.
    """
    return total + (num_microbatches - 1) * slowest + end


def interleaved_step_time(total: Times, slowest: Times, end: Times, num_microbatches: int, num_chunks: int) -> Times:
    """T with v chunks on every stage, of stage times A' that are sums over a stage's chunks.

    v chunks divide the time that the pipeline takes to fill and drain by v, as long as there are as many microbatches
    as stages (Narayanan et al. 2021); with fewer, all but the first take a chunk's time on the slowest stage.
    """
    filling, chunk = -(-(total - slowest) // num_chunks), -(-slowest // num_chunks)
    full = step_time(filling + slowest, slowest, end, num_microbatches)
    few = step_time(total, chunk, end, num_microbatches)
    return np.maximum(full, few) if isinstance(full, np.ndarray) else max(full, few)
