"""From measured probes to a model profile."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from shardwright_formats.measurement import Measurement
from shardwright_formats.model import EMBEDDING, HEAD
from shardwright_formats.model_profile import ModelProfile
from shardwright_formats.strategy import Recompute
from shardwright_formats.tables import Table
from shardwright_profile.differences import LayerPair, bytes_per_layer, layer_pairs, seconds_per_layer
from shardwright_profile.fit_states import OptimizerLine, StateRow, fit_optimizer_line, fit_states
from shardwright_profile.probe_results import LAYERS, ProbeKey, ProbeResult, SegmentCost, read_probes

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
    origin, probes = read_probes(measurements)
    pairs = layer_pairs(probes)
    rows = sorted([*_block_rows(pairs), *_end_rows(probes)], key=lambda row: (row.type, row.key))
    line = fit_optimizer_line(probes)
    sequence_length = probes[0].model.sequence_length
    return ModelProfile(
        origin=origin,
        layers=_layers_table(rows, sequence_length),
        states=_states_table(sorted(fit_states(pairs, line))),
        process=_process_table(probes, line),
    )


def _block_rows(pairs: Sequence[LayerPair]) -> Iterator[_LayerRow]:
    """Each block type under each key: the difference of its two probes; transients are those of the shorter one."""
    for pair in pairs:
        yield _LayerRow(
            pair.type,
            pair.few.key,
            SegmentCost(
                forward_s=seconds_per_layer(pair, "forward time", lambda p: p.segments[LAYERS].forward_s),
                backward_s=seconds_per_layer(pair, "backward time", lambda p: p.segments[LAYERS].backward_s),
                activation_bytes=bytes_per_layer(
                    pair, "activation memory", lambda p: p.segments[LAYERS].activation_bytes
                ),
                transient_bytes=pair.few.segments[LAYERS].transient_bytes,
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
                    forward_s=mean(cost.forward_s for cost in costs),
                    backward_s=mean(cost.backward_s for cost in costs),
                    activation_bytes=max(cost.activation_bytes for cost in costs),
                    transient_bytes=max(cost.transient_bytes for cost in costs),
                ),
            )


def _layers_table(rows: Sequence[_LayerRow], sequence_length: int) -> Table:
    return {
        "type": _names([row.type for row in rows]),
        "tp_size": _whole([row.key.tp_size for row in rows]),
        "sequence_parallel": _names([row.key.sequence_parallel for row in rows]),
        "recompute": _names([row.key.recompute for row in rows]),
        "micro_batch_size": _whole([row.key.micro_batch_size for row in rows]),
        "sequence_length": _whole([sequence_length] * len(rows)),
        "forward_s": np.array([row.cost.forward_s for row in rows]),
        "backward_s": np.array([row.cost.backward_s for row in rows]),
        "activation_bytes": _whole([row.cost.activation_bytes for row in rows]),
        "transient_bytes": _whole([row.cost.transient_bytes for row in rows]),
        "source": _names(["measured"] * len(rows)),
    }


def _states_table(rows: Sequence[StateRow]) -> Table:
    """Every row is `derived`: times come off a line, and the ends' bytes from a split."""
    return {
        "type": _names([row.type for row in rows]),
        "tp_size": _whole([row.tp_size for row in rows]),
        "parameter_bytes": _whole([row.parameter_bytes for row in rows]),
        "gradient_bytes": _whole([row.gradient_bytes for row in rows]),
        "optimizer_bytes": _whole([row.optimizer_bytes for row in rows]),
        "optimizer_s": np.array([row.optimizer_s for row in rows]),
        "reduction_s": np.array([row.reduction_s for row in rows]),
        "reduction_ranks": _whole([row.reduction_ranks for row in rows]),
        "source": _names(["derived"] * len(rows)),
    }


def _process_table(probes: Sequence[ProbeResult], line: OptimizerLine) -> Table:
    """One `derived` row: the largest process, and what of a step is neither layers nor reduction nor per parameter."""
    overhead_s = max(0.0, median(_unexplained_s(probe) for probe in probes))
    return {
        "process_bytes": _whole([max(probe.process_bytes for probe in probes)]),
        "resident_bytes": _whole([max(probe.resident_bytes for probe in probes)]),
        "step_overhead_s": np.array([overhead_s + line.constant_s]),
        "source": _names(["derived"]),
    }


def _unexplained_s(probe: ProbeResult) -> float:
    microbatch_s = sum(cost.forward_s + cost.backward_s for cost in probe.segments.values())
    return probe.step_s - probe.plan.num_microbatches * microbatch_s - probe.reduction_s - probe.optimizer_s


def _names(values: Sequence[str]) -> "np.ndarray[tuple[int], np.dtype[np.bytes_]]":
    return np.array([value.encode() for value in values], dtype=np.bytes_)


def _whole(values: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, dtype=np.int64)
