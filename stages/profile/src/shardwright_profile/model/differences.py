"""The cost of one layer: the difference of two probes over the layers they differ by."""

from collections.abc import Callable, Sequence
from math import hypot
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.key import rows_by_key
from shardwright_formats.semantics.differences import Duration
from shardwright_profile.model.probe_results import ProbeResult, Repeats


class LayerPair(NamedTuple):
    """A pair of probes of one key that differ in the number of layers of one block type alone."""

    type: str
    few: ProbeResult
    many: ProbeResult

    @property
    def layers(self) -> int:
        """Return the number of layers that the two probes differ by."""
        return self.many.counts[self.type] - self.few.counts[self.type]

    @property
    def in_turns(self) -> bool:
        """Return whether the two probes were stepped in turns, so that their steps of one number are of one round."""
        return bool(self.few.in_turns) and self.few.in_turns == self.many.in_turns


def layer_pairs(probes: Sequence[ProbeResult]) -> tuple[LayerPair, ...]:
    """Return the pair of every key and block type: the fewest and the most layers of the type.

    Galvatron's method (Miao et al. 2022): whatever does not grow with the layers falls out of the difference. Raises
    BadInput naming the probe that has no partner.
    """
    return tuple(_pair(group, name) for group in rows_by_key(probes).values() for name in group[0].counts)


def seconds_per_layer(pair: LayerPair, quantity: str, repeats_of: Callable[[ProbeResult], Repeats]) -> Duration:
    """Return the seconds of one layer; BadInput names both probes where the longer was not slower: no layer is free.

    For probes that were stepped in turns it is the median over the rounds, else the difference of two medians.
    """
    few, many = repeats_of(pair.few), repeats_of(pair.many)
    more = many.beyond(few) if pair.in_turns else _difference(few.slowest, many.slowest)
    if more.median_s <= 0:
        raise _noisy(pair, quantity, *(f"{repeats.slowest.median_s:.6g} s" for repeats in (few, many)))
    return more.scaled(1 / pair.layers)


def _difference(few: Duration, many: Duration) -> Duration:
    """Return the difference of two medians whose errors are independent."""
    return Duration(many.median_s - few.median_s, hypot(few.error_s, many.error_s))


def bytes_per_layer(pair: LayerPair, quantity: str, bytes_of: Callable[[ProbeResult], int]) -> int:
    """Return the bytes of one layer, rounded up; BadInput names both probes where the longer one held less."""
    few_bytes, many_bytes = bytes_of(pair.few), bytes_of(pair.many)
    if many_bytes < few_bytes:
        raise _noisy(pair, quantity, f"{few_bytes} bytes", f"{many_bytes} bytes")
    return -((few_bytes - many_bytes) // pair.layers)


def _noisy(pair: LayerPair, quantity: str, few: str, many: str) -> BadInput:
    return BadInput(
        pair.many.file,
        f"{quantity} of {pair.many.plan.name!r} ({many}) is not above that of {pair.few.plan.name!r} ({few})",
        "measure both with more --steps on a quieter machine",
    )


def _pair(probes: Sequence[ProbeResult], name: str) -> LayerPair:
    few = min(probes, key=lambda probe: sum(probe.counts.values()))
    partners = [probe for probe in probes if _differ_in(few, probe, name)]
    if not partners:
        raise BadInput(
            few.file,
            f"probe {few.plan.name!r} has no partner with more layers of type {name!r}",
            "measure every plan of the probes file and pass all measurements",
        )
    return LayerPair(name, few, max(partners, key=lambda probe: probe.counts[name]))


def _differ_in(few: ProbeResult, many: ProbeResult, name: str) -> bool:
    others = {key: count for key, count in few.counts.items() if key != name}
    same = others == {key: count for key, count in many.counts.items() if key != name}
    return same and many.counts.get(name, 0) > few.counts[name]
