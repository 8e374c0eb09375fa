"""What a search has proven, in words."""

MOST_PROVEN = 0.001
"""The largest gap of a plan that is called optimal."""


def proof_words(optimum_s: float, bound_s: float, within: str = "") -> str:
    """Return what is proven of a plan by a bound of all plans; `within`: what they are limited to; 0: no bound."""
    if not bound_s:
        return "not proven: how much faster another plan may be is not known"
    gap = optimum_s / bound_s - 1
    if gap > MOST_PROVEN:
        return f"not proven: up to {gap * 100:.1f} % may be left"
    return f"proven optimal{within} under these estimates (gap {gap * 100:.2f} %)"
