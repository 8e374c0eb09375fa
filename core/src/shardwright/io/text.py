"""Texts that a terminal and a picture can show as they are."""

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def has_controls(text: str) -> bool:
    """Whether a text holds what a terminal obeys or XML has not.

    That is control characters but line breaks and tabs, changes of the writing direction, separators of lines and
    paragraphs, halves of surrogate pairs, and the two characters that are none.
    """
    return _CONTROLS.search(text) is not None
