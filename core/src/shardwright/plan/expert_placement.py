"""Placed experts: which ranks hold which of a layer's experts, if these are not neighbours."""

from collections.abc import Iterator, Sequence
from itertools import chain

from msgspec import UNSET

from shardwright.types import Plan


def experts_by_place(plan: Plan, layer: str) -> tuple[int, ...] | None:
    """Return the number of the expert at each place of `layers[i]`, group after group; None if they are in order."""
    if plan.expert_placement is UNSET or not layer.startswith("layers["):
        return None
    return tuple(chain.from_iterable(plan.expert_placement[int(layer[len("layers[") : -1])])) or None


def neighbours(order: Sequence[int], low: int, high: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield the runs of neighbouring experts at places from `low` to `high` of an order.

    Each is where it lies, counted from `low`, and the half-open range of its experts.
    """
    start = low
    for place in range(low + 1, high + 1):
        if place == high or order[place] != order[place - 1] + 1:
            yield slice(start - low, place - low), (order[start], order[start] + place - start)
            start = place
