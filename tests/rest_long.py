"""Parameters of which `make test` tries the first and `make test-long` the rest."""

from collections.abc import Iterable

import pytest

__all__ = ["rest_long"]


def rest_long(count: int, values: Iterable[object]) -> list[object]:
    """Return the values of a parameter, or tuples of several parameters' values, all but the first `count` as long."""
    found = list(values)
    several = [value if isinstance(value, tuple) else (value,) for value in found[count:]]
    return found[:count] + [pytest.param(*value, marks=pytest.mark.long) for value in several]
