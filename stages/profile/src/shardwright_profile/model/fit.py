"""The fit of a model profile to measured probes: layers, states, ZeRO, process, and a check of context parallelism."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from shardwright.estimate.curves import fits_table, of_other_shares, on_joint_curve
from shardwright.io import BadInput
from shardwright.io.table import Source, Table
from shardwright.key import LayerKey
from shardwright.plan.axes import axes_of
from shardwright.types import EMBEDDING, HEAD, DataParallel, Measurement, Model
from shardwright.types.model_profile import (
    ContextRow,
    ExpertRow,
    FitMode,
    FitRow,
    LayerRow,
    ModelProfile,
    ProcessRow,
    Quantity,
    StateRow,
)
from shardwright_profile.model.layers import (
    block_rows,
    end_rows,
    falling_times,
    fit_experts,
    hidden_replays,
    hidden_rests,
    rest_rows,
    uncertain_times,
    with_replays,
)
from shardwright_profile.model.probe_results import (
    BACKWARD,
    FORWARD,
    LayerPair,
    ProbeResult,
    bytes_per_layer,
    layer_pairs,
    read_probes,
    seconds_per_layer,
)
from shardwright_profile.model.probes import is_apart


class OptimizerLine(NamedTuple):
    """The seconds of the optimizer's step: `constant_s + s_per_parameter * parameters of a rank`."""

    constant_s: float
    s_per_parameter: float


class ZeroRates(NamedTuple):
    """The times that ZeRO adds, in seconds per sharded parameter."""

    ranks: int
    scatter_s: float
    """Seconds that the reduction of gradients adds to a step, per trained parameter."""
    gather_s: float
    """Seconds that gathering parameters adds to one pass of a microbatch, per parameter."""


def fit_profile(measurements: Sequence[tuple[Path, Measurement]]) -> ModelProfile:
    """Return the profile that the probes determine; points are stored as measured, except as in `with_replays`.

    The same probes give the same profile, whatever the order of their files. Raises BadInput naming the probes if they
    cannot be compared, if one is missing, or if noise hides the cost of a layer.
    """
    origin, provenance, results = read_probes(measurements)
    all_probes = tuple(probe for probe in results if probe.cp_size == 1)
    replicated = [probe for probe in all_probes if probe.data_parallel is DataParallel.DDP]
    probes = [probe for probe in replicated if not is_apart(probe.plan)]
    pairs = layer_pairs(probes)
    measured = list(block_rows(pairs))
    layers = sorted([*with_replays(measured), *rest_rows(pairs), *end_rows(probes)], key=lambda row: row.key)
    apart = block_rows(layer_pairs([probe for probe in replicated if is_apart(probe.plan)]))
    experts, rests = fit_experts(measurements, probes[0], layers, list(apart))
    fits = fits_table(layers)
    context = list(context_rows(results, layers, fits.rows))
    line = fit_optimizer_line(probes)
    states = sorted(fit_states(pairs, line, zero_rates(all_probes)), key=lambda row: (row.type, row.tp_size))
    return ModelProfile(
        origin=origin,
        provenance=msgspec.structs.replace(
            provenance,
            notes="\n".join(
                (
                    *filter(None, [provenance.notes]),
                    *uncertain_times(all_probes, layers),
                    *hidden_replays(measured, layers),
                    *hidden_rests(pairs),
                    *falling_times(layers),
                    *context_notes(context),
                )
            ),
        ),
        layers=Table.from_rows(LayerRow, layers),
        states=Table.from_rows(StateRow, states),
        process=Table.from_rows(ProcessRow, [_process(probes, line)]),
        fits=fits,
        rests=Table.from_rows(LayerRow, sorted(rests, key=lambda row: row.key)),
        experts=Table.from_rows(ExpertRow, sorted(experts, key=lambda row: row.key)),
        context=Table.from_rows(ContextRow, context),
    )


def _process(probes: Sequence[ProbeResult], line: OptimizerLine) -> ProcessRow:
    """Return the row of the process with the most memory, and of the time of a step that no other row explains."""
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


