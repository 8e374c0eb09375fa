"""Placement of experts: which ranks hold which of a layer's experts, if groups do not hold neighbouring experts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean

from msgspec import UNSET

from shardwright.types import ExpertLoad, Model, Plan


def experts_by_place(plan: Plan, layer: str) -> tuple[int, ...] | None:
    """Return the expert at each place of `layers[i]`, group after group; None if experts are in ascending order."""
    if plan.expert_placement is UNSET or not layer.startswith("layers["):
        return None
    return tuple(chain.from_iterable(plan.expert_placement[int(layer[len("layers[") : -1])])) or None


def neighbours(order: Sequence[int], low: int, high: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Yield the runs of neighbouring experts at the places from `low` to `high` of an order.

    Each is the slice of its places, counted from `low`, and the half-open range of its experts.
    """
    start = low
    for place in range(low + 1, high + 1):
        if place == high or order[place] != order[place - 1] + 1:
            yield slice(start - low, place - low), (order[start], order[start] + place - start)
            start = place


# The imbalance of a model's layers according to a logged load of experts: the load of the fullest rank over the mean.


def expert_slices(model: Model) -> Mapping[int, slice]:
    """Return the slice of each layer's experts in a row of the experts of all layers, by the layer's number."""
    slices, start = {}, 0
    for layer, name in enumerate(model.layers):
        if (experts := model.types[name].experts) is not UNSET:
            slices[layer] = slice(start, start := start + experts.number)
    return slices


def load_misfit(load: ExpertLoad, model: Model) -> str | None:
    """Return why a load does not match a model's experts, or None if it does.

    Each layer of the load must have as many shares as experts, and the load must have at least one layer of each type
    that has experts.
    """
    for one in load.layers:
        kind = model.types[model.layers[one.layer]] if one.layer < len(model.layers) else None
        experts = UNSET if kind is None else kind.experts
        if experts is UNSET:
            return f"layer {one.layer} of {model.name} has no experts"
        if experts.number != len(one.shares):
            return f"layer {one.layer} of {model.name} has {experts.number} experts, not {len(one.shares)}"
    named = {model.layers[one.layer] for one in load.layers}
    lacking = [name for name in dict.fromkeys(model.layers) if model.types[name].experts is not UNSET]
    return next((f"it has no layer of type {name}" for name in lacking if name not in named), None)


def imbalances(load: ExpertLoad, model: Model, ep_size: int) -> Mapping[str, float]:
    """Return the load of the fullest of `ep_size` groups of experts divided by a group's mean load, by layer type.

    1 is balanced. Values are means over a type's layers; types without experts are omitted. Raises ValueError if
    `ep_size` does not divide the experts of a layer.
    """
    of_type: dict[str, list[float]] = {}
    for one in load.layers:
        of_type.setdefault(model.layers[one.layer], []).append(one.imbalance(ep_size))
    return {name: fmean(values) for name, values in of_type.items()}
