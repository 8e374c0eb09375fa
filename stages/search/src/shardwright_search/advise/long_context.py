"""Context parallelism in `advise`: the degrees that are searched for long samples, and the lengths to estimate."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardwright.io import read_bytes
from shardwright.types import MIB, Model

MIN_SHARE = 8192
"""Positions of a sample that each rank has at least in searched plans: below, samples themselves are shared out."""
_CP_SIZE = re.compile(r"(?:^|,)cp=([1-9]\d{0,6})(?:,|$)")
_IN_FILES = re.compile(
    r"(?:context[-_]parallel[-_](?:size|degree)|\b(?:cp_size|cp_sizes_enc|vcp))[\"']?[\s=:]+[\"']?([\d,]{1,65536})"
)
"""Degrees under the names that other systems have for them."""
_MAX_BYTES, _MAX_DIGITS = MIB, 7


def searched_cp_sizes(model: Model, devices: int) -> tuple[int, ...]:
    """Return 1 and the powers of two that leave ranks `MIN_SHARE` positions each, in chunks of equal length."""
    length, sizes = model.sequence_length, [1]
    while (size := 2 * sizes[-1]) * MIN_SHARE <= length and size <= devices and length % (2 * size) == 0:
        sizes.append(size)
    return tuple(sizes)


def priced_lengths(length: int, searched: Iterable[int], choices: Iterable[str]) -> tuple[int, ...]:
    """Return the lengths of a rank's share of a sample, for searched degrees and for choices such as `tp=8,cp=2`.

    A choice may be another system's file, or its arguments.
    """
    asked = (size for text in choices for size in _asked_sizes(text))
    return tuple(sorted({length // size for size in (*searched, *asked) if length % size == 0} - {length}))


def _asked_sizes(choice: str) -> Iterator[int]:
    """Yield the context-parallel degrees in a choice, or in the file that it names."""
    if (match := _CP_SIZE.search(choice)) is not None:
        yield int(match[1])
        return
    path = Path(choice)
    is_file = not choice.startswith("--") and path.is_file()
    text = read_bytes(path, _MAX_BYTES).decode(errors="replace") if is_file else choice
    for match in _IN_FILES.finditer(text):
        yield from (int(size) for size in match[1].split(",") if 0 < len(size) <= _MAX_DIGITS and int(size))
