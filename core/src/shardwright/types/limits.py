"""Limits of numbers and strings, for command options and files; values beyond them are mistakes.

The limits are generous. They exist so that a mistyped or hostile number is refused where it is read, with its location,
before anything is computed with it. The types of numbers in a profile's tables also state the unit.
"""

from typing import Annotated

from msgspec import Meta

MAX_DEVICES = 2**20
"""The largest number of devices of a cluster, and so of ranks of a plan."""
MAX_LAYERS = 100_000
"""The largest number of layers of a model."""
MAX_BATCH = 2**22
"""The largest number of samples of a step."""
MAX_DIMS = 8
"""The largest number of dims of a tensor."""
MAX_COUNT = 2**31 - 1
"""The largest count of anything."""
_MAX_BYTES = 2**60
_MAX_SECONDS = 1e9
_MAX_NUMBER = 1e15

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
"""A number of things, at least 1."""
NonNegativeCount = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
"""A number of things, an index counted from 0, or a seed."""
Rank = Annotated[int, Meta(ge=0, lt=MAX_DEVICES, extra={"unit": "rank"})]
"""Number of a rank, and so of its device."""
Ranks = Annotated[int, Meta(ge=1, le=MAX_DEVICES, extra={"unit": "ranks"})]
"""A degree, or the size of a group."""
SeveralRanks = Annotated[int, Meta(ge=2, le=MAX_DEVICES, extra={"unit": "ranks"})]
SomeRanks = Annotated[int, Meta(ge=0, le=MAX_DEVICES, extra={"unit": "ranks"})]
"""The size of a group, or 0 if there is no such group."""
Samples = Annotated[int, Meta(ge=1, le=MAX_BATCH, extra={"unit": "samples"})]
"""A batch or a micro-batch."""
Tokens = Annotated[int, Meta(ge=1, le=MAX_COUNT, extra={"unit": "tokens"})]
"""A sequence length."""
Length = Annotated[int, Meta(ge=1, le=2**34)]
"""The length of one dim of a tensor."""
Elements = Annotated[int, Meta(ge=0, le=2**50)]
"""Number of elements of all tensors of a layer together."""
Flops = Annotated[int, Meta(ge=0, le=2**62)]
"""Floating-point operations for one sample."""
Bytes = Annotated[int, Meta(ge=0, le=_MAX_BYTES, extra={"unit": "bytes"})]
PositiveBytes = Annotated[int, Meta(ge=1, le=_MAX_BYTES, extra={"unit": "bytes"})]
Seconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS, extra={"unit": "s"})]
"""A duration; 10^9 s are 32 years."""
PositiveSeconds = Annotated[float, Meta(gt=0, le=_MAX_SECONDS, extra={"unit": "s"})]
Microseconds = Annotated[float, Meta(ge=0, le=_MAX_SECONDS)]
SignedSeconds = Annotated[float, Meta(ge=-_MAX_SECONDS, le=_MAX_SECONDS)]
"""A difference of durations."""
Rate = Annotated[float, Meta(gt=0, le=1e30)]
"""Operations, bytes or other units per second."""
PositiveNumber = Annotated[float, Meta(gt=0, le=_MAX_NUMBER)]
"""A rate, a bandwidth or a size; the field states its unit."""
Number = Annotated[float, Meta(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
NonNegativeNumber = Annotated[float, Meta(ge=0, le=_MAX_NUMBER)]
GIB, MIB = 2**30, 2**20
"""Bytes of a GiB and of a MiB."""
Gib = Annotated[float, Meta(gt=0, le=2**20)]
"""Memory of one device, in GiB."""
Share = Annotated[float, Meta(ge=0, le=1)]
"""A fraction of a whole."""
Name = Annotated[str, Meta(min_length=1, max_length=200)]
"""A name that the user gives; it may become part of a file name."""


def whole(pattern: str, max_length: int | None = None) -> Meta:
    """Return the limit for a string that matches a pattern from its first to its last character.

    In Python, `$` by itself also matches before a final line break; JSON Schema has no other anchor for the end of a
    string.
    """
    return Meta(pattern=rf"^(?:{pattern})$(?!\n)", max_length=max_length)


Sha256 = Annotated[str, whole("[0-9a-f]{64}")]
