"""Suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_MOST = 3
_ALIKE = 0.6
"""The least similarity, from 0 to 1, of a name that may have been meant: the default of `difflib.get_close_matches`."""


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question that suggests the most similar known names, or `otherwise` if none is similar."""
    scored = sorted(((_likeness(name.lower(), each.lower()), each) for each in known), key=lambda pair: -pair[0])
    near = [each for score, each in scored[:_MOST] if score >= _ALIKE]
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _likeness(name: str, known: str) -> float:
    """Return the similarity of two names: the mean for the whole name and for its beginning."""
    return sum(SequenceMatcher(None, name, other).ratio() for other in (known, known[: len(name)])) / 2
