"""Numbers and their limits, for command options and files alike: beyond them nothing real is meant."""

from typing import Annotated

from msgspec import Meta

__all__ = [
    "Count",
    "Gib",
    "Name",
    "NonNegativeCount",
    "NonNegativeNumber",
    "PositiveNumber",
    "PositiveSeconds",
    "Seconds",
    "Share",
]

_MAX_COUNT = 2**31 - 1
_MAX_SECONDS = 1e9
_MAX_NUMBER = 1e15

Count = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
"""How many there are of something that is there."""
NonNegativeCount = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
"""How many, or which from 0; a seed."""
Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
"""A time limit; 10^9 s are 32 years."""
PositiveSeconds = Annotated[float, Meta(gt=0, le=_MAX_SECONDS)]
PositiveNumber = Annotated[float, Meta(gt=0, le=_MAX_NUMBER)]
"""A rate, a bandwidth, a size; its unit is the field's."""
NonNegativeNumber = Annotated[float, Meta(ge=0, le=_MAX_NUMBER)]
Gib = Annotated[float, Meta(gt=0, le=2**20)]
"""Memory of one device, in GiB."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A part of a whole."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""What the user calls something; it may become part of a file's name."""
