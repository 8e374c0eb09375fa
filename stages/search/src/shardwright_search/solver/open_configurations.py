"""Configurations that are not solved yet, and the increasing limits below which each is solved."""

from itertools import accumulate
from typing import NamedTuple

import numpy as np

RELAXED = -1
"""Tries of a configuration that has only a relaxed bound."""
LIMITS = (0.001, 0.0015, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0)
"""Shares by which a limit is above the one before it."""


class Open(NamedTuple):
    """A configuration that is not solved yet, by its bound, and how often no plan was found below a limit."""

    bound: float
    number: int
    tries: int
    guess: float | None = None
    """The score of a known plan; infinity: none was found."""


NOTHING = Open(np.inf, -1, 0)
"""No configuration."""


def cuts_of(here: Open, limit: float) -> list[float]:
    """Return the increasing limits to try, up to the requested limit."""
    cuts = list(accumulate(LIMITS[here.tries :], lambda cut, more: cut * (1 + more), initial=here.bound))[1:]
    return [*(cut for cut in cuts if cut < limit), limit]