_STATE_BYTES: tuple[tuple[str, Callable[[ProbeResult], int]], ...] = (
    ("parameters_bytes", lambda probe: probe.parameter_bytes),
    ("gradients_bytes", lambda probe: probe.gradient_bytes),
    ("optimizer_bytes", lambda probe: probe.optimizer_bytes),
)


def parameter_parts(probe: ProbeResult) -> int:
    """Return the number of ranks among which tensor parallelism splits the parameters of layers."""
    return axes_of(probe.plan.layers[0]).dense.tensor.size


def fit_optimizer_line(probes: Sequence[ProbeResult]) -> OptimizerLine:
    """Return the least-squares line through the optimizer times of all probes, with non-negative coefficients.

    If the unconstrained line has a negative coefficient, the best line with that coefficient at zero is taken: the
    optimum under the constraint (Lawson & Hanson 1974). Thus no layer's optimizer time is negative.
    """
    sizes = [float(_rank_parameters(probe)) for probe in probes]
    times_s = [probe.optimizer_s for probe in probes]
    mean_size, mean_s = sum(sizes) / len(sizes), sum(times_s) / len(times_s)
    deviations = sum((size - mean_size) ** 2 for size in sizes)
    together = sum((size - mean_size) * (time_s - mean_s) for size, time_s in zip(sizes, times_s, strict=True))
    slope = together / deviations if deviations else 0.0
    if slope <= 0:
        return OptimizerLine(mean_s, 0.0)
    if mean_s >= slope * mean_size:
        return OptimizerLine(mean_s - slope * mean_size, slope)
    through_zero = sum(size * time_s for size, time_s in zip(sizes, times_s, strict=True)) / sum(s * s for s in sizes)
    return OptimizerLine(0.0, through_zero)


def fit_states(pairs: Sequence[LayerPair], line: OptimizerLine, zero: ZeroRates | None) -> tuple[StateRow, ...]:
    """Return one row per tp_size and layer type: bytes of states, and times of optimizer, reduction and ZeRO.

    A block's bytes are the difference of its probes, the maximum over strategies and micro-batch sizes. The remaining
    bytes of a probe are divided among embedding, head and the types that occur once, in proportion to their parameters
    or, for gradients and optimizer states, to their trained parameters. The time of the gradient reduction is
    proportional to the gradient bytes. Probes under Ulysses are left out: tp_size does not split their parameters.
    Probes whose embedding and head are sharded differently from their layers give only the bytes and optimizer times of
    their layers: their ranks reduce in several groups at once.
    """
    usable = [pair for pair in pairs if not axes_of(pair.few.plan.layers[0]).exchanges_heads]
    if not usable:
        raise BadInput(pairs[0].few.file, "every probe is under ulysses", "measure also sequence_parallel 'none'")
    return tuple(
        row
        for parts in sorted({parameter_parts(pair.few) for pair in usable})
        for row in _state_rows(parts, [pair for pair in usable if parameter_parts(pair.few) == parts], line, zero)
    )


def _state_rows(
    tp_size: int, pairs: Sequence[LayerPair], line: OptimizerLine, zero: ZeroRates | None
) -> Iterator[StateRow]:
    model = pairs[0].few.plan.model
    columns = [_state_bytes(tp_size, pairs, quantity, bytes_of) for quantity, bytes_of in _STATE_BYTES]
    probes = [probe for pair in pairs for probe in (pair.few, pair.many)]
    uniform = pairs[0].few.is_uniform
    ranks, rate = (_reduction_ranks(probes), _reduction_s_per_byte(probes)) if uniform else (1, 0.0)
    for name in (EMBEDDING, *pairs[0].few.counts, HEAD) if uniform else pairs[0].few.counts:
        parameters, gradients, optimizer = (column[name] for column in columns)
        count, trained = model.types[name].parameter_count(tp_size), model.types[name].trained_count(tp_size)
        # All are derived: times come from a line, and the bytes of embedding and head from a division of the rest.
        yield StateRow(
            type=name,
            tp_size=tp_size,
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer,
            bytes_source=Source.DERIVED,
            optimizer_s=line.s_per_parameter * trained,
            optimizer_source=Source.DERIVED,
            reduction_s=rate * gradients,
            reduction_ranks=ranks,
            reduction_source=Source.DERIVED if uniform else Source.ABSENT,
            scatter_s=zero.scatter_s * trained if zero else 0.0,
            gather_s=zero.gather_s * count if zero else 0.0,
            zero_ranks=zero.ranks if zero else 1,
            zero_source=Source.DERIVED if zero else Source.ABSENT,
        )


