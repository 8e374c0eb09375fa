"""Time and memory of one layer according to the model profile."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardwright.estimate.parts import layer_parts
from shardwright.io import BadInput
from shardwright.key import ExpertKey, LayerKey
from shardwright.optimizers.registry import ADAMW, shards_of
from shardwright.plan.axes import axes_of
from shardwright.types import HEAD, ITEMSIZE, Model, Precision, Strategy
from shardwright.types.model_profile import FitMode, LayerFigures, Quantity, StateRow
from shardwright_search.cost_model.profiles import LayerPoints, Passes, Profiles
from shardwright_search.cost_model.time_model import TimeModel


class ComputeCost(NamedTuple):
    """The figures of one micro-batch through one layer on one rank, and a warning if they were not measured."""

    figures: LayerFigures[float]
    warning: str | None
    attention: Passes = (0.0, 0.0)
    """The seconds of both passes that are spent on attention scores, if positions are split over ranks."""


def slowest_compute(costs: Sequence[ComputeCost]) -> ComputeCost:
    """Return the largest of each figure over ranks of several node types that do the same work."""
    if len(costs) == 1:
        return costs[0]
    columns = zip(*(cost.figures for cost in costs), strict=True)
    forward_s, backward_s = map(max, zip(*(cost.attention for cost in costs), strict=True))
    warning = joined_warnings(cost.warning for cost in costs)
    return ComputeCost(LayerFigures(*map(max, columns)), warning, (forward_s, backward_s))


def joined_warnings(warnings: Iterable[str | None]) -> str | None:
    """Return all different warnings as one, or None if there are none."""
    return "; ".join(dict.fromkeys(warning for warning in warnings if warning is not None)) or None


def probed_tp_size(profiled: Iterable[int], degree: int, node_devices: int) -> int:
    """Return the profiled tensor-parallel degree for a degree: itself, if profiled or if a node can measure it.

    No probe has a group whose size does not divide the devices of a node. As its ranks compute and hold less than the
    ranks of a smaller group, its costs are rounded up to the costs of the largest profiled degree below it.
    """
    if node_devices % degree == 0 or degree in (known := set(profiled)):
        return degree
    return max((size for size in known if size < degree), default=degree)


_AGAIN = "add it to the profile settings and measure the probes again"
_IMPORT = (
    "it is not in the files that were imported: import it with --tp-sizes, --micro-batch-sizes or --sequence-parallel "
    "that have it, or leave it out of the plan or search"
)


def layer_cost(profiles: Profiles, key: LayerKey, micro_batch_size: int, time_model: TimeModel) -> ComputeCost:
    """Return the cost of a layer at a micro-batch of that many samples per tensor-parallel group.

    `interpolate`: piecewise linear between measured sizes; beyond them the line through the two outermost points, with
    a warning. `static`, `batch` and `sequence`: the profile's curves of these modes (Galvatron's three); the last
    serves lengths that were never profiled. Raises BadInput when the combination was not measured, or cannot be
    extended to this size.
    """
    if time_model is not TimeModel.INTERPOLATE:
        return _on_fits(profiles, key, micro_batch_size, time_model)
    points, strategy = profiles.layers.get(key), key.without("sequence_length")
    if points is None:
        problem = f"no point for {strategy} at sequence_length {key.sequence_length}"
        raise BadInput(
            profiles.model_file, problem, _IMPORT if profiles.is_imported else f"{_AGAIN}, or take time_model sequence"
        )
    figures, beyond = _at(points, micro_batch_size), _beyond(key, points, micro_batch_size)
    if figures is None or (beyond is not None and not _is_possible(figures, points)):
        sizes = points.micro_batch_sizes.tolist()
        problem = f"{strategy}: micro_batch_size {micro_batch_size} cannot be extrapolated from {sizes}"
        raise BadInput(profiles.model_file, problem, _to_measure(profiles, key, micro_batch_size))
    return ComputeCost(figures, beyond)


def _to_measure(profiles: Profiles, key: LayerKey, micro_batch_size: int) -> str:
    """Return which profile setting to change so that a micro-batch size is measured at a layer's length."""
    if profiles.is_imported:
        return _IMPORT
    strategy, here = key.without("sequence_length"), profiles.layers[key].micro_batch_sizes
    alike = [
        points.micro_batch_sizes
        for other, points in profiles.layers.items()
        if other.without("sequence_length") == strategy
    ]
    settings = [] if any(micro_batch_size in sizes for sizes in alike) else ["add it to micro_batch_sizes"]
    # At further lengths `grid: fewest` measures only the smallest size.
    settings += ["set grid to full"] if any(len(sizes) > len(here) for sizes in alike) else []
    changed = " and ".join(settings or ["set grid to full"])
    return f"{changed} in the profile settings and measure the probes again"


