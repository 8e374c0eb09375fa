"""The closed form of a step's time: what the search minimises."""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Times = TypeVar("Times", int, float, NDArray[np.float64])


def step_time(total: Times, slowest: Times, exposed: Times, num_microbatches: int, num_chunks: int = 1) -> Times:
    """T = sum A' + (m - 1) max A' + max U for GPipe and 1F1B alike, all in one unit.

    A'_i: forward and backward of one microbatch in pipeline stage i, all its chunks and the sends at their ends;
    `total` is their sum and `slowest` their maximum. U_i: what follows the last backward pass, the exposed gradient
    sync and the optimizer; `exposed` is its maximum. v chunks a stage divide the time that the pipeline takes to fill
    and drain by v, as long as there are as many microbatches as stages (Narayanan et al. 2021); with fewer, all but the
    first take a chunk's time on the slowest stage.
    """
    full = total + (num_microbatches - 1) * slowest + exposed
    if num_chunks == 1:
        return full
    filling, chunk = -(-(total - slowest) // num_chunks), -(-slowest // num_chunks)
    full = filling + num_microbatches * slowest + exposed
    few = total + (num_microbatches - 1) * chunk + exposed
    return np.maximum(full, few) if isinstance(full, np.ndarray) else max(full, few)
