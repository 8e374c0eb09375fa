"""Profiles whose times are so many times as long: what corrections, robust scenarios and what-ifs are made of."""

from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from shardwright_formats.types.hardware_profile import HardwareProfile
from shardwright_formats.types.model_profile import FitRow
from shardwright_search.cost_model.profiles import CurveKey, LayerPoints, Profiles


class Scaling(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What each kind of number is multiplied by."""

    forward: float = 1.0
    backward: float = 1.0
    standard_errors: float = 0.0
    """By so many of its own, every time of a layer is longer besides."""
    reduction: float = 1.0
    """What reducing gradients was measured to add."""
    optimizer: float = 1.0
    step_overhead: float = 1.0
    memory: float = 1.0
    """All that a rank holds."""
    collectives: ArrayLike = 1.0
    """Of each point of the hardware profile [points], or one for all."""


def scaled(profiles: Profiles, by: Scaling) -> Profiles:
    """The profiles with every number multiplied.

    Curves through the points, which have no standard error of their own, take the median share of their points.
    """
    return profiles._replace(
        hardware=_scaled_collectives(profiles.hardware, by.collectives),
        layers={key: _scaled_points(points, by) for key, points in profiles.layers.items()},
        fits={
            key: tuple(_scaled_curve(curve, _curve_factor(profiles, key, by)) for curve in curves)
            for key, curves in profiles.fits.items()
        },
        states={
            key: msgspec.structs.replace(
                of,
                optimizer_s=of.optimizer_s * by.optimizer,
                reduction_s=of.reduction_s * by.reduction,
                scatter_s=of.scatter_s * by.reduction,
            )
            for key, of in profiles.states.items()
        },
        step_overhead_s=profiles.step_overhead_s * by.step_overhead,
        memory_factor=profiles.memory_factor * by.memory,
    )


def _scaled_points(points: LayerPoints, by: Scaling) -> LayerPoints:
    values = points.values.copy()
    values[:, :2] *= np.array([by.forward, by.backward]) * (1 + by.standard_errors * points.errors)
    return points._replace(values=values)


def _curve_factor(profiles: Profiles, key: CurveKey, by: Scaling) -> float:
    columns = {"forward_s": (0, by.forward), "backward_s": (1, by.backward)}
    if (quantity := key[-1]) not in columns:
        return 1.0
    column, factor = columns[quantity]
    shares = [points.errors[:, column] for of, points in profiles.layers.items() if of[:4] == key[:4]]
    return factor * (1 + by.standard_errors * float(np.median(np.concatenate(shares)))) if shares else factor


def _scaled_curve(curve: FitRow, factor: float) -> FitRow:
    terms = {name: getattr(curve, name) * factor for name in ("constant", "linear", "quadratic")}
    return msgspec.structs.replace(curve, **terms)


def _scaled_collectives(hardware: HardwareProfile, factors: ArrayLike) -> HardwareProfile:
    """Every repeat of a point times the point's factor."""
    repeats = hardware.repeats
    every = np.broadcast_to(factors, len(hardware.points))
    return replace(hardware, repeats=repeats.replace(time_s=repeats["time_s"] * every[repeats["point"]]))