def expert_cost(profiles: Profiles, key: ExpertKey, rows: float) -> ComputeCost:
    """Return the cost of one rank's experts for a number of rows, interpolated, or extrapolated with a warning.

    Raises BadInput if the profile does not have experts by themselves, or not this number of them.
    """
    if (points := profiles.experts.get(key)) is None:
        known = any(other.type == key.type for other in profiles.experts)
        problem = f"no point for {key}" if known else f"does not say what experts of {key.type} cost by themselves"
        raise BadInput(profiles.model_file, problem, "profile the model again, for plans with expert parallelism")
    figures = _at(points, rows)
    if figures is None or not _is_possible(figures, points):
        sizes = points.micro_batch_sizes.tolist()
        problem = f"{key}: {rows:.0f} rows cannot be extrapolated from {sizes}"
        raise BadInput(profiles.model_file, problem, "profile more micro_batch_sizes")
    least, most = points.micro_batch_sizes[0], points.micro_batch_sizes[-1]
    inside = least <= rows <= most
    return ComputeCost(
        figures, None if inside else f"extrapolated: {key} at {rows:.0f} rows, measured {least} to {most}"
    )


def with_experts(rest: ComputeCost, replayed_bytes: float, experts: ComputeCost) -> ComputeCost:
    """Return the cost of a layer as the sum of its experts' cost and the remainder.

    Times and kept bytes add up. While experts work in a backward pass, the rank also holds `replayed_bytes`: the
    recomputed activations of the rest before them.
    """
    forward_s, backward_s, activation_bytes, _ = map(sum, zip(rest.figures, experts.figures, strict=True))
    workspace = max(rest.figures.workspace_bytes, replayed_bytes + experts.figures.workspace_bytes)
    figures = LayerFigures(forward_s, backward_s, activation_bytes, workspace)
    return ComputeCost(figures, joined_warnings((rest.warning, experts.warning)), rest.attention)


def states_of(profiles: Profiles, type_name: str, tp_size: int) -> StateRow:
    """Return a layer's parameter costs in a step; raise BadInput if the profile does not have that type and tp_size."""
    states = profiles.states.get(key := LayerKey(type=type_name, tp_size=tp_size))
    if states is None:
        remedy = _IMPORT if profiles.is_imported else _AGAIN
        raise BadInput(profiles.model_file, f"no states for {key}", remedy)
    return states


def _at(points: LayerPoints, size: float) -> LayerFigures[float] | None:
    """Return the figures at a micro-batch size, interpolated or extrapolated.

    None if there is a single point, from which nothing can be extrapolated.
    """
    sizes = points.micro_batch_sizes
    if sizes[0] <= size <= sizes[-1]:
        return LayerFigures(*(float(np.interp(size, sizes, column)) for column in points.values.T))
    if len(sizes) == 1:
        return None
    near, far = (0, 1) if size < sizes[0] else (-1, -2)
    slope = (points.values[near] - points.values[far]) / (sizes[near] - sizes[far])
    return _with_bytes((points.values[near] + slope * (size - sizes[near])).tolist())


def _is_possible(figures: LayerFigures[float], points: LayerPoints) -> bool:
    """Return whether times are above 0; the backward pass may take 0 if it does so at every measured size."""
    return figures.forward_s > 0 and (figures.backward_s > 0 or not points.values[:, 1].any())


def _with_bytes(values: Sequence[float]) -> LayerFigures[float]:
    """Return the figures, with bytes that are at least 0; extrapolated ones may be negative."""
    forward_s, backward_s, resident, workspace = values
    return LayerFigures(forward_s, backward_s, max(0.0, resident), max(0.0, workspace))


def _beyond(key: LayerKey, points: LayerPoints, size: int) -> str | None:
    """Return the warning for a micro-batch size outside the measured range; None if it is inside."""
    sizes = points.micro_batch_sizes
    if sizes[0] <= size <= sizes[-1]:
        return None
    strategy = key.without("sequence_length")
    return f"extrapolated: {strategy} at micro_batch_size {size}, measured {sizes[0]} to {sizes[-1]}"


