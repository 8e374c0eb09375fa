"""Rows of an analytic profile for layers with expert parallelism: the experts, and the layer without its experts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec import UNSET
from msgspec.structs import asdict

from shardwright.estimate.layers import estimate_experts, estimate_layer, host_s
from shardwright.estimate.machines import Machines
from shardwright.estimate.settings import ProfileSettings, block_types
from shardwright.io.table import Source, Sourced
from shardwright.key import ExpertKey, LayerKey
from shardwright.models.context import recompute_kinds
from shardwright.plan.axes import layout_of
from shardwright.types import Experts, ExpertStrategy, LayerStrategy, Model, Recompute, Strategy, misfit
from shardwright.types.limits import MAX_COUNT
from shardwright.types.model_profile import ExpertRow, HostRow, LayerFigures, LayerRow

_FULLEST = 2
"""The largest ratio of the fullest rank's rows to an even load for which curves are written; beyond it, they are
extrapolated linearly."""


def rest_rows(
    model: Model, strategy: Strategy, settings: ProfileSettings, machines: Machines, fused: bool
) -> Iterator[LayerRow]:
    """Yield rows for layers without their experts, for strategies in which all ranks have different positions."""
    if layout_of(strategy).replicas > 1:
        return
    for name, recompute, samples in product(
        sparse_types(model), recompute_kinds(settings.recompute, model), micro_batch_sizes(settings)
    ):
        sharded = LayerStrategy(**asdict(strategy), type=name, recompute=recompute, experts=ExpertStrategy(ep_size=1))
        if misfit(model, name, sharded) is not None:
            continue
        machine = machines.reached_in(name)
        figures = estimate_layer(model, name, sharded, samples, settings.precision, settings.attention, machine, fused)
        key = LayerKey.from_fields(sharded, micro_batch_size=samples, sequence_length=model.sequence_length)
        yield LayerRow.from_figures(key, _analytic(figures))


def expert_rows(
    models: Sequence[Model], strategies: Sequence[Strategy], settings: ProfileSettings, machines: Machines
) -> Iterator[ExpertRow]:
    """Yield the rows of experts, for each possible number of experts on a rank and all its row counts."""
    for key in expert_keys(models, strategies, settings, recompute_kinds(settings.recompute, models[0])):
        figures = estimate_experts(models[0], key, settings.precision, machines.reached_in(key.type))
        yield ExpertRow.from_figures(key, _analytic(figures))


def host_rows(model: Model, settings: ProfileSettings, machines: Machines) -> Iterator[HostRow]:
    """Yield the host's time for layers with expert parallelism, by the number of experts on a rank."""
    for name, recompute in product(sparse_types(model), recompute_kinds(settings.recompute, model)):
        machine, whole = machines.reached_in(name), model.types[name].experts
        assert whole is not UNSET
        rest_s = host_s(model, name, recompute, machine)
        for experts in (0, *divisors(whole.number)):
            both_s = rest_s if not experts else host_s(model, name, recompute, machine, experts)
            forward_s, backward_s = (both - rest * bool(experts) for both, rest in zip(both_s, rest_s, strict=True))
            yield HostRow(
                type=name,
                tp_size=0,
                recompute=recompute,
                experts=experts,
                pipelined=False,
                forward_s=forward_s,
                backward_s=backward_s,
                source=Source.ANALYTIC,
            )


def pipeline_rows(model: Model, settings: ProfileSettings, block_ms: Mapping[int, float]) -> Iterator[HostRow]:
    """Yield the least time of a block in pipelines between nodes, by tensor-parallel size.

    `block_ms`: milliseconds of both passes by tensor-parallel size.
    """
    for name, recompute, (tp_size, both_ms) in product(
        block_types(model), recompute_kinds(settings.recompute, model), block_ms.items()
    ):
        yield HostRow(
            type=name,
            tp_size=tp_size,
            recompute=recompute,
            experts=0,
            pipelined=True,
            # A backward pass takes twice the time of a forward pass.
            forward_s=both_ms / 3e3,
            backward_s=2 * both_ms / 3e3,
            source=Source.ANALYTIC,
        )


def expert_keys(
    models: Sequence[Model],
    strategies: Sequence[Strategy],
    settings: ProfileSettings,
    recompute: Sequence[Recompute],
    levels: int | None = None,
) -> Iterator[ExpertKey]:
    """Yield the keys for every possible number of experts on a rank, at all row counts or at `levels` of them.

    `models`: descriptions of one model at each sequence length. `strategies`: strategies of its layers without experts.
    """
    for name in sparse_types(models[0]):
        experts = models[0].types[name].experts
        assert experts is not UNSET
        etp_sizes = [size for size in sorted({1, *settings.tp_sizes}) if experts.features % size == 0]
        for number, etp_size, kind in product(divisors(experts.number), etp_sizes, recompute):
            for rows in _some(list(_rows(models, strategies, settings, experts, etp_size)), levels):
                yield ExpertKey(type=name, experts=number, etp_size=etp_size, recompute=kind, rows=rows)


def _some(values: Sequence[int], levels: int | None) -> Sequence[int]:
    """Return all values, or `levels` of them: the first, the last, and evenly spaced ones between them."""
    if levels is None or len(values) <= levels:
        return values
    return [values[round(i * (len(values) - 1) / (levels - 1))] for i in range(levels)]


def sparse_types(model: Model) -> tuple[str, ...]:
    """Return the block types that have experts."""
    return tuple(name for name in block_types(model) if model.types[name].experts is not UNSET)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def micro_batch_sizes(settings: ProfileSettings) -> tuple[int, ...]:
    """Return the requested micro-batch sizes, in samples per tensor-parallel group."""
    asked = settings.micro_batch_sizes
    return asked if isinstance(asked, tuple) else asked.values(None)


def _rows(
    models: Sequence[Model],
    strategies: Sequence[Strategy],
    settings: ProfileSettings,
    experts: Experts,
    parts: int,
) -> Iterator[int]:
    """Yield row counts, doubling from the fewest to twice the largest number under an even load.

    Larger counts are extrapolated from the last two. `parts`: number of ranks that share the rows.
    """
    sizes = micro_batch_sizes(settings)
    positions = [
        model.sequence_length * size // layout_of(strategy).sequence.size
        for model, strategy, size in product(models, strategies, (min(sizes), max(sizes)))
    ]
    rows, most = (number * experts.top_k for number in (min(positions), _FULLEST * max(positions) * parts))
    most = min(most, MAX_COUNT)
    while rows < most:
        yield rows
        rows *= 2
    yield most


def _analytic(figures: LayerFigures[float]) -> LayerFigures[Sourced]:
    return LayerFigures(*(Sourced(value, Source.ANALYTIC) for value in figures))
