"""Context parallelism in advice: the degrees that are searched for long samples, and the lengths that price them."""

import re
from collections.abc import Iterable

from shardwright_formats.types import Model

MIN_SHARE = 8192
"""Positions of a sample that each rank has at least in searched plans: below, samples themselves are shared out."""
_CP_SIZE = re.compile(r"(?:^|,)cp=([1-9]\d{0,6})(?:,|$)")


def searched_cp_sizes(model: Model, devices: int) -> tuple[int, ...]:
    """Return 1 and the powers of two that leave ranks `MIN_SHARE` positions each, in chunks of equal length."""
    length, sizes = model.sequence_length, [1]
    while (size := 2 * sizes[-1]) * MIN_SHARE <= length and size <= devices and length % (2 * size) == 0:
        sizes.append(size)
    return tuple(sizes)


def priced_lengths(length: int, searched: Iterable[int], choices: Iterable[str]) -> tuple[int, ...]:
    """Return the shares of a length that searched degrees, and those of choices such as `tp=8,cp=2`, leave a rank."""
    asked = (int(match[1]) for text in choices if (match := _CP_SIZE.search(text)))
    return tuple(sorted({length // size for size in (*searched, *asked) if length % size == 0} - {length}))
