"""From measured probes to a model profile."""

from collections.abc import Iterator, Sequence
from math import hypot
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from shardwright_formats.io.hdf5 import table_of
from shardwright_formats.types.measurement import Measurement
from shardwright_formats.types.model import EMBEDDING, HEAD
from shardwright_formats.types.model_profile import LAYERS as LAYER_COLUMNS
from shardwright_formats.types.model_profile import PROCESS, STATES, ModelProfile
from shardwright_formats.types.strategy import Recompute
from shardwright_profile.model.curves import fits_table
from shardwright_profile.model.differences import LayerPair, bytes_per_layer, layer_pairs, seconds_per_layer
from shardwright_profile.model.fit_states import OptimizerLine, StateRow, fit_optimizer_line, fit_states
from shardwright_profile.model.monotonicity import falling_times
from shardwright_profile.model.probe_results import LAYERS, Duration, ProbeKey, ProbeResult, SegmentCost, read_probes

__all__ = ["fit_profile"]


class _LayerRow(NamedTuple):
    """One row of the profile's table `layers`."""

    type: str
    key: ProbeKey
    cost: SegmentCost


def fit_profile(measurements: Sequence[tuple[Path, Measurement]]) -> ModelProfile:
    """The profile that the probes determine; every point is kept as it was measured.

    The same probes give the same profile, in whatever order their files come. Raises BadInput, naming the probes, where
    they cannot be compared, where one is missing, and where noise hides the cost of a layer.
    """
    origin, provenance, probes = read_probes(measurements)
    pairs = layer_pairs(probes)
    rows = sorted([*_block_rows(pairs), *_end_rows(probes)], key=lambda row: (row.type, row.key))
    line = fit_optimizer_line(probes)
    layers = table_of(LAYER_COLUMNS, map(_layer, rows))
    return ModelProfile(
        origin=origin,
        provenance=provenance._replace(notes="\n".join(falling_times(layers))),
        layers=layers,
        states=table_of(STATES, map(_state, sorted(fit_states(pairs, line)))),
        process=table_of(PROCESS, [_process(probes, line)]),
        fits=fits_table(layers),
    )


def _block_rows(pairs: Sequence[LayerPair]) -> Iterator[_LayerRow]:
    """Each block type under each key: the difference of its two probes; workspace is that of the shorter one."""
    for pair in pairs:
        yield _LayerRow(
            pair.type,
            pair.few.key,
            SegmentCost(
                forward=seconds_per_layer(pair, "forward time", lambda p: p.segments[LAYERS].forward),
                backward=seconds_per_layer(pair, "backward time", lambda p: p.segments[LAYERS].backward),
                activation_bytes=bytes_per_layer(
                    pair, "activation memory", lambda p: p.segments[LAYERS].activation_bytes
                ),
                workspace_bytes=pair.few.segments[LAYERS].workspace_bytes,
            ),
        )


def _end_rows(probes: Sequence[ProbeResult]) -> Iterator[_LayerRow]:
    """Embedding and head under each key without recomputation: mean time and largest memory of its probes."""
    plain = [probe for probe in probes if probe.key.recompute is Recompute.NONE]
    for key in dict.fromkeys(probe.key for probe in plain):
        for name in (EMBEDDING, HEAD):
            costs = [probe.segments[name] for probe in plain if probe.key == key]
            yield _LayerRow(
                name,
                key,
                SegmentCost(
                    forward=_mean([cost.forward for cost in costs]),
                    backward=_mean([cost.backward for cost in costs]),
                    activation_bytes=max(cost.activation_bytes for cost in costs),
                    workspace_bytes=max(cost.workspace_bytes for cost in costs),
                ),
            )


def _mean(durations: Sequence[Duration]) -> Duration:
    """Of probes measured apart: their errors are independent."""
    count = len(durations)
    return Duration(mean(d.median_s for d in durations), hypot(*(d.error_s for d in durations)) / count)


def _layer(row: _LayerRow) -> dict[str, object]:
    cost = row.cost
    return {
        "type": row.type,
        **row.key._asdict(),
        "forward_s": cost.forward.median_s,
        "forward_error_s": cost.forward.error_s,
        "backward_s": cost.backward.median_s,
        "backward_error_s": cost.backward.error_s,
        "activation_bytes": cost.activation_bytes,
        "workspace_bytes": cost.workspace_bytes,
        **dict.fromkeys(("forward_source", "backward_source", "activation_source", "workspace_source"), "measured"),
    }


def _state(row: StateRow) -> dict[str, object]:
    """All `derived`: times come off a line, and the ends' bytes from a split."""
    sources = dict.fromkeys(("bytes_source", "optimizer_source", "reduction_source"), "derived")
    return row._asdict() | sources


def _process(probes: Sequence[ProbeResult], line: OptimizerLine) -> dict[str, object]:
    """The largest process, and what of a step is neither layers nor reduction nor per parameter."""
    overhead_s = max(0.0, median(_unexplained_s(probe) for probe in probes))
    return {
        "process_bytes": max(probe.process_bytes for probe in probes),
        "resident_bytes": max(probe.resident_bytes for probe in probes),
        "step_overhead_s": overhead_s + line.constant_s,
        **dict.fromkeys(("process_source", "resident_source", "step_overhead_source"), "derived"),
    }


def _unexplained_s(probe: ProbeResult) -> float:
    microbatch_s = sum(cost.forward.median_s + cost.backward.median_s for cost in probe.segments.values())
    return probe.step_s - probe.plan.num_microbatches * microbatch_s - probe.reduction_s - probe.optimizer_s
