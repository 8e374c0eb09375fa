"""The layers of a profile, fitted to probes: blocks, ends, layers that occur once, and layers without their experts.

Noise hides small times: the profile's notes list what is taken instead, and which times are doubtful.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from math import hypot
from pathlib import Path
from statistics import mean, median

import msgspec
import numpy as np
from msgspec import UNSET

from shardwright.io import BadInput
from shardwright.io.table import Source, Sourced
from shardwright.key import ExpertKey, LayerKey, rows_by_key
from shardwright.plan.axes import Layout, layout_of
from shardwright.plan.differences import MAX_RELATIVE_ERROR, Duration
from shardwright.types.measurement import Measurement
from shardwright.types.model import EMBEDDING, HEAD, Model
from shardwright.types.model_profile import ExpertRow, LayerFigures, LayerRow
from shardwright.types.plan import ExpertMeasurement
from shardwright.types.strategy import Recompute, RecomputedPart, Strategy
from shardwright_profile.model.probe_results import (
    BACKWARD,
    FORWARD,
    LAYERS,
    LayerPair,
    ProbeResult,
    bytes_per_layer,
    seconds_per_layer,
)

LIKELY = 3.0
"""Number of standard errors above which a difference is hardly due to chance."""


def block_rows(pairs: Sequence[LayerPair]) -> Iterator[LayerRow]:
    """Yield a row for each block type and key: the difference of two probes, with the workspace of the smaller one."""
    for pair in pairs:
        figures = LayerFigures(
            _measured(*seconds_per_layer(pair, FORWARD)),
            _backward(pair),
            _measured(bytes_per_layer(pair, "activation memory", _held_bytes)),
            _measured(pair.few.segments[LAYERS].workspace_bytes),
        )
        yield LayerRow.from_figures(LayerKey.from_fields(pair.few.key, type=pair.type), figures)


def _held_bytes(probe: ProbeResult) -> int:
    return probe.segments[LAYERS].activation_bytes


def _backward(pair: LayerPair) -> Sourced:
    """Return the seconds of a block's backward pass: 0 if it comes before the first trained layer."""
    if not pair.few.plan.model.types[pair.type].has_backward:
        return Sourced(0.0, Source.DERIVED)
    return _measured(*seconds_per_layer(pair, BACKWARD))


def end_rows(probes: Sequence[ProbeResult]) -> Iterator[LayerRow]:
    """Yield rows of embedding and head for each key without recomputation: mean time and largest memory of its probes.

    Probes whose embedding and head are sharded differently from their layers are left out: probes of another key have
    that strategy throughout.
    """
    plain = (probe for probe in probes if probe.is_uniform and probe.key.recompute is Recompute.NONE)
    for key, alike in rows_by_key(plain).items():
        for name in (EMBEDDING, HEAD):
            costs = [probe.segments[name] for probe in alike]
            figures = LayerFigures(
                _measured(*_mean_of([cost.forward.slowest for cost in costs])),
                _measured(*_mean_of([cost.backward.slowest for cost in costs])),
                _measured(max(cost.activation_bytes for cost in costs)),
                _measured(max(cost.workspace_bytes for cost in costs)),
            )
            yield LayerRow.from_figures(LayerKey.from_fields(key, type=name), figures)


def _measured(value: float, error: float = 0.0) -> Sourced:
    """Return a number marked as measured, with its standard error."""
    return Sourced(value, Source.MEASURED, error)


# Times of recomputation: all kinds have the same forward time, and their backward passes repeat parts of it.


def _mean_of(durations: Sequence[Duration]) -> Duration:
    """Return the mean of durations whose errors are independent, as for probes that were measured separately."""
    count = len(durations)
    return Duration(mean(d.median_s for d in durations), hypot(*(d.error_s for d in durations)) / count)


