"""Checks that texts can be shown in a terminal or a picture unchanged."""

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def has_controls(text: str) -> bool:
    """Return whether a text contains characters that control a terminal or are not valid in XML.

    That is control characters but line breaks and tabs, changes of the writing direction, separators of lines and
    paragraphs, halves of surrogate pairs, and the two characters that are none.
    """
    return _CONTROLS.search(text) is not None
