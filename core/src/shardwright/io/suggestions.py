"""Suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_MOST = 3
_ALIKE = 0.6
"""The least similarity, from 0 to 1, of a name that may have been meant: the default of `difflib.get_close_matches`."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A question that suggests the known names nearest to a misspelled one, or other words if none is similar."""
    scored = sorted(((_likeness(name.lower(), each.lower()), each) for each in known), key=lambda pair: -pair[0])
    near = [each for score, each in scored[:_MOST] if score >= _ALIKE]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _likeness(name: str, known: str) -> float:
    """The similarity of two names: as a whole and, in equal parts, to the beginning of the other name."""
    return sum(SequenceMatcher(None, name, other).ratio() for other in (known, known[: len(name)])) / 2
