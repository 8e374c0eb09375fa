"""The shuffled order of samples, computed per place, without storing a permutation."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
"""Number of Feistel rounds: twice what makes a permutation hard to tell from a random one (Luby & Rackoff 1988)."""
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
"""Multipliers of splitmix64 (Steele, Lea & Flood 2014)."""
_FOLD = np.uint64(32)


def samples_at(indices: NDArray[np.int64], per_epoch: int, seed: int) -> NDArray[np.int64]:
    """Return the samples with these numbers, counted over all epochs, each epoch in its own order."""
    epochs, places = np.divmod(indices, per_epoch)
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        there = epochs == epoch
        found[there] = _permuted(places[there].astype(np.uint64), per_epoch, _keys(seed, int(epoch)))
    return found


@lru_cache(maxsize=4)
def _keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64))


def _permuted(places: NDArray[np.uint64], size: int, keys: tuple[np.uint64, ...]) -> NDArray[np.int64]:
    """Return the images of some places under a permutation of `range(size)`.

    A Feistel network permutes the next power of four; what falls outside is permuted again until it is inside (cycle
    walking: Black & Rogaway 2002, section 3), four times on average at most.
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    found = _feistel(places, half, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], half, keys)
    return found.astype(np.int64)


def _feistel(x: NDArray[np.uint64], half: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """Permute the numbers of 2 x `half` bits."""
    width, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> width, x & mask
    for key in keys:
        mixed = (right ^ key) * _FIRST
        mixed = (mixed ^ (mixed >> _FOLD)) * _SECOND
        left, right = right, left ^ ((mixed ^ (mixed >> _FOLD)) & mask)
    return (left << width) | right
