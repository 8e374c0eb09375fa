"""Estimated profiles of models and hardware, from shapes and the device table, without measurements.

Every number is marked `analytic`, and the notes state what was assumed, and how far such numbers were from measured
ones.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict, replace

from shardwright.estimate.curves import fits_table
from shardwright.estimate.expert_profile import expert_rows, host_rows, micro_batch_sizes, pipeline_rows, rest_rows
from shardwright.estimate.hardware import Link, Network, NodeRates, analytic_hardware
from shardwright.estimate.layers import SCORES_KEPT, Machine, estimate_layer, masks_bytes, optimizer_time_s
from shardwright.estimate.machines import Efficiencies, Machines, Rates, link_of, machines_of, matrix_efficiency
from shardwright.estimate.notes import Process, hardware_notes, model_notes
from shardwright.estimate.overlap import Overlap
from shardwright.estimate.runtimes import SHARDWRIGHT, Runtime, attention_of
from shardwright.estimate.settings import ProfileSettings, block_types, formatted, misfit_of
from shardwright.io import BadInput
from shardwright.io.hdf5 import Provenance
from shardwright.io.table import Source, Sourced, Table
from shardwright.io.versions import PRODUCT, versions_text
from shardwright.key import LayerKey
from shardwright.models.context import recompute_kinds
from shardwright.optimizers.registry import ADAMW
from shardwright.types import EMBEDDING, HEAD, ITEMSIZE, NARROW_BITS, Cluster, Model, Precision, misfit, profiled_as
from shardwright.types.hardware_profile import HardwareProfile
from shardwright.types.model_profile import (
    ExchangeRow,
    ExpertRow,
    HostRow,
    LayerFigures,
    LayerRow,
    ModelProfile,
    ProcessRow,
    ProfileOrigin,
    StateRow,
)
from shardwright.types.strategy import Dispatcher, LayerStrategy, Recompute, Strategy


class AnalyticProfile(NamedTuple):
    """An estimated profile, with one sentence for each strategy that was left out."""

    profile: ModelProfile
    left_out: tuple[str, ...]


def model_profile(
    models: Sequence[tuple[Path, Model]],
    settings: ProfileSettings,
    rates: Rates,
    efficiencies: Efficiencies,
    revised: str,
    runtime: Runtime = SHARDWRIGHT,
    process: Process | None = None,
) -> AnalyticProfile:
    """Return the estimated profile of a model at the sequence length of each of its descriptions.

    `revised`: date of the device table. `runtime`: the system that runs the plans. `process`: what is known about the
    process's memory. Raises BadInput if the descriptions are of different models or equal lengths, or if no strategy
    fits.
    """
    model, process = _same_model(models), process or Process()
    precision = settings.precision
    kernel, attention = attention_of(runtime, settings.attention)
    runtime, settings = replace(runtime, attention=kernel), replace(settings, attention=attention)
    if precision.compute in NARROW_BITS and attention in SCORES_KEPT:
        problem = f"attention {attention}: is not estimated with {precision.compute}"
        raise BadInput("--settings", problem, "take auto or sdpa")
    compute = "tf32" if precision.tf32 else precision.compute
    machines = machines_of(rates, compute, efficiencies, runtime, settings.compile)
    described = [one for _, one in models]
    asked, left_out = _asked(described, settings)
    shardings = [strategy for _, strategy, _ in asked]
    layers, rests = (
        sorted(
            (row for one, strategy, _ in asked for row in rows(one, strategy, settings, machines, runtime.fused)),
            key=lambda row: row.key,
        )
        for rows in (_layer_rows, rest_rows)
    )
    notes = model_notes(rates, efficiencies, precision.compute, runtime, process, settings.compile)
    tp_sizes = sorted({1, *settings.tp_sizes})
    return AnalyticProfile(
        ModelProfile(
            origin=_origin(model, rates, settings, runtime),
            provenance=_provenance(revised, notes),
            layers=Table.from_rows(LayerRow, layers),
            states=Table.from_rows(StateRow, _state_rows(model, tp_sizes, precision, machines.blocks)),
            process=Table.from_rows(
                ProcessRow,
                [_process_row(process, max(masks_bytes(one, precision, attention) for _, one in models))],
            ),
            fits=fits_table(layers),
            rests=Table.from_rows(LayerRow, rests),
            experts=Table.from_rows(ExpertRow, expert_rows(described, shardings, settings, machines)),
            exchange=Table.from_rows(ExchangeRow, _exchange_rows(model, runtime)),
            host=Table.from_rows(
                HostRow,
                [*host_rows(model, settings, machines), *pipeline_rows(model, settings, runtime.pipelined_block_ms)],
            ),
        ),
        left_out,
    )


def _exchange_rows(model: Model, runtime: Runtime) -> Iterator[ExchangeRow]:
    """Yield how a runtime exchanges rows of experts; nothing for models without experts, or for plain exchanges."""
    plain = runtime.dispatcher is Dispatcher.ALL_TO_ALL and not runtime.overlaps_experts
    if not plain and any(kind.experts is not UNSET for kind in model.types.values()):
        yield ExchangeRow(dispatcher=runtime.dispatcher, overlapped=runtime.overlaps_experts)


def _origin(model: Model, rates: Rates, settings: ProfileSettings, runtime: Runtime) -> ProfileOrigin:
    return ProfileOrigin(
        model=model.name,
        architecture_sha256=model.architecture_sha256,
        device=rates.name,
        backend="analytic",
        precision=profiled_as(settings.precision, settings.compile),
        attention=str(settings.attention),
        runtime=str(runtime.name),
    )


def hardware_profile(
    cluster: Cluster,
    rates: Sequence[Rates],
    efficiencies: Efficiencies,
    between: NodeRates | None,
    revised: str,
    overlap: Overlap | None = None,
) -> HardwareProfile:
    """Return the estimated hardware profile of a cluster, from the rates of its devices and of its network.

    `revised`: date of the device table. `overlap`: the given slowdowns of computations and collectives that overlap.
    """
    links = [link_of(one, efficiencies) for one in rates]
    link = Link(min(one.bytes_per_s for one in links), max(one.step_s for one in links), _slowest_all_reduce(links))
    reaching = None if between is None else between.scaled(efficiencies.link)
    reached = [
        {"matrix_flops_per_s": one.matrix("float32") * matrix_efficiency(one, efficiencies)}
        | {"memory_bytes_per_s": one.memory * efficiencies.memory}
        for one in rates
    ]
    slowest = {name: min(one[name] for one in reached) for name in reached[0]}
    notes = hardware_notes(rates, efficiencies, between, overlap)
    return analytic_hardware(cluster, Network(link, reaching, overlap), slowest, _provenance(revised, notes))


def _slowest_all_reduce(links: Sequence[Link]) -> tuple[tuple[float, float], ...]:
    """Return the published times of the slowest link; empty if any link has none, so that link rates apply."""
    published = [link.all_reduce for link in links]
    return max(published, key=lambda times: times[-1][1]) if all(published) else ()


def _same_model(models: Sequence[tuple[Path, Model]]) -> Model:
    (_, first), *others = models
    lengths = {first.sequence_length}
    for path, other in others:
        if other.architecture_sha256 != first.architecture_sha256:
            raise BadInput(path, f"is not the model {first.name!r}", "describe the same model at another length")
        if other.sequence_length in lengths:
            raise BadInput(path, f"sequence length {other.sequence_length} is given twice", "leave it out")
        lengths.add(other.sequence_length)
    return first


_Asked = tuple[Model, Strategy, str | None]


def _asked(models: Sequence[Model], settings: ProfileSettings) -> tuple[list[_Asked], tuple[str, ...]]:
    """Return the requested strategies, and why some do not fit; raise BadInput if none fits."""
    asked = list(_strategies(models, settings))
    left_out = tuple(dict.fromkeys(problem for _, _, problem in asked if problem is not None))
    if all(problem is not None for _, _, problem in asked):
        raise BadInput("--settings", f"no strategy fits ({'; '.join(left_out)})", "choose other tp_sizes")
    return asked, left_out


def _strategies(models: Sequence[Model], settings: ProfileSettings) -> Iterator[_Asked]:
    """Yield every requested strategy of one tensor-parallel group, with the reason why it does not fit, or None."""
    for model, (tp_size, kind) in product(models, settings.strategies):
        strategy = Strategy(tp_size=tp_size, dp_size=1, sequence_parallel=kind)
        problem = misfit_of(model, strategy)
        yield model, strategy, None if problem is None else f"{formatted(strategy)}: {problem}"


def _layer_rows(
    model: Model, strategy: Strategy, settings: ProfileSettings, machines: Machines, fused: bool
) -> Iterator[LayerRow]:
    """Yield the rows of layer types that a strategy fits; if it does not divide the heads, only embedding and head."""
    sizes = micro_batch_sizes(settings)
    for name in (EMBEDDING, *block_types(model), HEAD):
        if misfit(model, name, strategy) is not None:
            continue
        kinds = (Recompute.NONE,) if name in (EMBEDDING, HEAD) else recompute_kinds(settings.recompute, model)
        for recompute, samples in product(kinds, sizes):
            sharded = LayerStrategy(**asdict(strategy), type=name, recompute=recompute)
            precision, attention, machine = settings.precision, settings.attention, machines.reached_in(name)
            figures = estimate_layer(model, name, sharded, samples, precision, attention, machine, fused)
            yield LayerRow.from_figures(
                LayerKey.from_fields(sharded, micro_batch_size=samples, sequence_length=model.sequence_length),
                LayerFigures(*(Sourced(value, Source.ANALYTIC) for value in figures)),
            )


def _state_rows(model: Model, tp_sizes: Sequence[int], precision: Precision, machine: Machine) -> Iterator[StateRow]:
    """Yield the states of each layer type; gradient reduction takes no time in addition to its messages."""
    stored, reduced = ITEMSIZE[precision.parameters], ITEMSIZE[precision.reduce]
    for name, tp_size in product((EMBEDDING, *block_types(model), HEAD), tp_sizes):
        kind = model.types[name]
        if misfit(model, name, Strategy(tp_size=tp_size, dp_size=1)) is not None:
            continue
        trained = kind.trained_count(tp_size)
        yield StateRow(
            type=name,
            tp_size=tp_size,
            parameter_bytes=stored * kind.parameter_count(tp_size),
            gradient_bytes=reduced * trained,
            optimizer_bytes=ADAMW.state_bytes(stored * trained, precision.parameters),
            bytes_source=Source.ANALYTIC,
            optimizer_s=optimizer_time_s(kind, tp_size, precision, machine),
            optimizer_source=Source.ANALYTIC,
            reduction_s=0.0,
            reduction_ranks=1,
            reduction_source=Source.ANALYTIC,
            scatter_s=0.0,
            gather_s=0.0,
            zero_ranks=1,
            zero_source=Source.ANALYTIC,
        )


def _process_row(process: Process, masks: int) -> ProcessRow:
    """Return the memory of each process outside its layers, including masks that layers share."""
    return ProcessRow(
        process_bytes=process.bytes + masks,
        process_source=Source.ASSUMED,
        communicator_bytes=process.of_each_communicator,
        communicator_source=Source.ASSUMED,
        resident_bytes=0,
        resident_source=Source.ABSENT,
        step_overhead_s=0.0,
        step_overhead_source=Source.ABSENT,
        reference_s=0.0,
        reference_source=Source.ABSENT,
    )


def _provenance(revised: str, notes: str) -> Provenance:
    return Provenance(date=revised, versions=versions_text([PRODUCT], on_gpu=False), notes=notes)
