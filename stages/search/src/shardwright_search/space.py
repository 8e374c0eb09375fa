"""Which plans are searched: the cases, and the canonical strategies of a layer within a case."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardwright_formats.cluster import Cluster
from shardwright_formats.errors import BadInput
from shardwright_formats.model import EMBEDDING, HEAD, Model
from shardwright_formats.plan import Schedule, misfit
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy
from shardwright_search.request import SearchRequest

__all__ = ["Case", "cases", "divisors", "strategies"]


class Case(NamedTuple):
    """What is fixed before the layers are cut and each gets its strategy."""

    pp_size: int
    num_microbatches: int
    schedule: Schedule


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor of a positive number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def cases(request: SearchRequest, model: Model, cluster: Cluster, file: Path) -> tuple[Case, ...]:
    """Every (pp_size, num_microbatches, schedule) of the request, in ascending order.

    Raises BadInput, naming the search file, for a listed number that divides nothing: it would be left out in silence.
    """
    devices, layers = cluster.num_devices, len(model.layers)
    for field, listed, whole, meaning in (
        ("num_microbatches", request.num_microbatches, request.global_batch_size, "global_batch_size"),
        ("pp_sizes", request.pp_sizes, devices, "the number of devices"),
        ("tp_sizes", request.tp_sizes, devices, "the number of devices"),
    ):
        for number in listed or ():
            if whole % number:
                raise BadInput(file, f"{field}: {number} does not divide {meaning}, {whole}", "list divisors only")
    for pp_size in request.pp_sizes or ():
        if pp_size > layers:
            raise BadInput(file, f"pp_sizes: {pp_size} pipeline stages for {layers} layers", "list at most that many")
    pp_sizes = request.pp_sizes or tuple(d for d in divisors(devices) if d <= layers)
    counts = request.num_microbatches or divisors(request.global_batch_size)
    return tuple(
        Case(pp_size, count, schedule)
        for pp_size in sorted(set(pp_sizes))
        for count in sorted(set(counts))
        for schedule in sorted(set(request.schedules))
    )


def strategies(
    request: SearchRequest, model: Model, type_name: str, stage_size: int, microbatch_samples: int
) -> tuple[Strategy, ...]:
    """Every way to spread a layer type over the ranks of a pipeline stage, each spelled in one way only.

    Where there is no tensor parallelism there is nothing to split the sequence by, and where there is no data
    parallelism nothing to shard by. A data-parallel size must divide the microbatch's samples exactly.
    """
    outer = type_name in (EMBEDDING, HEAD)
    recomputes = (Recompute.NONE,) if outer else request.recompute
    found: list[Strategy] = []
    for spread in _spreads(request, stage_size):
        if microbatch_samples % spread.dp_size or misfit(model, type_name, spread) is not None:
            continue
        fields = {name: getattr(spread, name) for name in Strategy.__struct_fields__}
        found += [spread] if outer else [LayerStrategy(**fields, type=type_name, recompute=r) for r in recomputes]
    return tuple(sorted(set(found)))


def _spreads(request: SearchRequest, stage_size: int) -> Iterator[Strategy]:
    for tp_size in request.tp_sizes or divisors(stage_size):
        if stage_size % tp_size:
            continue
        dp_size = stage_size // tp_size
        for data_parallel in request.data_parallel if dp_size > 1 else (DataParallel.DDP,):
            for sequence_parallel in request.sequence_parallel if tp_size > 1 else (SequenceParallel.NONE,):
                yield Strategy(
                    tp_size=tp_size, dp_size=dp_size, data_parallel=data_parallel, sequence_parallel=sequence_parallel
                )
