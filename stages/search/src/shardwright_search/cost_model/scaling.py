"""Profiles whose times are so many times as long: what corrections, robust scenarios and what-ifs are made of."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwright_formats.key import LayerKey
from shardwright_formats.types.hardware_profile import HardwareProfile
from shardwright_formats.types.model_profile import FitRow, Quantity
from shardwright_search.cost_model.profiles import LayerPoints, Profiles


class Scaling(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The factors that kinds of numbers are multiplied by."""

    forward: float = 1.0
    backward: float = 1.0
    standard_errors: float = 0.0
    """How many standard errors of its own every time of a layer is longer besides."""
    reduction: float = 1.0
    """The factor of what reducing gradients was measured to add."""
    optimizer: float = 1.0
    step_overhead: float = 1.0
    memory: float = 1.0
    """The factor of all that a rank holds."""
    collectives: ArrayLike = 1.0
    """The factors of the points of the hardware profile [points], or one for all."""


def scaled(profiles: Profiles, by: Scaling) -> Profiles:
    """Return the profiles with every number multiplied.

    Curves through the points, which have no standard error of their own, take the median share of their points.
    """
    errors: dict[LayerKey, list[NDArray[Any]]] = {}
    for key, points in profiles.layers.items():
        errors.setdefault(key.without("sequence_length"), []).append(points.errors)
    return profiles._replace(
        hardware=_scaled_collectives(profiles.hardware, by.collectives),
        layers={key: _scaled_points(points, by) for key, points in profiles.layers.items()},
        fits={
            key: tuple(_scaled_curve(curve, errors.get(key, []), by) for curve in curves)
            for key, curves in profiles.fits.items()
        },
        states={
            key: msgspec.structs.replace(
                states,
                optimizer_s=states.optimizer_s * by.optimizer,
                reduction_s=states.reduction_s * by.reduction,
                scatter_s=states.scatter_s * by.reduction,
            )
            for key, states in profiles.states.items()
        },
        step_overhead_s=profiles.step_overhead_s * by.step_overhead,
        memory_factor=profiles.memory_factor * by.memory,
    )


def _scaled_points(points: LayerPoints, by: Scaling) -> LayerPoints:
    """Return the points with their times multiplied, and longer by their errors."""
    values = points.values.copy()
    values[:, :2] *= np.array([by.forward, by.backward]) * (1 + by.standard_errors * points.errors)
    return points._replace(values=values)


def _scaled_curve(curve: FitRow, errors: Sequence[NDArray[Any]], by: Scaling) -> FitRow:
    """Return a curve of times multiplied, and longer by the median of its points' errors; a curve of bytes as it is."""
    times = (Quantity.FORWARD_S, Quantity.BACKWARD_S)
    if curve.quantity not in times:
        return curve
    column = times.index(curve.quantity)
    factor = (by.forward, by.backward)[column]
    if errors:
        factor *= 1 + by.standard_errors * float(np.median(np.concatenate(errors)[:, column]))
    terms = {name: getattr(curve, name) * factor for name in ("constant", "linear", "quadratic")}
    return msgspec.structs.replace(curve, **terms)


def _scaled_collectives(hardware: HardwareProfile, factors: ArrayLike) -> HardwareProfile:
    """Return the profile with every repeat of a point multiplied by the point's factor."""
    repeats = hardware.repeats
    by_point = np.broadcast_to(factors, len(hardware.points))
    return replace(hardware, repeats=repeats.replace(time_s=repeats["time_s"] * by_point[repeats["point"]]))
