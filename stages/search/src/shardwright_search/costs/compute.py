"""Time and memory of one layer, read off the model profile."""

from typing import NamedTuple

import numpy as np

from shardwright_formats.errors import BadInput
from shardwright_search.profiles import LayerKey, LayerPoints, Profiles, States

__all__ = ["LayerCost", "layer_cost", "optimizer_time_s", "states_of"]


class LayerCost(NamedTuple):
    """One microbatch through one layer on one rank."""

    forward_s: float
    backward_s: float
    activation_bytes: float
    transient_bytes: float
    warning: str | None


def layer_cost(profiles: Profiles, key: LayerKey, micro_batch_size: int) -> LayerCost:
    """Cost of a layer at a micro-batch of that many samples per tensor-parallel group.

    Piecewise linear between measured sizes; beyond them the line through the two outermost points, with a warning.
    Raises BadInput when the combination was not measured, or cannot be extended to this size.
    """
    named = f"{key.type} tp_size {key.tp_size} sequence_parallel {key.sequence_parallel} recompute {key.recompute}"
    points = profiles.layers.get(key)
    if points is None:
        raise BadInput(
            profiles.model_file,
            f"no point for {named} at sequence_length {key.sequence_length}",
            "add it to the profile settings and measure the probes again",
        )
    sizes = points.micro_batch_sizes
    if sizes[0] <= micro_batch_size <= sizes[-1]:
        forward_s, backward_s, held, moment = (
            float(np.interp(micro_batch_size, sizes, column)) for column in points.values.T
        )
        return LayerCost(forward_s, backward_s, held, moment, None)
    values = _extended(points, micro_batch_size) if len(sizes) > 1 else [-1.0]
    if min(values[:2]) <= 0:
        raise BadInput(
            profiles.model_file,
            f"{named}: micro_batch_size {micro_batch_size} cannot be extrapolated from {sizes.tolist()}",
            "add it to micro_batch_sizes of the profile settings and measure the probes again",
        )
    warning = f"extrapolated: {named} at micro_batch_size {micro_batch_size}, measured {sizes[0]} to {sizes[-1]}"
    return LayerCost(values[0], values[1], max(0.0, values[2]), max(0.0, values[3]), warning)


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


def optimizer_time_s(profiles: Profiles, type_name: str, tp_size: int, shards: int) -> float:
    """Time of the optimizer's step over one layer, spread evenly over the ranks that share its state."""
    return states_of(profiles, type_name, tp_size).optimizer_s / shards


def _extended(points: LayerPoints, size: int) -> list[float]:
    near, far = (0, 1) if size < points.micro_batch_sizes[0] else (-1, -2)
    start, other = points.micro_batch_sizes[near], points.micro_batch_sizes[far]
    slope = (points.values[near] - points.values[far]) / (start - other)
    return [float(value) for value in points.values[near] + slope * (size - start)]