def with_replays(rows: Iterable[LayerRow]) -> Iterator[LayerRow]:
    """Yield the rows of blocks with the same forward time for all kinds of recomputation, and no free recomputation.

    All kinds run the same forward pass, so its time is the mean over them. Full recomputation repeats that pass: if
    noise hides the repetition, the forward time is taken for it, marked derived. Other kinds repeat a part of the pass:
    their backward pass takes at least as long as the backward pass without recomputation.
    """
    for alike in rows_by_key(rows, "recompute").values():
        forward = _mean_of([Duration(row.forward_s, row.forward_error_s) for row in alike])
        plain = next((row for row in alike if row.recompute is Recompute.NONE), None)
        for row in alike:
            one = msgspec.structs.replace(row, forward_s=forward.median_s, forward_error_s=forward.error_s)
            yield one if plain is None or row is plain or plain.backward_s == 0 else _with_replay(one, plain)


def _with_replay(row: LayerRow, plain: LayerRow) -> LayerRow:
    """Return a row with recomputation; if noise hides that in its backward time, the time is corrected."""
    replay = Duration(row.backward_s - plain.backward_s, hypot(row.backward_error_s, plain.backward_error_s))
    if row.recompute is Recompute.FULL and replay.median_s <= LIKELY * replay.error_s:
        replay = Duration(row.forward_s, row.forward_error_s)
    elif row.recompute is not Recompute.FULL and replay.median_s < 0:
        replay = Duration(0.0, 0.0)
    else:
        return row
    return msgspec.structs.replace(
        row,
        backward_s=plain.backward_s + replay.median_s,
        backward_error_s=hypot(plain.backward_error_s, replay.error_s),
        backward_source=Source.DERIVED,
    )


