"""Time and memory of one layer, read off the model profile."""

from typing import NamedTuple

import numpy as np

from shardwright_formats.errors import BadInput
from shardwright_formats.model_profile import FitMode
from shardwright_search.profiles import LayerKey, LayerPoints, Profiles, States
from shardwright_search.request import TimeModel

__all__ = ["LayerCost", "layer_cost", "states_of"]

_FORWARD, _BACKWARD, _HELD, _MOMENT = range(4)


class LayerCost(NamedTuple):
    """One microbatch through one layer on one rank."""

    forward_s: float
    backward_s: float
    activation_bytes: float
    transient_bytes: float
    warning: str | None


def layer_cost(profiles: Profiles, key: LayerKey, micro_batch_size: int, time_model: TimeModel) -> LayerCost:
    """Cost of a layer at a micro-batch of that many samples per tensor-parallel group.

    `interpolate`: piecewise linear between measured sizes; beyond them the line through the two outermost points, with
    a warning. `static`, `batch` and `sequence`: the profile's curves of these modes (Galvatron's three); the last
    serves lengths that were never profiled. Raises BadInput when the combination was not measured, or cannot be
    extended to this size.
    """
    if time_model is not TimeModel.INTERPOLATE:
        return _on_fits(profiles, key, micro_batch_size, time_model)
    points = profiles.layers.get(key)
    if points is None:
        raise BadInput(
            profiles.model_file,
            f"no point for {_named(key)} at sequence_length {key.sequence_length}",
            "add it to the profile settings and measure the probes again, or take time_model sequence",
        )
    values, beyond = _at(points, micro_batch_size), _beyond(key, points, micro_batch_size)
    if values is None or (beyond is not None and min(values[:2]) <= 0):
        raise BadInput(
            profiles.model_file,
            f"{_named(key)}: micro_batch_size {micro_batch_size} cannot be extrapolated from "
            f"{points.micro_batch_sizes.tolist()}",
            "add it to micro_batch_sizes of the profile settings and measure the probes again",
        )
    return LayerCost(values[0], values[1], values[2], values[3], beyond)


def states_of(profiles: Profiles, type_name: str, tp_size: int) -> States:
    """What one layer's parameters cost a step; BadInput when the profile has none of that type and tp_size."""
    states = profiles.states.get((type_name, tp_size))
    if states is None:
        raise BadInput(
            profiles.model_file,
            f"no states for {type_name} tp_size {tp_size}",
            "add that tp_size to the profile settings and measure the probes again",
        )
    return states


def _named(key: LayerKey) -> str:
    return f"{key.type} tp_size {key.tp_size} sequence_parallel {key.sequence_parallel} recompute {key.recompute}"


def _at(points: LayerPoints, size: int) -> list[float] | None:
    """The four columns at a micro-batch size; None where one point alone cannot be extended."""
    sizes = points.micro_batch_sizes
    if sizes[0] <= size <= sizes[-1]:
        return [float(np.interp(size, sizes, column)) for column in points.values.T]
    if len(sizes) == 1:
        return None
    near, far = (0, 1) if size < sizes[0] else (-1, -2)
    slope = (points.values[near] - points.values[far]) / (sizes[near] - sizes[far])
    forward_s, backward_s, held, moment = (float(v) for v in points.values[near] + slope * (size - sizes[near]))
    return [forward_s, backward_s, max(0.0, held), max(0.0, moment)]


def _beyond(key: LayerKey, points: LayerPoints, size: int) -> str | None:
    sizes = points.micro_batch_sizes
    if sizes[0] <= size <= sizes[-1]:
        return None
    return f"extrapolated: {_named(key)} at micro_batch_size {size}, measured {sizes[0]} to {sizes[-1]}"


def _on_fits(profiles: Profiles, key: LayerKey, size: int, time_model: TimeModel) -> LayerCost:
    """The curves of a mode. What is held for a moment has none: it grows with the tokens from the nearest point."""
    forward_s, backward_s, held = (
        _on_curve(profiles, key, quantity, size, time_model)
        for quantity in ("forward_s", "backward_s", "activation_bytes")
    )
    points, length = _nearest_length(profiles, key)
    near = int(np.argmin(np.abs(points.micro_batch_sizes - size)))
    tokens = size * key.sequence_length / (points.micro_batch_sizes[near] * length)
    if min(forward_s, backward_s) <= 0:
        what = f"{_named(key)}: the {time_model} curve is not positive at micro_batch_size {size}"
        raise BadInput(profiles.model_file, what, "take another time_model or measure more sizes")
    warning = _beyond(key, points, size)
    if length != key.sequence_length:
        warning = f"extrapolated: {_named(key)} at sequence_length {key.sequence_length}, nearest measured {length}"
    return LayerCost(forward_s, backward_s, max(0.0, held), float(points.values[near, _MOMENT]) * tokens, warning)


def _on_curve(profiles: Profiles, key: LayerKey, quantity: str, size: int, time_model: TimeModel) -> float:
    curves = profiles.fits.get((*key[:4], quantity), ())
    length = key.sequence_length
    for curve in curves:
        one, linear, quadratic = curve.coefficients
        if time_model is TimeModel.SEQUENCE and curve.mode is FitMode.JOINT:
            return one + linear * size * length + quadratic * size * length**2
        if curve.mode.value != time_model.value:
            continue
        if time_model is TimeModel.SEQUENCE:
            return (one + linear * length + quadratic * length**2) * size / curve.micro_batch_size
        if curve.sequence_length == length:
            return one + linear * size
    raise BadInput(
        profiles.model_file,
        f"no {time_model} curve of {quantity} for {_named(key)} at sequence_length {length}",
        "profile more sizes, or take time_model interpolate",
    )


def _nearest_length(profiles: Profiles, key: LayerKey) -> tuple[LayerPoints, int]:
    found = [(abs(k.sequence_length - key.sequence_length), k) for k in profiles.layers if k[:4] == key[:4]]
    nearest = min(found)[1]
    return profiles.layers[nearest], nearest.sequence_length
