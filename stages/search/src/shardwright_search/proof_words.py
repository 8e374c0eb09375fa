"""Sentences about what a search has proven."""

MOST_PROVEN = 0.001
"""The largest gap of a plan that is called optimal."""


def proof_words(optimum_s: float, bound_s: float, within: str = "") -> str:
    """Return, in words, what a bound proves about a plan; `within`: the limits of the plans; bound 0: no bound."""
    if not bound_s:
        return "not proven: how much faster another plan may be is not known"
    gap = optimum_s / bound_s - 1
    if gap > MOST_PROVEN:
        return f"not proven: up to {gap * 100:.1f} % may be left"
    return f"proven optimal{within} under these estimates (gap {gap * 100:.2f} %)"
