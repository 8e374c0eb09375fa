"""Which plans are searched: the configurations, and the canonical strategies of a layer within one."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import EMBEDDING, HEAD, Model
from shardwright_formats.types.plan import Schedule, misfit
from shardwright_formats.types.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy
from shardwright_search.space.placements import NodeTypes, pools_of
from shardwright_search.space.request import Dimension, OuterSpace, SearchRequest, Space, StageWidths, batch_sizes
from shardwright_search.space.stage_widths import Widths, check_degrees, divisors, pp_sizes, usual_tp_sizes, widths

_PLAIN: dict[str, object] = {"data_parallel": (DataParallel.DDP,), "recompute": (Recompute.NONE,)}


class Configuration(NamedTuple):
    """What is fixed before the layers are cut and each gets its strategy."""

    global_batch_size: int
    num_microbatches: int
    pp_size: int
    schedule: Schedule
    num_chunks: int = 1
    """Layer ranges of a pipeline stage."""
    layers: LayerStrategy | None = None
    """The one strategy of all layers, up to their types; None: each has its own."""
    buffer_tokens: int | None = None
    """Tokens that Megatron's gather buffer holds, which no layer may exceed; None: it is not counted."""
    widths: Widths = StageWidths.EQUAL
    """Ranks of the pipeline stages; a tuple where they are unequal."""
    ends: tuple[NodeTypes, NodeTypes] | None = None
    """The node types of the first and last stage, where what tied parameters cost depends on them; None: any."""

    @property
    def microbatch_samples(self) -> int:
        """Samples of one microbatch."""
        return self.global_batch_size // self.num_microbatches

    def __str__(self) -> str:
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        ranks = f" of {' + '.join(map(str, self.widths))} ranks" if isinstance(self.widths, tuple) else ""
        if self.widths is StageWidths.ANY:
            ranks = " of any widths"
        ends = "" if self.ends is None else f" from {' and '.join(self.ends[0])} to {' and '.join(self.ends[1])}"
        return (
            f"batch {self.global_batch_size}, {self.num_microbatches} microbatches, "
            f"pp_size {self.pp_size}{ranks}{ends}{chunks}, {self.schedule}"
        )


def narrowed(request: SearchRequest, cluster: Cluster, profiled: Collection[int] | None = None) -> SearchRequest:
    """The request with its named space and its disabled dimensions told by the other options, which narrow these.

    `profiled`: the tensor-parallel sizes that can be priced, if not all; where none are listed, these are taken.
    Raises BadInput, naming the search, where the options and these leave nothing.
    """
    devices = cluster.num_devices
    space: dict[Space, dict[str, object]] = {
        Space.FULL: {},
        Space.DP: {"pp_sizes": (1,), "tp_sizes": (1,), **_PLAIN},
        Space.ZERO: {"pp_sizes": (1,), "tp_sizes": (1,), "data_parallel": (DataParallel.ZERO2, DataParallel.ZERO3)},
        Space.TP: {"pp_sizes": (1,), "tp_sizes": (devices,), **_PLAIN},
        Space.PP: {"pp_sizes": (devices,), "tp_sizes": (1,), **_PLAIN},
        Space.DP_TP: {"pp_sizes": (1,), **_PLAIN},
        Space.DP_PP: {"tp_sizes": (1,), **_PLAIN},
        Space.THREE_D: {"fine_grained": False, **_PLAIN},
        Space.FASOP: {
            "fine_grained": False,
            "max_tp_size": min(4, request.max_tp_size or 4),
            "sequence_parallel": (SequenceParallel.NONE,),
            **_PLAIN,
        },
    }
    without: dict[Dimension, dict[str, object]] = {
        Dimension.DATA_PARALLEL: {"max_dp_size": 1},
        Dimension.ZERO: {"data_parallel": (DataParallel.DDP,)},
        Dimension.TENSOR_PARALLEL: {"tp_sizes": (1,)},
        Dimension.SEQUENCE_PARALLEL: {"sequence_parallel": (SequenceParallel.NONE,)},
        Dimension.PIPELINE_PARALLEL: {"pp_sizes": (1,)},
        Dimension.RECOMPUTE: {"recompute": (Recompute.NONE,)},
    }
    limits = {f"space {request.space}": space[request.space]}
    limits |= {f"disable {dimension}": without[dimension] for dimension in request.disable}
    for name, limit in limits.items():
        for field, allowed in limit.items():
            request = _limited(request, field, allowed, name)
    if request.tp_sizes is None and (profiled is not None or request.stage_widths is not StageWidths.EQUAL):
        pools = map(len, pools_of(cluster)) if request.stage_widths is StageWidths.ANY else ()
        usual = usual_tp_sizes(request.stage_widths, [devices, *pools])
        request = replace(request, tp_sizes=tuple(size for size in usual if profiled is None or size in profiled))
    return replace(request, space=Space.FULL, disable=())