def _reduction_ranks(probes: Sequence[ProbeResult]) -> int:
    ranks = {axes_of(probe.plan.layers[0]).dense.states.size for probe in probes}
    if len(ranks) > 1:
        problem = f"probes of tp_size {probes[0].key.tp_size} reduce gradients over {sorted(ranks)} ranks"
        raise BadInput(probes[0].file, problem, "fit the probes of one kind of node at a time")
    return ranks.pop()


def _reduction_s_per_byte(probes: Sequence[ProbeResult]) -> float:
    """Return the seconds per gradient byte of the reduction: a least-squares slope through zero, at least 0.

    A reduction time is the difference of two backward passes, so noise may make single ones negative.
    """
    together = sum(probe.gradient_bytes * probe.reduction_s for probe in probes)
    squares = sum(probe.gradient_bytes**2 for probe in probes)
    return max(0.0, together / squares) if squares else 0.0


def _state_bytes(
    tp_size: int, pairs: Sequence[LayerPair], quantity: str, bytes_of: Callable[[ProbeResult], int]
) -> dict[str, int]:
    """Return the bytes of one kind of state on the fullest rank, by layer type."""
    by_type: dict[str, int] = {}
    for pair in pairs:
        by_type[pair.type] = max(by_type.get(pair.type, 0), bytes_per_layer(pair, quantity, bytes_of))
    few = pairs[0].few
    rest = bytes_of(few) - sum(few.counts[name] * held for name, held in by_type.items())
    if rest < 0:
        raise BadInput(
            few.file,
            f"{quantity} of {few.plan.name!r} are {-rest} bytes fewer than its layers have by their difference",
            "measure it again",
        )
    types, stored = few.plan.model.types, quantity == _STATE_BYTES[0][0]
    counts = {
        name: types[name].parameter_count(tp_size) if stored else types[name].trained_count(tp_size)
        for name in (EMBEDDING, *few.plan.model.reshaping, HEAD)
    }
    shares = {name: rest * count // max(1, sum(counts.values())) for name, count in counts.items()}
    return by_type | shares | {HEAD: rest - sum(shares.values()) + shares[HEAD]}


def _rank_parameters(probe: ProbeResult) -> int:
    """Return the number of parameters that the optimizer of one rank updates; tied parameters count once."""
    model, ends = probe.plan.model, axes_of(probe.plan.head).dense.tensor.size
    of_layers = sum(model.types[name].trained_count(parameter_parts(probe)) for name in model.layers)
    of_ends = sum(model.types[name].trained_count(ends) for name in (EMBEDDING, HEAD))
    return of_layers + of_ends - _tied_parameters(model, ends)


def _tied_parameters(model: Model, parts: int) -> int:
    ends = {p.name: p.numel(parts) for name in (EMBEDDING, HEAD) for p in model.types[name].trained_parameters}
    return sum(ends.get(second, 0) for _, second in model.tied)


def zero_rates(probes: Sequence[ProbeResult]) -> ZeroRates | None:
    """Return the times that ZeRO's messages add, compared with DDP for the same layers; None if a probe is missing.

    The first gather of each pass is spared, because the previous pass ended with that layer (`gathers_spared`).
    """
    by_kind = {probe.data_parallel: probe for probe in probes}
    zero2, zero3 = by_kind.get(DataParallel.ZERO2), by_kind.get(DataParallel.ZERO3)
    plain_s = None if zero3 is None else _plain_microbatch_s(zero3, probes)
    if zero2 is None or zero3 is None or plain_s is None:
        return None
    parts, types, names = parameter_parts(zero3), zero3.plan.model.types, zero3.plan.model.layers
    layers, ends = (sum(types[name].parameter_count(parts) for name in some) for some in (names, (EMBEDDING, HEAD)))
    trained = sum(types[name].trained_count(parts) for name in (EMBEDDING, *names, HEAD))
    reduction_s = fmean((zero2.reduction_s, zero3.reduction_s))
    return ZeroRates(
        ranks=axes_of(zero3.plan.embedding).dense.states.size,
        scatter_s=max(0.0, reduction_s) / max(1, trained),
        gather_s=max(0.0, zero3.microbatch_s - plain_s) / (2 * layers + ends),
    )


def _plain_microbatch_s(zero3: ProbeResult, probes: Sequence[ProbeResult]) -> float | None:
    """Return the microbatch seconds of a ZeRO-3 probe's layers under DDP, from DDP probes with fewer layers."""
    alike = [probe for probe in probes if probe.data_parallel is DataParallel.DDP and probe.key == zero3.key]
    if not alike:
        return None
    few = min(alike, key=lambda probe: sum(probe.counts.values()))
    return few.microbatch_s + sum(probe.microbatch_s - few.microbatch_s for probe in alike)


# A check of derived times under context parallelism: the measured times of one rank's share over the derived times.


def context_rows(
    probes: Sequence[ProbeResult], layers: Sequence[LayerRow], fits: Sequence[FitRow]
) -> Iterator[ContextRow]:
    """Yield measured times and their ratios to the derived times, for each cp_size and layer type that was probed.

    Raises BadInput if the points determine no curve over micro-batch sizes and lengths.
    """
    for cp_size in sorted({probe.cp_size for probe in probes} - {1}):
        for pair in layer_pairs([probe for probe in probes if probe.cp_size == cp_size]):
            key = LayerKey.from_fields(pair.few.key, type=pair.type)
            forward, backward = seconds_per_layer(pair, FORWARD), seconds_per_layer(pair, BACKWARD)
            derived = [_derived_s(pair, key, quantity, layers, fits) for quantity in _TIMES]
            yield ContextRow(
                type=pair.type,
                cp_size=cp_size,
                micro_batch_size=key.micro_batch_size,
                sequence_length=key.sequence_length * cp_size,
                forward_s=forward.median_s,
                forward_error_s=forward.error_s,
                backward_s=backward.median_s,
                backward_error_s=backward.error_s,
                source=Source.MEASURED,
                forward_ratio=forward.median_s / derived[0],
                backward_ratio=backward.median_s / derived[1],
            )


def context_notes(rows: Sequence[ContextRow]) -> Iterator[str]:
    """Yield a sentence on each check of times derived for context parallelism."""
    for row in rows:
        ratios = f"{row.forward_ratio:.3g} times the derived forward time, {row.backward_ratio:.3g} times the backward"
        length = f"{row.sequence_length} tokens on {row.cp_size} ranks"
        yield f"{row.type} of a share of {length} was measured to take {ratios}: derived times are corrected by that"


_TIMES = (Quantity.FORWARD_S, Quantity.BACKWARD_S)


def _derived_s(
    pair: LayerPair, key: LayerKey, quantity: Quantity, layers: Sequence[LayerRow], fits: Sequence[FitRow]
) -> float:
    """Return the seconds that the planner derives for one rank's share: its own, plus attention to the other shares."""
    strategy = key.without("micro_batch_size", "sequence_length")
    curve = next(
        (fit for fit in fits if fit.mode is FitMode.JOINT and fit.quantity is quantity and fit.key == strategy), None
    )
    if curve is None:
        problem = f"the points of {strategy} determine no curve over lengths, which {pair.few.plan.name!r} checks"
        raise BadInput(pair.few.file, problem, "measure two micro_batch_sizes and two sequence_lengths at least")
    size, length, parts = key.micro_batch_size, key.sequence_length, pair.few.cp_size
    alone = next((row for row in layers if row.key == key), None)
    alone_s = on_joint_curve(curve, size, length) if alone is None else float(getattr(alone, quantity))
    return alone_s + of_other_shares(curve, size, length, parts)
