"""Pareto filters over columns of whole numbers."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
"""Whole numbers of picoseconds or bytes: sums below 2^53 are exact in float64, and infinity is one of them."""
Ints = NDArray[np.int64]


_BLOCK = 256
_AT_ONCE = 128
"""Rows of a front that others are compared with at once."""
_SWEPT = 100_000
"""With more pairs of rows than this, a sweep takes the place of comparing them one by one."""
_EARLIER = np.triu(np.ones((_BLOCK, _BLOCK), bool), 1)


def pairs(rows: Ints, count: int) -> tuple[Ints, Ints]:
    """Return all pairs of rows and options, as two arrays."""
    return np.repeat(rows, count), np.tile(np.arange(count), len(rows))


def non_dominated(columns: NDArray[Any], key: Ints) -> Ints:
    """Return indices of the rows of `columns` [rows, columns] that no other row of the same `key` [rows] dominates.

    A row is beaten by one that is no larger in any column; of equal rows the first is kept. The answer is in ascending
    order of (key, columns).
    """
    if len(key) <= 1:
        return np.arange(len(key))
    order: Ints = np.lexsort((*columns.T[::-1], key))
    rows, keys = columns[order], key[order]
    if len(key) <= _BLOCK:
        beaten = _EARLIER[: len(key), : len(key)] & (keys[:, None] == keys)
        for column in rows.T[1:]:
            beaten &= column[:, None] <= column
        return np.asarray(order[~beaten.any(0)])
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    ends = np.r_[starts[1:], len(key)]
    fronts = [first + _front(rows[first:last]) for first, last in zip(starts, ends, strict=True)]
    return np.asarray(order[np.concatenate(fronts)])


def _front(rows: NDArray[Any]) -> Ints:
    """Return indices of non-dominated rows, sorted lexicographically: only an earlier row can beat a later one."""
    varying = [column for column in rows.T if (column != column[0]).any()]
    if len(varying) <= 1:
        return np.zeros(1, np.intp)
    if len(varying) == 2:
        best_before = np.minimum.accumulate(varying[1])[:-1]
        return np.flatnonzero(np.r_[True, varying[1][1:] < best_before])
    if len(varying) == 3:
        return _front_of_three(varying[1].tolist(), varying[2].tolist(), repeat(True))
    return _front_of_many(np.stack(varying[1:], 1))


def _front_of_three(second: list[float], third: list[float], beats: Iterable[bool]) -> Ints:
    """Return `_front` for three columns whose first ascends, by a staircase of the other two."""
    kept: list[int] = []
    steps: list[float] = []
    heights: list[float] = []
    for row, (x, y, beating) in enumerate(zip(second, third, beats, strict=False)):
        pivot = bisect_right(steps, x)
        if pivot and heights[pivot - 1] <= y:
            continue
        kept.append(row)
        if not beating:
            continue
        start = pivot - 1 if pivot and steps[pivot - 1] == x else pivot
        end = start
        while end < len(heights) and heights[end] >= y:
            end += 1
        steps[start:end], heights[start:end] = [x], [y]
    return np.array(kept)


def _front_of_many(rows: NDArray[Any]) -> Ints:
    """Return `_front` of rows without their first column, which is sorted and need not be compared.

    No row of the later half beats one of the earlier half. So the front of the earlier half is final, and the rows of
    the later half's front remain that the earlier front does not beat (Kung, Luccio and Preparata 1975).
    """
    if len(rows) <= _BLOCK:
        is_beaten = _EARLIER[: len(rows), : len(rows)].copy()
        for column in rows.T:
            is_beaten &= column[:, None] <= column
        return np.flatnonzero(~is_beaten.any(0))
    middle = len(rows) // 2
    first, later = _front_of_many(rows[:middle]), middle + _front_of_many(rows[middle:])
    return np.concatenate([first, later[~beaten(rows[first], rows[later])]])


def beaten_alike(front: NDArray[Any], block: NDArray[Any], keys: tuple[Ints, Ints]) -> NDArray[np.bool_]:
    """Return which rows of a block some row of a front with the same key matches or beats.

    `keys`: the keys of the front's rows, and of the block's rows.
    """
    if len(front) * len(block) <= _SWEPT:
        return np.asarray((_no_worse(front, block) & (keys[0][:, None] == keys[1])).any(0))
    is_beaten = np.zeros(len(block), bool)
    for key in np.unique(keys[1]):
        rows = np.flatnonzero(keys[1] == key)
        is_beaten[rows] = beaten(front[keys[0] == key], block[rows])
    return is_beaten


def beaten(front: NDArray[Any], block: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which rows of a block some row of a front matches or beats."""
    if front.shape[1] == 3 and len(front) * len(block) > _SWEPT:
        return _beaten_of_three(front, block)
    left = np.arange(len(block))
    for start in range(0, len(front), _AT_ONCE):
        # Rows that are already beaten are not compared again.
        left = left[~_no_worse(front[start : start + _AT_ONCE], block[left]).any(0)]
    is_beaten = np.ones(len(block), bool)
    is_beaten[left] = False
    return is_beaten


def _no_worse(front: NDArray[Any], block: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether a row of the front matches or beats one of the block [rows of the front, rows of the block]."""
    no_worse = np.ones((len(front), len(block)), bool)
    for mine, theirs in zip(front.T, block.T, strict=True):
        no_worse &= mine[:, None] <= theirs
    return no_worse


def _beaten_of_three(front: NDArray[Any], block: NDArray[Any]) -> NDArray[np.bool_]:
    """Return `beaten` for three columns, in one sweep over the first; among equal rows the front's come first."""
    rows, of_front = np.concatenate([front, block]), np.arange(len(front) + len(block)) < len(front)
    order: Ints = np.lexsort((~of_front, rows[:, 0]))
    kept = _front_of_three(rows[order, 1].tolist(), rows[order, 2].tolist(), of_front[order].tolist())
    is_beaten = np.ones(len(rows), bool)
    is_beaten[order[kept]] = False
    return is_beaten[len(front) :]
