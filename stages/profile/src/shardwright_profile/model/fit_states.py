"""Costs of parameters whatever runs through them: bytes at rest, and the optimizer's time."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from shardwright_formats.io import BadInput
from shardwright_formats.io.table import Source
from shardwright_formats.semantics.axes import axes_of
from shardwright_formats.types import EMBEDDING, HEAD, Model
from shardwright_formats.types.model_profile import StateRow
from shardwright_profile.model.differences import LayerPair, bytes_per_layer
from shardwright_profile.model.probe_results import ProbeResult


class OptimizerLine(NamedTuple):
    """The time of the optimizer's step: `constant_s + s_per_parameter * parameters of a rank`."""

    constant_s: float
    s_per_parameter: float


_BYTES: tuple[tuple[str, Callable[[ProbeResult], int]], ...] = (
    ("parameters_bytes", lambda probe: probe.parameter_bytes),
    ("gradients_bytes", lambda probe: probe.gradient_bytes),
    ("optimizer_bytes", lambda probe: probe.optimizer_bytes),
)


class ZeroRates(NamedTuple):
    """The times that ZeRO adds, in seconds for each parameter that the ranks share out."""

    ranks: int
    scatter_s: float
    """Seconds that reducing gradients adds to a step."""
    gather_s: float
    """Seconds that gathering parameters adds to a pass of a microbatch."""


def parameter_parts(probe: ProbeResult) -> int:
    """Return the number of ranks among which tensor parallelism splits the parameters."""
    return axes_of(probe.plan.layers[0]).dense.tensor.size


def fit_optimizer_line(probes: Sequence[ProbeResult]) -> OptimizerLine:
    """Return the least-squares line through the optimizer times of all probes whose coefficients are not negative.

    Where the free line has a negative coefficient, the best line with that one at zero is taken, which is the optimum
    under the constraint (Lawson & Hanson 1974), so that no layer's optimizer time is ever negative.
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


def fit_states(pairs: Sequence[LayerPair], line: OptimizerLine, zero: ZeroRates | None = None) -> tuple[StateRow, ...]:
    """Return one row per tp_size and layer type.

    A block's bytes are the difference of its probes, the most over strategies and micro-batch sizes. What the layers
    leave over is split between embedding and head by their numbers of parameters. Time of the gradient reduction is
    shared out by gradient bytes. Probes under Ulysses are left out: their parameters are not split by tp_size.
    """
    usable = [pair for pair in pairs if not axes_of(pair.few.plan.layers[0]).exchanges_heads]
    if not usable:
        raise BadInput(pairs[0].few.file, "every probe is under ulysses", "measure also sequence_parallel 'none'")
    return tuple(
        row
        for parts in sorted({parameter_parts(pair.few) for pair in usable})
        for row in _rows(parts, [pair for pair in usable if parameter_parts(pair.few) == parts], line, zero)
    )


def _rows(tp_size: int, pairs: Sequence[LayerPair], line: OptimizerLine, zero: ZeroRates | None) -> Iterator[StateRow]:
    model = pairs[0].few.model
    columns = [_column(tp_size, pairs, what, bytes_of) for what, bytes_of in _BYTES]
    probes = [probe for pair in pairs for probe in (pair.few, pair.many)]
    ranks, rate = _reduction_ranks(probes), _reduction_s_per_byte(probes)
    for name in (EMBEDDING, *pairs[0].few.counts, HEAD):
        parameters, gradients, optimizer = (column[name] for column in columns)
        count = model.types[name].parameter_count(tp_size)
        # All derived: times come off a line, and the bytes of embedding and head from a split.
        yield StateRow(
            type=name,
            tp_size=tp_size,
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer,
            bytes_source=Source.DERIVED,
            optimizer_s=line.s_per_parameter * count,
            optimizer_source=Source.DERIVED,
            reduction_s=rate * gradients,
            reduction_ranks=ranks,
            reduction_source=Source.DERIVED,
            scatter_s=zero.scatter_s * count if zero else 0.0,
            gather_s=zero.gather_s * count if zero else 0.0,
            zero_ranks=zero.ranks if zero else 1,
            zero_source=Source.DERIVED if zero else Source.ABSENT,
        )


def _reduction_ranks(probes: Sequence[ProbeResult]) -> int:
    ranks = {axes_of(probe.plan.layers[0]).dense.states.size for probe in probes}
    if len(ranks) > 1:
        what = f"probes of tp_size {probes[0].key.tp_size} reduce gradients over {sorted(ranks)} ranks"
        raise BadInput(probes[0].file, what, "fit the probes of one kind of node at a time")
    return ranks.pop()


def _reduction_s_per_byte(probes: Sequence[ProbeResult]) -> float:
    """Return the slope of the least-squares line through zero of the probes' reduction times, at least zero.

    A time is the difference of two backward passes, so single ones may be negative from noise.
    """
    together = sum(probe.gradient_bytes * probe.reduction_s for probe in probes)
    squares = sum(probe.gradient_bytes**2 for probe in probes)
    return max(0.0, together / squares) if squares else 0.0


def _column(
    tp_size: int, pairs: Sequence[LayerPair], what: str, bytes_of: Callable[[ProbeResult], int]
) -> dict[str, int]:
    """Return the bytes of one kind of state by layer type."""
    found: dict[str, int] = {}
    for pair in pairs:
        found[pair.type] = max(found.get(pair.type, 0), bytes_per_layer(pair, what, bytes_of))
    few = pairs[0].few
    rest = bytes_of(few) - sum(count * found[name] for name, count in few.counts.items())
    if rest < 0:
        raise BadInput(
            few.file,
            f"{what} of {few.plan.name!r} are {-rest} bytes fewer than its layers have by their difference",
            "measure it again",
        )
    types = few.model.types
    embedding, head = (types[name].parameter_count(tp_size) for name in (EMBEDDING, HEAD))
    found[EMBEDDING] = rest * embedding // max(1, embedding + head)
    found[HEAD] = rest - found[EMBEDDING]
    return found


def _rank_parameters(probe: ProbeResult) -> int:
    """Return the number of parameters that the optimizer of one rank updates; tied ones count once."""
    model = probe.model
    split = parameter_parts(probe)
    every = sum(model.types[name].parameter_count(split) for name in (EMBEDDING, *model.layers, HEAD))
    return every - _tied_parameters(model, split)


def _tied_parameters(model: Model, parts: int) -> int:
    ends = {p.name: p.numel(parts) for name in (EMBEDDING, HEAD) for p in model.types[name].parameters}
    return sum(ends[second] for _, second in model.tied)