def _limited(request: SearchRequest, field: str, allowed: object, name: str) -> SearchRequest:
    """The request with what it says of a field, as far as a limit of that name allows it."""
    asked = getattr(request, field)
    if isinstance(allowed, tuple) and asked is not None:
        left = tuple(value for value in asked if value in allowed)
        if not left:
            listed = ", ".join(str(value) for value in asked)
            what = f"{field}: {name} and {listed} leave nothing to choose from"
            raise BadInput(f"search {request.name}", what, "change either")
        allowed = left
    return replace(request, **{field: allowed})


def configurations(request: SearchRequest, model: Model, cluster: Cluster, file: Path) -> tuple[Configuration, ...]:
    """Every configuration of a narrowed request, in ascending order.

    Raises BadInput, naming the search file, for a listed number that divides nothing: it would be left out in silence.
    """
    devices, layers, batches = cluster.num_devices, len(model.layers), batch_sizes(request)
    for number in request.num_microbatches or ():
        if all(batch % number for batch in batches):
            what = f"num_microbatches: {number} does not divide any global_batch_size"
            raise BadInput(file, what, "list divisors only")
    check_degrees(request, devices, layers, file)
    return tuple(
        Configuration(batch, count, pp_size, schedule, chunks, widths=own)
        for batch in batches
        for count in sorted(set(request.num_microbatches or divisors(batch)))
        if batch % count == 0
        for pp_size in pp_sizes(request, devices, layers)
        for schedule in sorted(set(request.schedules))
        for chunks in _chunks(request, layers, pp_size, schedule)
        for own in widths(request, devices, pp_size, schedule)
    )


def shardings(request: SearchRequest, model: Model, type_name: str, stage_size: int) -> tuple[Strategy, ...]:
    """Every way to shard a layer type over the ranks of a pipeline stage, each spelled in one way only.

    Where there is no tensor parallelism there is nothing to split the sequence by and no grid to stride, and where
    there is no data parallelism nothing to shard by. Ulysses shards parameters over all ranks.
    """
    outer = {EMBEDDING: request.embedding, HEAD: request.head}.get(type_name)
    kinds = request.recompute if outer is None else (Recompute.NONE,)
    found: set[Strategy] = set()
    for sharding in _grids(request, outer or OuterSpace(), stage_size):
        if misfit(model, type_name, sharding) is not None:
            continue
        if outer is not None:
            found.add(sharding)
            continue
        fields = {name: getattr(sharding, name) for name in Strategy.__struct_fields__}
        found |= {LayerStrategy(**fields, type=type_name, recompute=recompute) for recompute in kinds}
    return tuple(sorted(found))


def _chunks(request: SearchRequest, layers: int, pp_size: int, schedule: Schedule) -> tuple[int, ...]:
    """Numbers of chunks: several where the schedule is interleaved and they can be equal."""
    if not schedule.interleaves:
        return (1,)
    return tuple(v for v in sorted(set(request.chunks_per_stage)) if v > 1 < pp_size and layers % (v * pp_size) == 0)


def _grids(request: SearchRequest, outer: OuterSpace, stage_size: int) -> Iterator[Strategy]:
    kinds = outer.data_parallel or request.data_parallel
    splits = outer.sequence_parallel or request.sequence_parallel
    for tp_size in outer.tp_sizes or request.tp_sizes or divisors(stage_size):
        dp_size = stage_size // tp_size
        if stage_size % tp_size or tp_size > (request.max_tp_size or tp_size):
            continue
        if dp_size > (request.max_dp_size or dp_size):
            continue
        grid = tp_size > 1 < dp_size
        for sequence_parallel in splits if tp_size > 1 else (SequenceParallel.NONE,):
            shards = stage_size if sequence_parallel is SequenceParallel.ULYSSES else dp_size
            for data_parallel, shard_size in _sharings(request, kinds if shards > 1 else (DataParallel.DDP,), shards):
                for consecutive in sorted(set(request.tp_consecutive)) if grid else (True,):
                    yield Strategy(
                        tp_size=tp_size,
                        tp_consecutive=consecutive,
                        dp_size=dp_size,
                        data_parallel=data_parallel,
                        shard_size=shard_size,
                        sequence_parallel=sequence_parallel,
                    )


def _sharings(request: SearchRequest, kinds: Sequence[DataParallel], ranks: int) -> Iterator[tuple[DataParallel, int]]:
    """Kinds of data parallelism, each with the sizes of groups that so many ranks can share the states out in."""
    for kind in kinds:
        yield kind, 0
        for size in sorted(set(request.shard_sizes or ())) if kind is not DataParallel.DDP else ():
            if 1 < size < ranks and ranks % size == 0:
                yield kind, size