def hidden_replays(measured: Iterable[LayerRow], fitted: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each backward time that was replaced because noise hides its recomputation."""
    times_s = {row.key: row.backward_s for row in measured}
    for row in fitted:
        if times_s.get(row.key) and row.backward_source is Source.DERIVED:
            yield (
                f"replay hidden by noise: backward time of {row.key} was measured as {times_s[row.key]:.4g} s, "
                f"{row.backward_s:.4g} s is taken: that without recomputation"
                + (" and one forward pass" if row.recompute is Recompute.FULL else "")
            )


# Layers that occur only once in each probe, such as patch merging between stages: their time is the remainder.
#
# Their output has another shape than their input, so none can follow itself. Every probe has one of each type.


def rest_rows(pairs: Sequence[LayerPair]) -> Iterator[LayerRow]:
    """Yield a row for each key and each layer type that occurs once in probes.

    The time that the probe with the fewest layers takes in addition to its other layers is divided among these types
    in proportion to their operations. If noise hides that time, a type takes as long per operation as the layer before
    it. The activations are divided in proportion to the sizes of the outputs. The workspace is that probe's.
    """
    for alike in _by_key(pairs):
        few = alike[0].few
        for name in few.plan.model.reshaping:
            forward, backward = _times(alike, name)
            figures = LayerFigures(
                Sourced(forward.median_s, Source.DERIVED, forward.error_s),
                Sourced(backward.median_s, Source.DERIVED, backward.error_s),
                Sourced(_activation_bytes(alike, name), Source.DERIVED),
                Sourced(few.segments[LAYERS].workspace_bytes, Source.DERIVED),
            )
            yield LayerRow.from_figures(LayerKey.from_fields(few.key, type=name), figures)


def hidden_rests(pairs: Sequence[LayerPair]) -> Iterator[str]:
    """Yield a sentence for each time that noise hides and that is replaced by other layers' time per operation."""
    for alike in _by_key(pairs):
        few, model = alike[0].few, alike[0].few.plan.model
        has_backward = all(model.types[name].has_backward for name in model.reshaping)
        for quantity in (FORWARD, BACKWARD) if has_backward else (FORWARD,):
            if _hides(rest := _rest(alike, quantity)):
                yield (
                    f"hidden by noise: {quantity} of {', '.join(model.reshaping)} in {few.plan.name!r} is "
                    f"{rest.median_s:.4g} s, with a standard error of {rest.error_s:.2g} s; each is taken to be as "
                    "fast for an operation as the layer before it"
                )


def _by_key(pairs: Sequence[LayerPair]) -> Iterator[list[LayerPair]]:
    """Yield the pairs of each key, which have the probe with the fewest layers in common, if layers occur only once."""
    by_key: dict[LayerKey, list[LayerPair]] = {}
    for pair in pairs:
        if pair.few.plan.model.reshaping:
            by_key.setdefault(pair.few.key, []).append(pair)
    yield from by_key.values()


def _times(alike: Sequence[LayerPair], name: str) -> Iterator[Duration]:
    """Yield the forward and the backward time of the layer of a type that occurs once."""
    model = alike[0].few.plan.model
    operations = {each: model.types[each].forward_flops_per_sample for each in (*model.reshaping, *model.layers)}
    before = model.layers[model.layers.index(name) - 1]
    for quantity in (FORWARD, BACKWARD):
        if quantity == BACKWARD and not model.types[name].has_backward:
            yield Duration(0.0, 0.0)
        elif _hides(rest := _rest(alike, quantity)):
            (pair,) = (pair for pair in alike if pair.type == before)
            yield seconds_per_layer(pair, quantity).scaled(operations[name] / operations[before])
        else:
            yield rest.scaled(operations[name] / sum(operations[each] for each in model.reshaping))


def _rest(alike: Sequence[LayerPair], quantity: str) -> Duration:
    """Return the time of the probe with the fewest layers, minus the time of its layers that have a pair of probes."""
    few = alike[0].few
    whole = few.times(quantity).slowest
    pairs = [p for p in alike if quantity != BACKWARD or few.plan.model.types[p.type].has_backward]
    others = [seconds_per_layer(p, quantity).scaled(float(few.counts[p.type])) for p in pairs]
    left_s = whole.median_s - sum(other.median_s for other in others)
    return Duration(left_s, hypot(whole.error_s, *(other.error_s for other in others)))


def _hides(rest: Duration) -> bool:
    return rest.median_s <= LIKELY * rest.error_s


def _activation_bytes(alike: Sequence[LayerPair], name: str) -> int:
    few = alike[0].few
    others = sum(few.counts[pair.type] * bytes_per_layer(pair, "activation memory", _held_bytes) for pair in alike)
    types, names = few.plan.model.types, few.plan.model.reshaping
    sizes = {each: sum(t.sequence_length * t.features for t in types[each].outputs) for each in names}
    return max(0, _held_bytes(few) - others) * sizes[name] // sum(sizes.values())


# Layers with experts, in two parts: the measured cost of the experts, and the rest of the measured layer.


def _of_experts(kind: Recompute) -> Recompute:
    """Return the measured kind of recomputation that treats experts in the same way as this kind."""
    if kind.replays_experts:
        return Recompute.SELECTIVE if kind is Recompute.SELECTIVE else Recompute.FULL
    return Recompute.ACTIVATIONS if RecomputedPart.EXPERT_ACTIVATIONS in kind.parts else Recompute.NONE


_LEAST = 0.01
"""Minimum share of a layer's time that is taken to remain without its experts."""


def fit_experts(
    measurements: Sequence[tuple[Path, Measurement]],
    probe: ProbeResult,
    layers: Sequence[LayerRow],
    apart: Sequence[LayerRow],
) -> tuple[list[ExpertRow], list[LayerRow]]:
    """Return the rows of experts, and the rows of layers without their experts; none if no experts were measured.

    Times are scaled to the machine's speed at `probe`. `layers`: rows of whole layers. `apart`: rows of layers in which
    each rank has all experts, and positions of its own.
    """
    measured = [one for _, m in measurements if m.experts is not UNSET for one in m.experts]
    if not measured:
        return [], []
    _check_once(measured, measurements[0][0])
    kinds = dict.fromkeys(row.recompute for row in layers)
    experts = list(_expert_rows(measured, kinds, probe.reference_s))
    alone = [row for row in layers if _layout(row).sample_ranks == 1]
    return experts, list(_rests(probe.plan.model, experts, [*alone, *apart]))


def _check_once(measured: Sequence[ExpertMeasurement], file: Path) -> None:
    probes = [one.probe for one in measured]
    twice = next((probe for number, probe in enumerate(probes) if probe in probes[:number]), None)
    if twice is not None:
        problem = f"{ExpertKey.from_fields(twice)} were measured twice at {twice.rows} rows"
        raise BadInput(file, problem, "pass one of the measurements")


def _expert_rows(
    measured: Iterable[ExpertMeasurement], kinds: Collection[Recompute], reference_s: float
) -> Iterator[ExpertRow]:
    """Yield the rows of experts for these kinds of recomputation, with times scaled to a speed of the machine."""
    for one in measured:
        by = reference_s / one.reference_s
        figures = LayerFigures(
            Sourced(by * median(one.forward_s), Source.MEASURED),
            Sourced(by * median(one.backward_s), Source.MEASURED),
            Sourced(one.activation_bytes, Source.MEASURED),
            Sourced(one.workspace_bytes, Source.MEASURED),
        )
        for kind in kinds:
            if _of_experts(kind) is one.probe.recompute:
                yield ExpertRow.from_figures(ExpertKey.from_fields(one.probe, recompute=kind), figures)


def _rests(model: Model, experts: Sequence[ExpertRow], layers: Iterable[LayerRow]) -> Iterator[LayerRow]:
    """Yield the rows of layers without their experts; in the probes of `layers` each rank has all experts."""
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
    """Return the figures of experts at a number of rows, interpolated linearly between the measured ones."""
    points = sorted((row for row in experts if row.key.without("rows") == key), key=lambda row: row.rows)
    columns = zip(*(row.figures for row in points), strict=True)
    sizes = [row.rows for row in points]
    values = [float(np.interp(rows, sizes, [each.value for each in column])) for column in columns]
    return LayerFigures(*values)


def _left(row: LayerRow, experts: LayerFigures[float], plain: LayerFigures[float]) -> LayerFigures[Sourced]:
    """Return a layer's figures minus the figures of its experts.

    `plain`: the figures of the experts without recomputation. The workspace is reduced only by what recomputation adds
    to the workspace of the experts.
    """
    whole = row.figures
    forward, backward = (
        Sourced(max(all_of_it.value - inside, _LEAST * all_of_it.value), Source.DERIVED, all_of_it.error)
        for all_of_it, inside in zip(whole[:2], experts[:2], strict=True)
    )
    again = experts.workspace_bytes - plain.workspace_bytes
    return LayerFigures(
        forward,
        backward,
        Sourced(max(0.0, whole.activation_bytes.value - experts.activation_bytes), Source.DERIVED),
        Sourced(max(0.0, whole.workspace_bytes.value - again), Source.DERIVED),
    )


# Warnings about doubtful times of a profile: times that fall as the micro-batch grows, or that have large errors.


def falling_times(layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence for each time that is shorter than at a smaller micro-batch, by over three standard errors.

    `layers` must ascend in micro-batch size.
    """
    for key, points in rows_by_key(layers, "micro_batch_size").items():
        for small, large in pairwise(points):
            for way in ("forward", "backward"):
                times_s = [getattr(row, f"{way}_s") for row in (small, large)]
                error_s = hypot(*(getattr(row, f"{way}_error_s") for row in (small, large)))
                if times_s[0] - times_s[1] > LIKELY * error_s:
                    yield (
                        f"not monotone: {way} time of {key} falls from {times_s[0]:.4g} s to "
                        f"{times_s[1]:.4g} s as micro_batch_size grows from {small.micro_batch_size} to "
                        f"{large.micro_batch_size}"
                    )


def uncertain_times(probes: Sequence[ProbeResult], layers: Iterable[LayerRow]) -> Iterator[str]:
    """Yield a sentence on repeated measurements, if any, and one for each block time with a relative error over 1/5."""
    again = {probe.in_turns: probe.measured_again for probe in probes if probe.in_turns}
    if any(again.values()):
        times = f"up to {max(again.values())} times" if max(again.values()) > 1 else "once"
        yield f"measured again: {sum(map(bool, again.values()))} of {len(again)} groups of probes in turns, {times}"
    for row in (row for row in layers if row.type not in (EMBEDDING, HEAD)):
        for way in ("forward", "backward"):
            time = Duration(getattr(row, f"{way}_s"), getattr(row, f"{way}_error_s"))
            if time.median_s > 0 and time.relative_error > MAX_RELATIVE_ERROR:
                yield (
                    f"uncertain: {way} time of {row.type} (tp_size {row.tp_size}, sequence_parallel "
                    f"{row.sequence_parallel}, recompute {row.recompute}, micro_batch_size {row.micro_batch_size}, "
                    f"sequence_length {row.sequence_length}) has a standard error of {time.relative_error:.0%}"
                )