def _on_fits(profiles: Profiles, key: LayerKey, size: int, time_model: TimeModel) -> ComputeCost:
    """Return the figures from the curves of a mode; without a curve, the nearest length's scaled by tokens.

    A warning says so.
    """
    nearest, strategy = _nearest_length(profiles, key), key.without("sequence_length")
    points = profiles.layers[nearest]
    plain = _at(points, size)
    tokens = key.sequence_length / nearest.sequence_length
    values, warnings = [], [_beyond(key, points, size)]
    for name in LayerFigures._fields:
        on_curve = _on_curve(profiles, key, name, size, time_model)
        if on_curve is None and plain is None:
            problem = f"{strategy}: no {time_model} curve, and micro_batch_size {size} cannot be extrapolated"
            raise BadInput(profiles.model_file, problem, "profile more sizes")
        values.append(getattr(plain, name) * tokens if on_curve is None else on_curve)
        if on_curve is None and name in list(Quantity):
            warnings.append(f"no {time_model} curve of {key.type}: taken from its points, in proportion to the tokens")
    figures = _with_bytes(values)
    if min(figures.forward_s, figures.backward_s) < 0:
        problem = f"{strategy}: the {time_model} curve is negative at micro_batch_size {size}"
        raise BadInput(profiles.model_file, problem, "take another time_model or measure more sizes")
    if nearest != key:
        lengths = f"sequence_length {key.sequence_length}, nearest measured {nearest.sequence_length}"
        warnings.append(f"extrapolated: {strategy} at {lengths}")
    return ComputeCost(figures, joined_warnings(warnings))


def _on_curve(profiles: Profiles, key: LayerKey, quantity: str, size: int, time_model: TimeModel) -> float | None:
    """Return the value of a figure by the mode's curve; None if the profile has no such curve."""
    length = key.sequence_length
    for curve in profiles.fits.get(key.without("sequence_length"), ()):
        if curve.quantity != quantity:
            continue
        constant, linear, quadratic = curve.constant, curve.linear, curve.quadratic
        if time_model is TimeModel.SEQUENCE and curve.mode is FitMode.JOINT:
            return constant + linear * size * length + quadratic * size * length**2
        if curve.mode.value != time_model.value:
            continue
        if time_model is TimeModel.SEQUENCE:
            return (constant + linear * length + quadratic * length**2) * size / curve.micro_batch_size
        if curve.sequence_length == length:
            return constant + linear * size
    return None


def _nearest_length(profiles: Profiles, key: LayerKey) -> LayerKey:
    """Return the profiled key with the nearest sequence_length that equals `key` otherwise; BadInput if none does."""
    alike = profiles.of_any_length(key)
    if not alike:
        raise BadInput(
            profiles.model_file,
            f"no point for {key.without('sequence_length')}",
            _IMPORT if profiles.is_imported else _AGAIN,
        )
    return min(alike, key=lambda other: abs(other.sequence_length - key.sequence_length))


# The cost of a head that computes its logits in chunks of positions, and again in the backward pass.


class LossChunks(NamedTuple):
    """The number of chunks in which a rank computes its logits, with the model and precision."""

    number: int
    model: Model
    precision: Precision

    def figures(
        self, whole: LayerFigures[float], strategy: Strategy, samples: int, states: StateRow
    ) -> LayerFigures[float]:
        """Return the figures of a head with chunks, from the figures of a head that computes all logits at once.

        Only one chunk's logits are kept. The backward pass repeats the forward pass, and adds each chunk's gradients of
        matrices to sums in float32 at least, at the rate at which the optimizer's step was profiled to move bytes.
        """
        kind, axes, itemsize = self.model.types[HEAD], axes_of(strategy), ITEMSIZE[self.precision.compute]
        kept = sum(part.inside for part in layer_parts(self.model, HEAD)[-1:]) / axes.layout.sample_ranks
        kept *= itemsize * axes.rank_samples(samples)
        held, wide = shards_of(kind, states.tp_size), max(itemsize, ITEMSIZE["float32"])
        trained = sum(each.numel for each in held)
        moved = self.number * trained * (itemsize + 2 * wide)
        step_bytes = ADAMW.step_bytes(held, self.precision)
        summed_s = moved * states.optimizer_s / step_bytes if step_bytes else 0.0
        return whole._replace(
            backward_s=whole.backward_s + whole.forward_s + summed_s,
            activation_bytes=max(0.0, whole.activation_bytes - kept * (1 - 1 / self.number)),
            workspace_bytes=whole.workspace_bytes + trained * (itemsize + wide),
        )
