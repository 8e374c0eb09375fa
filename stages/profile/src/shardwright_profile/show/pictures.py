"""Pictures of profiles: measured points, the curves through them, and what these leave over."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from shardwright_formats.types.hardware_profile import HardwareProfile
from shardwright_formats.types.model_profile import FitMode, ModelProfile
from shardwright_profile.model.curves import design_of

__all__ = ["hardware_picture", "model_picture", "save_picture"]

_STYLE: Any = {
    "svg.hashsalt": "shardwright",
    "font.size": 8,
    "legend.fontsize": 6,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
_PANELS = (
    ("forward_s", 1e3, "forward, ms"),
    ("backward_s", 1e3, "backward, ms"),
    ("activation_bytes", 2**-20, "activations, MiB"),
)
_MARKERS = "os^vD*PX"


class _Series(NamedTuple):
    """The points of one quantity of one layer type under one strategy at one length, by micro-batch size."""

    label: str
    sizes: NDArray[Any]
    values: NDArray[Any]
    errors: NDArray[Any]
    curve: NDArray[Any] | None
    """Coefficients of the line in the batch, where there is one."""


def model_picture(profile: ModelProfile) -> Figure:
    """For each layer type a column: forward, backward and activations of a microbatch, each above its residuals.

    Points have their standard errors; lines are the fits of mode `batch`, residuals (fit - point) / point.
    """
    types = list(dict.fromkeys(name.decode() for name in profile.layers["type"]))
    looks: dict[str, int] = {}
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4 * len(types), 12), layout="constrained")
        figure.suptitle(f"{profile.origin.model} on {profile.origin.device}, {profile.provenance.date}")
        axes = figure.subplots(2 * len(_PANELS), len(types), squeeze=False, height_ratios=[3, 1] * len(_PANELS))
        for column, name in enumerate(types):
            for panel, (quantity, scale, label) in enumerate(_PANELS):
                above, below = axes[2 * panel, column], axes[2 * panel + 1, column]
                for series in _series(profile, name, quantity):
                    number = looks.setdefault(series.label, len(looks))
                    _draw(above, below, series, scale, number)
                above.set_title(f"{name}: {label}")
                below.set_ylabel("residual, %")
                below.axhline(0, color="black", linewidth=0.5)
            axes[-1, column].set_xlabel("micro-batch size, samples")
        handles = {
            label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)
    return figure


def hardware_picture(profile: HardwareProfile) -> Figure:
    """Median time against message size, by collective, with the middle half of the repeats as bars."""
    kinds = sorted(profile.curves)
    names = list(dict.fromkeys(key.collective for key in kinds))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4 * len(names), 4), layout="constrained")
        figure.suptitle(f"{profile.cluster}: {profile.device}, {profile.backend}, {profile.provenance.date}")
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            for number, key in enumerate(key for key in kinds if key.collective == name):
                points = [i for i in range(len(profile.points["collective"])) if profile.key(i) == key]
                points.sort(key=lambda i: int(profile.points["message_bytes"][i]))
                sizes = profile.points["message_bytes"][points]
                low, middle, high = np.array([np.quantile(profile.times_s(i), [0.25, 0.5, 0.75]) for i in points]).T
                place = "across nodes" if key.across_nodes else "in a node"
                layout = "consecutive" if key.consecutive else "strided"
                axis.errorbar(
                    sizes,
                    middle * 1e3,
                    yerr=[(middle - low) * 1e3, (high - middle) * 1e3],
                    marker=_MARKERS[number % len(_MARKERS)],
                    markersize=3,
                    linewidth=1,
                    label=f"{key.group_size} {layout} ranks {place}",
                )
            axis.set(title=name, xscale="log", yscale="log", xlabel="message, bytes", ylabel="time, ms")
            axis.legend()
    return figure


def save_picture(figure: Figure, path: Path, kind: str) -> None:
    """Write a picture as `svg`, `png` or `pdf`; the same figure gives the same SVG, without date or random names."""
    with mpl.rc_context(_STYLE):
        figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _draw(above: Axes, below: Axes, series: _Series, scale: float, number: int) -> None:
    colour, marker = f"C{number % 10}", _MARKERS[number % len(_MARKERS)]
    above.errorbar(
        series.sizes,
        series.values * scale,
        yerr=series.errors * scale,
        color=colour,
        marker=marker,
        markersize=3,
        linestyle="none",
        label=series.label,
    )
    if series.curve is None:
        return
    grid = np.linspace(series.sizes.min(), series.sizes.max(), 50)
    above.plot(grid, _on_line(series.curve, grid) * scale, color=colour, linewidth=0.8)
    residual = _on_line(series.curve, series.sizes) / series.values - 1
    below.plot(series.sizes, 100 * residual, color=colour, marker=marker, markersize=3, linestyle="none")


def _on_line(curve: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    value: NDArray[Any] = design_of(FitMode.BATCH, sizes, np.ones_like(sizes)) @ curve
    return value


def _series(profile: ModelProfile, name: str, quantity: str) -> Iterator[_Series]:
    layers = profile.layers

    def strategy(row: int) -> tuple[object, ...]:
        return tuple(layers[c][row] for c in ("tp_size", "sequence_parallel", "recompute", "sequence_length"))

    rows = [i for i in range(len(layers["type"])) if layers["type"][i] == name.encode() and layers[quantity][i] > 0]
    for key, found in groupby(sorted(rows, key=strategy), key=strategy):
        points = sorted(found, key=lambda i: int(layers["micro_batch_size"][i]))
        errors = (
            layers[f"{quantity.removesuffix('_s')}_error_s"][points]
            if quantity.endswith("_s")
            else np.zeros(len(points))
        )
        tp_size, split, recompute, length = key
        assert isinstance(split, bytes) and isinstance(recompute, bytes)
        yield _Series(
            f"tp {tp_size} {split.decode()}, recompute {recompute.decode()}, {length} tokens",
            layers["micro_batch_size"][points],
            layers[quantity][points].astype(float),
            errors,
            _batch_line(profile, name, quantity, key),
        )


def _batch_line(profile: ModelProfile, name: str, quantity: str, key: Sequence[object]) -> NDArray[Any] | None:
    fits = profile.fits
    wanted = (name.encode(), quantity.encode(), FitMode.BATCH.value.encode(), *key)
    columns = ("type", "quantity", "mode", "tp_size", "sequence_parallel", "recompute", "sequence_length")
    for row in range(len(fits["type"])):
        if tuple(fits[column][row] for column in columns) == wanted:
            return np.array([fits[c][row] for c in ("constant", "linear", "quadratic")])
    return None
