"""Suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_MOST = 3
_ALIKE = 0.6
"""The least likeness of a name that may have been meant, from 0 to 1: that of `difflib.get_close_matches`."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The question after the known names nearest to a misspelled one, or other words if none is near."""
    scored = sorted(((_likeness(name.lower(), each.lower()), each) for each in known), key=lambda pair: -pair[0])
    near = [each for score, each in scored[:_MOST] if score >= _ALIKE]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _likeness(name: str, known: str) -> float:
    """How alike two names are as a whole and, in equal parts, how alike a name is to the other's beginning."""
    return sum(SequenceMatcher(None, name, other).ratio() for other in (known, known[: len(name)])) / 2
