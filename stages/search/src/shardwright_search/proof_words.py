"""Sentences about what a search has proven."""

from math import ceil

MOST_PROVEN = 0.001
"""The largest gap of a plan that is called optimal."""
_ROUNDING = 1e-12
"""Seconds are fractions of whole picoseconds: two equal times may differ by so much."""


def proof_words(optimum_s: float, bound_s: float, within: str = "") -> str:
    """Return, in words, what a bound proves about a plan; `within`: the limits of the plans; bound 0: no bound."""
    if not bound_s:
        return "not proven: how much faster another plan may be is not known"
    gap = optimum_s / bound_s - 1
    if gap > MOST_PROVEN:
        return f"not proven: up to {gap * 100:.1f} % may be left"
    return f"proven optimal{within} under these estimates (gap {gap * 100:.2f} %)"


def split_words(time_s: float, bound_s: float, kind: str = "with split backward passes") -> str:
    """Return, in words, what is proven of all plans of a kind, beside a plan's simulated time; bound 0: nothing."""
    if not bound_s:
        return f"how much faster another plan {kind} may be is not known"
    if bound_s * (1 + _ROUNDING) >= time_s:
        return f"no plan {kind} is faster by simulation, proven"
    more = ceil((time_s / bound_s - 1) * 1e4) / 100
    return f"no plan {kind} is more than {more:.2f} % faster by simulation, proven"
