"""The fit of a model profile to measured probes."""

from collections.abc import Iterator, Sequence
from math import hypot
from pathlib import Path
from statistics import mean, median

import msgspec

from shardwright_estimate.curves import fits_table
from shardwright_formats.io.table import Source, Sourced, Table
from shardwright_formats.key import LayerKey, rows_by_key
from shardwright_formats.semantics.differences import Duration
from shardwright_formats.types import EMBEDDING, HEAD, DataParallel, Measurement, Recompute
from shardwright_formats.types.model_profile import LayerFigures, LayerRow, ModelProfile, ProcessRow, StateRow
from shardwright_profile.model.differences import LayerPair, bytes_per_layer, layer_pairs, seconds_per_layer
from shardwright_profile.model.fit_states import OptimizerLine, fit_optimizer_line, fit_states
from shardwright_profile.model.fit_zero import zero_rates
from shardwright_profile.model.monotonicity import falling_times
from shardwright_profile.model.probe_results import LAYERS, ProbeResult, read_probes
from shardwright_profile.model.uncertainty import uncertain_times


def fit_profile(measurements: Sequence[tuple[Path, Measurement]]) -> ModelProfile:
    """Return the profile that the probes determine; every point is kept as it was measured.

    The same probes give the same profile, in whatever order their files come. Raises BadInput, naming the probes, where
    they cannot be compared, where one is missing, and where noise hides the cost of a layer.
    """
    origin, provenance, all_probes = read_probes(measurements)
    probes = [probe for probe in all_probes if probe.data_parallel is DataParallel.DDP]
    pairs = layer_pairs(probes)
    layers = sorted([*_block_rows(pairs), *_end_rows(probes)], key=lambda row: row.key)
    line = fit_optimizer_line(probes)
    states = sorted(fit_states(pairs, line, zero_rates(all_probes)), key=lambda row: (row.type, row.tp_size))
    return ModelProfile(
        origin=origin,
        provenance=msgspec.structs.replace(
            provenance, notes="\n".join((*uncertain_times(all_probes, layers), *falling_times(layers)))
        ),
        layers=Table.from_rows(LayerRow, layers),
        states=Table.from_rows(StateRow, states),
        process=Table.from_rows(ProcessRow, [_process(probes, line)]),
        fits=fits_table(layers),
    )


def _block_rows(pairs: Sequence[LayerPair]) -> Iterator[LayerRow]:
    """Yield each block type under each key: the difference of its two probes, with the workspace of the shorter one."""
    for pair in pairs:
        figures = LayerFigures(
            _measured(*seconds_per_layer(pair, "forward time", lambda probe: probe.segments[LAYERS].forward)),
            _measured(*seconds_per_layer(pair, "backward time", lambda probe: probe.segments[LAYERS].backward)),
            _measured(
                bytes_per_layer(pair, "activation memory", lambda probe: probe.segments[LAYERS].activation_bytes)
            ),
            _measured(pair.few.segments[LAYERS].workspace_bytes),
        )
        yield LayerRow.from_figures(LayerKey.from_fields(pair.few.key, type=pair.type), figures)


def _end_rows(probes: Sequence[ProbeResult]) -> Iterator[LayerRow]:
    """Yield embedding and head under each key without recomputation: mean time and largest memory of its probes."""
    for key, alike in rows_by_key(probe for probe in probes if probe.key.recompute is Recompute.NONE).items():
        for name in (EMBEDDING, HEAD):
            costs = [probe.segments[name] for probe in alike]
            figures = LayerFigures(
                _measured(*_mean([cost.forward.slowest for cost in costs])),
                _measured(*_mean([cost.backward.slowest for cost in costs])),
                _measured(max(cost.activation_bytes for cost in costs)),
                _measured(max(cost.workspace_bytes for cost in costs)),
            )
            yield LayerRow.from_figures(LayerKey.from_fields(key, type=name), figures)


def _measured(value: float, error: float = 0.0) -> Sourced:
    """Return a measured number with its standard error."""
    return Sourced(value, Source.MEASURED, error)


def _mean(durations: Sequence[Duration]) -> Duration:
    """Return the mean of durations whose errors are independent, as those of probes measured apart are."""
    count = len(durations)
    return Duration(mean(d.median_s for d in durations), hypot(*(d.error_s for d in durations)) / count)


def _process(probes: Sequence[ProbeResult], line: OptimizerLine) -> ProcessRow:
    """Return the largest process, and what of a step is neither layers nor reduction nor per parameter."""
    overhead_s = max(0.0, median(_unexplained_s(probe) for probe in probes))
    return ProcessRow(
        process_bytes=max(probe.process_bytes for probe in probes),
        process_source=Source.DERIVED,
        communicator_bytes=probes[0].communicator_bytes,
        communicator_source=Source.ASSUMED if probes[0].communicator_bytes else Source.DERIVED,
        resident_bytes=max(probe.resident_bytes for probe in probes),
        resident_source=Source.DERIVED,
        step_overhead_s=overhead_s + line.constant_s,
        step_overhead_source=Source.DERIVED,
        reference_s=probes[0].reference_s,
        reference_source=Source.DERIVED,
    )


def _unexplained_s(probe: ProbeResult) -> float:
    return probe.step_s - probe.plan.num_microbatches * probe.microbatch_s - probe.reduction_s - probe.optimizer_s
