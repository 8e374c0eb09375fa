"""A backward pass of one pipeline stage, overlapped with the reduction of its gradients, which ends later."""

from collections.abc import Sequence
from math import ceil, floor
from typing import NamedTuple


class Reduction(NamedTuple):
    """A layer's backward time, and the time to reduce its gradients, each without overlap."""

    backward_ps: int
    sync_ps: int


class Overlap(NamedTuple):
    """Slowdowns of a backward pass and a reduction that overlap: the ratio to the time without overlap."""

    compute_slowdown: float
    message_slowdown: float


class BackwardPass(NamedTuple):
    """A backward pass and its reductions, in picoseconds since its start."""

    gradient_ps: int
    """Time at which the gradient for the stage before is there."""
    busy_ps: int
    """Time at which the reductions are over, too."""
    reductions_ps: tuple[tuple[int, int], ...] = ()
    """Begin and end of each reduction that takes time, one after the other."""


def backward_pass(layers: Sequence[Reduction], overlap: Overlap | None, gradient_sync_ps: int = 0) -> BackwardPass:
    """Simulate one pass over `layers`, which are in forward order and so run from the last to the first.

    A reduction waits for its layer's gradients and for the reductions before it. While one overlaps with a backward
    pass each advances at 1 / slowdown; without an overlap all of them follow. Then follows `gradient_sync_ps`.
    Every event is rounded up to a picosecond.
    """
    now = begun = 0
    waiting: list[int] = []
    spans: list[tuple[int, int]] = []
    for left, sync_ps in reversed(layers):
        while left and waiting and overlap is not None:
            spent = min(ceil(left * overlap.compute_slowdown), ceil(waiting[0] * overlap.message_slowdown))
            now += spent
            left = _left(left, overlap.compute_slowdown, spent)
            waiting[0] = _left(waiting[0], overlap.message_slowdown, spent)
            if not waiting[0]:
                del waiting[0]
                spans.append((begun, now))
                begun = now
        now += left
        if not waiting:
            begun = now
        if sync_ps:
            waiting.append(sync_ps)
    gradient_ps = now
    if overlap is None:
        begun = now
    for left in (*waiting, gradient_sync_ps):
        now += left
        spans.append((begun, now))
        begun = now
    return BackwardPass(gradient_ps, now, tuple(span for span in spans if span[0] < span[1]))


def _left(work_ps: int, slowdown: float, spent_ps: int) -> int:
    """Return the remaining work after a time at 1 / slowdown."""
    return 0 if spent_ps >= ceil(work_ps * slowdown) else work_ps - floor(spent_ps / slowdown)
