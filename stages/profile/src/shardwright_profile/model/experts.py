"""Layers with experts in two parts: the measured cost of the experts, and the rest of the measured layer."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.io.table import Source, Sourced
from shardwright.key import ExpertKey
from shardwright.plan.axes import Layout, layout_of
from shardwright.types import ExpertMeasurement, Measurement, Model, Recompute, RecomputedPart, Strategy
from shardwright.types.model_profile import ExpertRow, LayerFigures, LayerRow
from shardwright_profile.model.probe_results import ProbeResult


def _of_experts(kind: Recompute) -> Recompute:
    """Return the kind of recomputation that is measured for what this one does to experts."""
    if kind.replays_experts:
        return Recompute.SELECTIVE if kind is Recompute.SELECTIVE else Recompute.FULL
    return Recompute.ACTIVATIONS if RecomputedPart.EXPERT_ACTIVATIONS in kind.parts else Recompute.NONE


_LEAST = 0.01
"""The least share of a layer's time that remains without its experts, if noise hides the remainder."""


class TwoParts(NamedTuple):
    """Rows of experts, and rows of their layers without them, for expert parallelism."""

    experts: tuple[ExpertRow, ...]
    rests: tuple[LayerRow, ...]


def fit_experts(
    measurements: Sequence[tuple[Path, Measurement]],
    probe: ProbeResult,
    layers: Sequence[LayerRow],
    apart: Sequence[LayerRow],
) -> TwoParts:
    """Return the rows of both parts, at the speed of `probe`; none if no experts were measured in isolation.

    `layers`: rows of whole layers; `apart`: of those whose ranks have all experts each, for positions of their own.
    """
    measured = [one for _, m in measurements if m.experts is not UNSET for one in m.experts]
    if not measured:
        return TwoParts((), ())
    _check_once(measured, measurements[0][0])
    kinds = dict.fromkeys(row.recompute for row in layers)
    experts = tuple(_expert_rows(measured, kinds, probe.reference_s))
    alone = [row for row in layers if _layout(row).sample_ranks == 1]
    return TwoParts(experts, tuple(_rests(probe.plan.model, experts, [*alone, *apart])))


def _check_once(measured: Sequence[ExpertMeasurement], file: Path) -> None:
    probes = [one.probe for one in measured]
    twice = next((probe for number, probe in enumerate(probes) if probe in probes[:number]), None)
    if twice is not None:
        problem = f"{ExpertKey.from_fields(twice)} were measured twice at {twice.rows} rows"
        raise BadInput(file, problem, "pass one of the measurements")


def _expert_rows(
    measured: Iterable[ExpertMeasurement], kinds: Iterable[Recompute], reference_s: float
) -> Iterator[ExpertRow]:
    """Yield the rows of experts for the kinds of recomputation that layers have, at a speed of the machine."""
    asked = list(kinds)
    for one in measured:
        by = reference_s / one.reference_s
        figures = LayerFigures(
            Sourced(by * median(one.forward_s), Source.MEASURED),
            Sourced(by * median(one.backward_s), Source.MEASURED),
            Sourced(one.activation_bytes, Source.MEASURED),
            Sourced(one.workspace_bytes, Source.MEASURED),
        )
        for kind in asked:
            if _of_experts(kind) is one.probe.recompute:
                yield ExpertRow.from_figures(ExpertKey.from_fields(one.probe, recompute=kind), figures)


def _rests(model: Model, experts: Sequence[ExpertRow], layers: Iterable[LayerRow]) -> Iterator[LayerRow]:
    """Yield the rows of layers without their experts; in these probes each rank has all experts."""
    for row in layers:
        if (kind := model.types[row.type].experts) is UNSET:
            continue
        rows = row.micro_batch_size * row.sequence_length // _layout(row).sequence.size * kind.top_k
        key = ExpertKey(type=row.type, experts=kind.number, etp_size=1, recompute=row.recompute)
        plain = msgspec.structs.replace(key, recompute=Recompute.NONE)
        yield LayerRow.from_figures(row.key, _left(row, _at(experts, key, rows), _at(experts, plain, rows)))


def _layout(row: LayerRow) -> Layout:
    return layout_of(Strategy(tp_size=row.tp_size, dp_size=1, sequence_parallel=row.sequence_parallel))


def _at(experts: Sequence[ExpertRow], key: ExpertKey, rows: int) -> LayerFigures[float]:
    """Return the figures of experts at a number of rows, interpolated between measured ones."""
    points = sorted((row for row in experts if row.key.without("rows") == key), key=lambda row: row.rows)
    columns = zip(*(row.figures for row in points), strict=True)
    sizes = [row.rows for row in points]
    values = [float(np.interp(rows, sizes, [each.value for each in column])) for column in columns]
    return LayerFigures(*values)


def _left(row: LayerRow, experts: LayerFigures[float], plain: LayerFigures[float]) -> LayerFigures[Sourced]:
    """Return a layer's figures minus its experts' figures.

    The workspace of experts coexists with recomputed activations; the rest's workspace is what remains.
    """
    whole = row.figures
    times = [
        Sourced(max(all_of_it.value - inside, _LEAST * all_of_it.value), Source.DERIVED, all_of_it.error)
        for all_of_it, inside in zip(whole[:2], experts[:2], strict=True)
    ]
    forward, backward = times
    again = experts.workspace_bytes - plain.workspace_bytes
    return LayerFigures(
        forward,
        backward,
        Sourced(max(0.0, whole.activation_bytes.value - experts.activation_bytes), Source.DERIVED),
        Sourced(max(0.0, whole.workspace_bytes.value - again), Source.DERIVED),
    )
