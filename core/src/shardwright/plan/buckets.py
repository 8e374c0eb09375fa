"""Buckets of gradients of a replicated layer that are summed in one message."""

from collections.abc import Iterator, Sequence

GRADIENT_BUCKET_BYTES = 25 * 2**20
"""The most that gradients are brought together to, as much as PyTorch's DistributedDataParallel does (Li et al. 2020).

Enough for a message to be as fast a byte as any; and no more, for what is brought together is copied.
"""


def gradient_buckets(sizes: Sequence[int]) -> Iterator[range]:
    """Yield the range of gradients in each bucket, in order, given their bytes.

    A gradient as large as a bucket is separate.
    """
    start = held = 0
    for number, size in enumerate(sizes):
        if number > start and held + size > GRADIENT_BUCKET_BYTES:
            yield range(start, number)
            start, held = number, 0
        held += size
    if start < len(sizes):
        yield range(start, len(sizes))


def copied_bucket_bytes(sizes: Sequence[int]) -> int:
    """Return the largest copy that filling buckets needs; a gradient that is a separate bucket is reduced in place."""
    copied = (sum(sizes[i] for i in bucket) for bucket in gradient_buckets(sizes) if len(bucket) > 1)
    return max(copied, default=0)
