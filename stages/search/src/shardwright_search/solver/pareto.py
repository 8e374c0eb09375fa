"""Pareto filters over integer columns."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "non_dominated"]

Ints = NDArray[np.int64]

_BLOCK = 256
_EARLIER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)


def non_dominated(columns: Ints, key: Ints) -> Ints:
    """Indices of the rows of `columns` [rows, columns] that no other row of the same `key` [rows] matches or beats.

    A row is beaten by one that is no larger in any column; of equal rows the first is kept. The answer is in ascending
    order of (key, columns).
    """
    if len(key) <= 1:
        return np.arange(len(key))
    order = np.lexsort((*columns.T[::-1], key))
    sorted_columns, sorted_key = columns[order], key[order]
    starts = np.flatnonzero(np.r_[True, sorted_key[1:] != sorted_key[:-1]])
    kept = [
        first + _front(sorted_columns[first:last])
        for first, last in zip(starts, np.r_[starts[1:], len(key)], strict=True)
    ]
    return order[np.concatenate(kept)]


def _front(rows: Ints) -> Ints:
    """Indices of the non-dominated rows, which are sorted lexicographically: only an earlier row can beat a later."""
    varying = [column for column in rows.T if (column != column[0]).any()]
    if len(varying) <= 1:
        return np.zeros(1, np.intp)
    if len(varying) == 2:
        best_before = np.minimum.accumulate(varying[1])[:-1]
        return np.flatnonzero(np.r_[True, varying[1][1:] < best_before])
    return _front_of_many(np.stack(varying, 1))


def _front_of_many(rows: Ints) -> Ints:
    """As `_front`, block by block; the first column is sorted and need not be compared."""
    front = np.empty((len(rows), rows.shape[1] - 1), np.int64)
    kept: list[Ints] = []
    size = 0
    for start in range(0, len(rows), _BLOCK):
        block = rows[start : start + _BLOCK, 1:]
        alive = np.flatnonzero(~_beaten(front[:size], block))
        block = block[alive]
        inner = _EARLIER[: len(block), : len(block)].copy()
        for column in block.T:
            inner &= column[:, None] <= column[None, :]
        final = ~inner.any(0)
        count = int(final.sum())
        front[size : size + count] = block[final]
        size += count
        kept.append(start + alive[final])
    return np.concatenate(kept)


def _beaten(front: Ints, block: Ints) -> NDArray[np.bool_]:
    beaten = np.zeros(len(block), bool)
    for start in range(0, len(front), 16 * _BLOCK):
        part = front[start : start + 16 * _BLOCK]
        below = np.ones((len(part), len(block)), bool)
        for mine, theirs in zip(part.T, block.T, strict=True):
            below &= mine[:, None] <= theirs[None, :]
        beaten |= below.any(0)
    return beaten
