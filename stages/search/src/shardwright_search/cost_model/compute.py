"""Time and memory of one layer, read off the model profile."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.model_profile import FitMode, StateRow
from shardwright_search.cost_model.profiles import LayerKey, LayerPoints, Profiles
from shardwright_search.cost_model.time_model import TimeModel


class ComputeCost(NamedTuple):
    """One microbatch through one layer on one rank."""

    forward_s: float
    backward_s: float
    activation_bytes: float
    workspace_bytes: float
    warning: str | None


def slowest_compute(found: Sequence[ComputeCost]) -> ComputeCost:
    """Of ranks of several node types that all do the same: the most of each."""
    if len(found) == 1:
        return found[0]
    *columns, warnings = zip(*found, strict=True)
    told = "; ".join(dict.fromkeys(warning for warning in warnings if warning is not None))
    return ComputeCost._make((*map(max, columns), told or None))


def probed_tp_size(profiled: Iterable[int], tp_size: int, node_devices: int) -> int:
    """The tensor-parallel degree whose numbers serve: itself, unless it is not profiled and no node can measure it.

    A group that does not divide the devices of a node is in no probe. Its ranks compute and hold less than those of
    fewer ranks do: the largest profiled degree below it is what it is rounded up to.
    """
    if node_devices % tp_size == 0 or tp_size in (known := set(profiled)):
        return tp_size
    return max((size for size in known if size < tp_size), default=tp_size)


def layer_cost(profiles: Profiles, key: LayerKey, micro_batch_size: int, time_model: TimeModel) -> ComputeCost:
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
    return ComputeCost(values[0], values[1], values[2], values[3], beyond)


def states_of(profiles: Profiles, type_name: str, tp_size: int) -> StateRow:
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
    forward_s, backward_s, resident, workspace = (float(v) for v in points.values[near] + slope * (size - sizes[near]))
    return [forward_s, backward_s, max(0.0, resident), max(0.0, workspace)]


def _beyond(key: LayerKey, points: LayerPoints, size: int) -> str | None:
    sizes = points.micro_batch_sizes
    if sizes[0] <= size <= sizes[-1]:
        return None
    return f"extrapolated: {_named(key)} at micro_batch_size {size}, measured {sizes[0]} to {sizes[-1]}"


def _on_fits(profiles: Profiles, key: LayerKey, size: int, time_model: TimeModel) -> ComputeCost:
    """The curves of a mode; what has none grows with the tokens from the nearest length, with a warning."""
    nearest = _nearest_length(profiles, key)
    points = profiles.layers[nearest]
    plain = _at(points, size)
    tokens = key.sequence_length / nearest.sequence_length
    values, warnings = [], [_beyond(key, points, size)]
    for column, quantity in enumerate(("forward_s", "backward_s", "activation_bytes", None)):
        curve = None if quantity is None else _on_curve(profiles, key, quantity, size, time_model)
        if curve is None and plain is None:
            what = f"{_named(key)}: no {time_model} curve, and micro_batch_size {size} cannot be extrapolated"
            raise BadInput(profiles.model_file, what, "profile more sizes")
        values.append(plain[column] * tokens if curve is None and plain is not None else curve or 0.0)
        if curve is None and quantity is not None:
            warnings.append(f"no {time_model} curve of {key.type}: taken from its points, in proportion to the tokens")
    if min(values[:2]) < 0:
        what = f"{_named(key)}: the {time_model} curve is negative at micro_batch_size {size}"
        raise BadInput(profiles.model_file, what, "take another time_model or measure more sizes")
    if nearest != key:
        measured = nearest.sequence_length
        warnings.append(
            f"extrapolated: {_named(key)} at sequence_length {key.sequence_length}, nearest measured {measured}"
        )
    told = "; ".join(dict.fromkeys(warning for warning in warnings if warning is not None))
    return ComputeCost(values[0], values[1], max(0.0, values[2]), max(0.0, values[3]), told or None)


def _on_curve(profiles: Profiles, key: LayerKey, quantity: str, size: int, time_model: TimeModel) -> float | None:
    """The value of the mode's curve; None where the profile has none."""
    length = key.sequence_length
    for curve in profiles.fits.get((*key[:4], quantity), ()):
        one, linear, quadratic = curve.constant, curve.linear, curve.quadratic
        if time_model is TimeModel.SEQUENCE and curve.mode is FitMode.JOINT:
            return one + linear * size * length + quadratic * size * length**2
        if curve.mode.value != time_model.value:
            continue
        if time_model is TimeModel.SEQUENCE:
            return (one + linear * length + quadratic * length**2) * size / curve.micro_batch_size
        if curve.sequence_length == length:
            return one + linear * size
    return None


def _nearest_length(profiles: Profiles, key: LayerKey) -> LayerKey:
    """The key of the points whose length is nearest."""
    found = [other for other in profiles.layers if other[:4] == key[:4]]
    if not found:
        what = f"no point for {_named(key)}"
        raise BadInput(profiles.model_file, what, "add it to the profile settings and measure the probes again")
    return min(found, key=lambda other: abs(other.sequence_length - key.sequence_length))
