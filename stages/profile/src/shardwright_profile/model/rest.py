"""Layers that occur only once in each probe, such as patch merging between stages: their time is the remainder.

They pass on another shape than they receive, so that none can follow itself. A key's shortest probe has one of each.
"""

from collections.abc import Callable, Iterator, Sequence
from math import hypot

from shardwright.io.table import Source, Sourced
from shardwright.key import LayerKey
from shardwright.plan.differences import Duration
from shardwright.types.model_profile import LayerFigures, LayerRow
from shardwright_profile.model.probe_results import (
    LAYERS,
    LayerPair,
    ProbeResult,
    Repeats,
    bytes_per_layer,
    seconds_per_layer,
)
from shardwright_profile.model.replays import LIKELY

_FORWARD, _BACKWARD = "forward time", "backward time"
_TIMES: dict[str, Callable[[ProbeResult], Repeats]] = {
    _FORWARD: lambda probe: probe.segments[LAYERS].forward,
    _BACKWARD: lambda probe: probe.segments[LAYERS].backward,
}


def rest_rows(pairs: Sequence[LayerPair]) -> Iterator[LayerRow]:
    """Yield a row for each type that occurs once in probes, under each key.

    Times are what the shortest probe takes beyond its other layers, divided by operations. If noise hides that,
    it takes as long for an operation as the layer before it does. Memory is divided by the size of what is handed
    on. The workspace is the shortest probe's.
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
    """Yield a sentence for each time that noise hid, and that other layers' time replaces."""
    for alike in _by_key(pairs):
        few, model = alike[0].few, alike[0].few.plan.model
        has_backward = all(model.types[name].has_backward for name in model.reshaping)
        for quantity in _TIMES if has_backward else (_FORWARD,):
            if _hides(rest := _rest(alike, quantity)):
                yield (
                    f"hidden by noise: {quantity} of {', '.join(model.reshaping)} in {few.plan.name!r} is "
                    f"{rest.median_s:.4g} s, with a standard error of {rest.error_s:.2g} s; each is taken to be as "
                    "fast for an operation as the layer before it"
                )


def _by_key(pairs: Sequence[LayerPair]) -> Iterator[list[LayerPair]]:
    """Yield the pairs of each key, which have the shortest probe in common, for models with such layers."""
    by_key: dict[LayerKey, list[LayerPair]] = {}
    for pair in pairs:
        if pair.few.plan.model.reshaping:
            by_key.setdefault(pair.few.key, []).append(pair)
    yield from by_key.values()


def _times(alike: Sequence[LayerPair], name: str) -> Iterator[Duration]:
    """Yield the forward and the backward time of a layer."""
    model = alike[0].few.plan.model
    operations = {each: model.types[each].forward_flops_per_sample for each in (*model.reshaping, *model.layers)}
    before = model.layers[model.layers.index(name) - 1]
    for quantity, repeats_of in _TIMES.items():
        if quantity == _BACKWARD and not model.types[name].has_backward:
            yield Duration(0.0, 0.0)
        elif _hides(rest := _rest(alike, quantity)):
            (pair,) = (pair for pair in alike if pair.type == before)
            yield seconds_per_layer(pair, quantity, repeats_of).scaled(operations[name] / operations[before])
        else:
            yield rest.scaled(operations[name] / sum(operations[each] for each in model.reshaping))


def _rest(alike: Sequence[LayerPair], quantity: str) -> Duration:
    """Return the time of a key's shortest probe minus that of the layers of which other probes have more."""
    few, repeats_of = alike[0].few, _TIMES[quantity]
    whole = repeats_of(few).slowest
    pairs = [p for p in alike if quantity != _BACKWARD or few.plan.model.types[p.type].has_backward]
    others = [seconds_per_layer(p, quantity, repeats_of).scaled(float(few.counts[p.type])) for p in pairs]
    left_s = whole.median_s - sum(other.median_s for other in others)
    return Duration(left_s, hypot(whole.error_s, *(other.error_s for other in others)))


def _hides(rest: Duration) -> bool:
    return rest.median_s <= LIKELY * rest.error_s


def _activation_bytes(alike: Sequence[LayerPair], name: str) -> int:
    few = alike[0].few

    def held_bytes(probe: ProbeResult) -> int:
        return probe.segments[LAYERS].activation_bytes

    others = sum(few.counts[pair.type] * bytes_per_layer(pair, "activation memory", held_bytes) for pair in alike)
    types, names = few.plan.model.types, few.plan.model.reshaping
    sizes = {each: sum(t.sequence_length * t.features for t in types[each].outputs) for each in names}
    return max(0, held_bytes(few) - others) * sizes[name] // sum(sizes.values())
