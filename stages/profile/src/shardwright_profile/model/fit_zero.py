"""The times that ZeRO's gathers and reductions add, from the probes under ZeRO-2 and ZeRO-3."""

from collections.abc import Sequence
from statistics import fmean

from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.types import EMBEDDING, HEAD, DataParallel
from shardwright_profile.model.fit_states import ZeroRates, parameter_parts
from shardwright_profile.model.probe_results import ProbeResult


def zero_rates(probes: Sequence[ProbeResult]) -> ZeroRates | None:
    """Return the rates, or None where a probe is missing; gathers are relative to the otherwise equal DDP probe.

    The first gather of each pass is spared, for the pass before ended with that layer (`gathers_spared`).
    """
    by_kind = {probe.data_parallel: probe for probe in probes}
    zero2, zero3 = by_kind.get(DataParallel.ZERO2), by_kind.get(DataParallel.ZERO3)
    plain_s = None if zero3 is None else _plain_microbatch_s(zero3, probes)
    if zero2 is None or zero3 is None or plain_s is None:
        return None
    parts, types = parameter_parts(zero3), zero3.model.types
    layers, ends = (
        sum(types[name].parameter_count(parts) for name in names) for names in (zero3.model.layers, (EMBEDDING, HEAD))
    )
    reduction_s = fmean((zero2.reduction_s, zero3.reduction_s))
    return ZeroRates(
        ranks=axes_of(zero3.plan.embedding).dense.states.size,
        scatter_s=max(0.0, reduction_s) / (layers + ends),
        gather_s=max(0.0, zero3.microbatch_s - plain_s) / (2 * layers + ends),
    )


def _plain_microbatch_s(zero3: ProbeResult, probes: Sequence[ProbeResult]) -> float | None:
    """Return the probe's microbatch time under DDP: the shortest probe's, and what each longer one takes more."""
    alike = [probe for probe in probes if probe.data_parallel is DataParallel.DDP and probe.key == zero3.key]
    if not alike:
        return None
    few = min(alike, key=lambda probe: sum(probe.counts.values()))
    return few.microbatch_s + sum(probe.microbatch_s - few.microbatch_s for probe in alike)
