"""The arrays of numbers that are bounded, compared and added up."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
"""Whole numbers of picoseconds or bytes: sums below 2^53 are exact in float64, and infinity is one of them."""
Ints = NDArray[np.int64]
