"""A check of derived times under context parallelism: measured probes of one share over the derived times."""

from collections.abc import Iterator, Sequence

from shardwright.estimate.curves import of_other_shares, on_joint_curve
from shardwright.io import BadInput
from shardwright.io.table import Source
from shardwright.key import LayerKey
from shardwright.plan.differences import Duration
from shardwright.types.model_profile import ContextRow, FitMode, FitRow, LayerRow, Quantity
from shardwright_profile.model.probe_results import LAYERS, LayerPair, ProbeResult, layer_pairs, seconds_per_layer


def context_rows(
    probes: Sequence[ProbeResult], layers: Sequence[LayerRow], fits: Sequence[FitRow]
) -> Iterator[ContextRow]:
    """Yield the check of each type of layer by each cp_size that was probed.

    Raises BadInput if the points determine no curve over micro-batch sizes and lengths.
    """
    for cp_size in sorted({probe.cp_size for probe in probes} - {1}):
        for pair in layer_pairs([probe for probe in probes if probe.cp_size == cp_size]):
            key = LayerKey.from_fields(pair.few.key, type=pair.type)
            forward, backward = _measured(pair)
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
    """Yield a sentence on each check of derived context-parallel times."""
    for row in rows:
        ratios = f"{row.forward_ratio:.3g} times the derived forward time, {row.backward_ratio:.3g} times the backward"
        length = f"{row.sequence_length} tokens on {row.cp_size} ranks"
        yield f"{row.type} of a share of {length} was measured to take {ratios}: derived times are corrected by that"


_TIMES = (Quantity.FORWARD_S, Quantity.BACKWARD_S)


def _measured(pair: LayerPair) -> tuple[Duration, Duration]:
    """The time of one layer's forward and backward pass."""
    forward = seconds_per_layer(pair, "forward time", lambda probe: probe.segments[LAYERS].forward)
    return forward, seconds_per_layer(pair, "backward time", lambda probe: probe.segments[LAYERS].backward)


def _derived_s(
    pair: LayerPair, key: LayerKey, quantity: Quantity, layers: Sequence[LayerRow], fits: Sequence[FitRow]
) -> float:
    """Return a time as derived for a plan: the part's own time, and the time of attention to the other parts."""
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
