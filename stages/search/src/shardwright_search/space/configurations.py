"""The configurations that are searched, with how many ranks their pipeline stages may have."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from math import ceil, isqrt
from pathlib import Path
from typing import NamedTuple, assert_never

from msgspec import UNSET
from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.plan.schedules.registry import schedule_of
from shardwright.plan.schedules.schedule import ClosedForm
from shardwright.types.cluster import Cluster
from shardwright.types.model import Model
from shardwright.types.plan import GradientReduction, Schedule
from shardwright.types.strategy import (
    PARTS,
    RECOMPUTE_PARTS,
    DataParallel,
    LayerStrategy,
    Recompute,
    SequenceParallel,
    Strategy,
)
from shardwright_search.space.placements import NodeTypes, pools_of
from shardwright_search.space.request import Dimension, SearchRequest, Space, StageWidths, batch_sizes

_WHOLE: dict[str, object] = {"cp_sizes": (1,)}
_LIKE_THE_LAYER: dict[str, object] = {"ep_sizes": ()}
_PLAIN: dict[str, object] = {
    "data_parallel": (DataParallel.DDP,),
    "recompute": (Recompute.NONE,),
    **_WHOLE,
    **_LIKE_THE_LAYER,
}
_LIMITS_WITHOUT: Mapping[Dimension, Mapping[str, object]] = {
    Dimension.DATA_PARALLEL: {"max_dp_size": 1},
    Dimension.ZERO: {"data_parallel": (DataParallel.DDP,)},
    Dimension.TENSOR_PARALLEL: {"tp_sizes": (1,)},
    Dimension.SEQUENCE_PARALLEL: {"sequence_parallel": (SequenceParallel.NONE,)},
    Dimension.CONTEXT_PARALLEL: _WHOLE,
    Dimension.EXPERT_PARALLEL: _LIKE_THE_LAYER,
    Dimension.PIPELINE_PARALLEL: {"pp_sizes": (1,)},
    Dimension.RECOMPUTE: {"recompute": (Recompute.NONE,)},
}
"""The values of options that remain if a dimension is disabled."""
_MAX_LAYERS = 1_000
"""The most layers of a model: on two devices 2 CPU seconds and 200 MiB."""
_ENDS = 2
"""Pipeline stages that may be without a block: the first has the embedding, the last the head."""
Widths = StageWidths | tuple[int, ...]
"""Equal widths, any widths, or the width of each pipeline stage."""
Lacking = tuple[int, int]
"""How many layers fewer the first and the last chunk have than the others."""


class Configuration(NamedTuple):
    """The numbers that are fixed before the layers are cut and each gets its strategy."""

    global_batch_size: int
    num_microbatches: int
    pp_size: int
    schedule: Schedule
    num_chunks: int = 1
    """Layer ranges of a pipeline stage."""
    lacking: Lacking = (0, 0)
    """How many layers fewer the first chunk, with the embedding, and the last, with the head, have than the others."""
    layers: LayerStrategy | None = None
    """The one strategy of all layers, up to their types; None: each has its own."""
    buffer_tokens: int | None = None
    """Tokens that Megatron's gather buffer holds, which no layer may exceed; None: it is not counted."""
    widths: Widths = StageWidths.EQUAL
    """Ranks of the pipeline stages; a tuple if they are unequal."""
    ends: tuple[NodeTypes, NodeTypes] | None = None
    """The node types of the first and last stage, if the cost of tied parameters depends on them; None: any."""
    outer: Strategy | None = None
    """The one strategy of embedding and head; None: each has its own."""
    block_in_each_stage: bool = False
    """Whether every pipeline stage must have a block, in addition to the embedding or the head."""

    @property
    def edges(self) -> int:
        """Return the least number of process groups of a rank with neighbouring stages.

        Between stages of unequal width only one is certain: others depend on the layouts at both ends of a cut.
        """
        if self.pp_size == 1:
            return 0
        return 4 if self.num_chunks > 1 else 2 if self.widths is StageWidths.EQUAL else 1

    @property
    def microbatch_samples(self) -> int:
        """Return the samples of one micro-batch."""
        return self.global_batch_size // self.num_microbatches

    def chunk_ends(self, num_layers: int) -> tuple[int, ...]:
        """Return the layer after the last of each chunk, in the order of the layers."""
        chunks = self.pp_size * self.num_chunks
        size = (num_layers + sum(self.lacking)) // chunks
        return (*(size * chunk - self.lacking[0] for chunk in range(1, chunks)), num_layers)

    def in_flight(self, stage: int) -> int:
        """Return the most activations that a pipeline stage holds at once."""
        schedule = schedule_of(self.schedule)
        return schedule.in_flight(self.pp_size, self.num_microbatches, stage, self.num_chunks)

    @property
    def closed_forms(self) -> tuple[ClosedForm, ...]:
        """Return the coefficients of T, which is the largest of the closed forms; with one chunk there is one.

        Raises ValueError for schedules whose passes hide others: labels have no column for the largest A - C.
        """
        schedule = schedule_of(self.schedule)
        if not is_solved(self.schedule):
            hidden = next(kind for kind in schedule.kinds if kind.fill != 1)
            raise ValueError(f"the search has no bound for schedules with passes of kind {hidden}")
        return schedule.closed_forms(self.num_microbatches, self.num_chunks)

    def __str__(self) -> str:
        chunks = f" x {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        if any(self.lacking):
            chunks += " ({} layers less in the first, {} in the last)".format(*self.lacking)
        ranks = f" of {' + '.join(map(str, self.widths))} ranks" if isinstance(self.widths, tuple) else ""
        if self.widths is StageWidths.ANY:
            ranks = " of any widths"
        ends = "" if self.ends is None else f" from {' and '.join(self.ends[0])} to {' and '.join(self.ends[1])}"
        return (
            f"batch {self.global_batch_size}, {self.num_microbatches} microbatches, "
            f"pp_size {self.pp_size}{ranks}{ends}{chunks}, {self.schedule}"
        )


def narrowed(request: SearchRequest, cluster: Cluster, profiled: Collection[int] | None = None) -> SearchRequest:
    """Return the request with its named space and disabled dimensions expressed by the other options.

    `profiled`: the tensor-parallel sizes that can be priced, if not all; if the request lists none, these are taken.
    Raises BadInput, naming the search, if a space or a disabled dimension leaves none of an option's values.
    """
    limits = {f"space {request.space}": _limits_of_space(request, cluster.num_devices)}
    limits |= {f"disable {dimension}": _LIMITS_WITHOUT[dimension] for dimension in request.disable}
    for name, limit in limits.items():
        for field, allowed in limit.items():
            request = _limited(request, field, allowed, name)
    if request.tp_sizes is None and (profiled is not None or request.stage_widths is not StageWidths.EQUAL):
        sizes = _possible_tp_sizes(request.stage_widths, cluster)
        request = replace(request, tp_sizes=tuple(size for size in sizes if profiled is None or size in profiled))
    return replace(request, space=Space.FULL, disable=())


def _limits_of_space(request: SearchRequest, devices: int) -> Mapping[str, object]:
    """Return the limits of a request's named space, by option."""
    match request.space:
        case Space.FULL:
            return {}
        case Space.DP:
            return {"pp_sizes": (1,), "tp_sizes": (1,), **_PLAIN}
        case Space.ZERO:
            kinds = {"data_parallel": (DataParallel.ZERO2, DataParallel.ZERO3)}
            return {"pp_sizes": (1,), "tp_sizes": (1,), **kinds, **_WHOLE, **_LIKE_THE_LAYER}
        case Space.TP:
            return {"pp_sizes": (1,), "tp_sizes": (devices,), **_PLAIN}
        case Space.PP:
            return {"pp_sizes": (devices,), "tp_sizes": (1,), **_PLAIN}
        case Space.DP_TP:
            return {"pp_sizes": (1,), **_PLAIN}
        case Space.DP_PP:
            return {"tp_sizes": (1,), **_PLAIN}
        case Space.THREE_D:
            return {"fine_grained": False, **_PLAIN}
        case Space.FASOP:
            few = {"max_tp_size": min(4, request.max_tp_size or 4), "sequence_parallel": (SequenceParallel.NONE,)}
            return {"fine_grained": False, **few, **_PLAIN}
        case unknown:
            assert_never(unknown)


def _possible_tp_sizes(widths: StageWidths | tuple[tuple[int, ...], ...], cluster: Cluster) -> list[int]:
    """Return the tensor-parallel sizes that stages of some widths can have, ascending."""
    pools = map(len, pools_of(cluster)) if widths is StageWidths.ANY else ()
    sizes = sorted({size for number in (cluster.num_devices, *pools) for size in divisors(number)})
    if not isinstance(widths, tuple):
        return sizes
    return [size for size in sizes if any(width % size == 0 for each in widths for width in each)]


def _limited(request: SearchRequest, field: str, allowed: object, name: str) -> SearchRequest:
    """Return the request with a field restricted to the values that a limit of that name allows."""
    asked = getattr(request, field)
    # Sets of latents, which the model may not have, stay here: no limit allows them.
    asked = RECOMPUTE_PARTS if asked == PARTS else asked
    if isinstance(allowed, tuple) and asked is not None:
        left = tuple(value for value in asked if value in allowed)
        if allowed and not left:
            listed = ", ".join(str(value) for value in asked)
            problem = f"{field}: {name} and {listed} leave nothing to choose from"
            raise BadInput(f"search {request.name}", problem, "change either")
        allowed = left
    return replace(request, **{field: allowed})


def configurations(request: SearchRequest, model: Model, cluster: Cluster, file: Path) -> tuple[Configuration, ...]:
    """Return the configurations of a narrowed request, in ascending order.

    Raises BadInput, naming the search file, for a listed number that no plan has: it would be left out silently.
    """
    devices, layers = cluster.num_devices, len(model.layers)
    for problem, remedy in (*_problems(request, devices, layers), *_expert_problems(request, model)):
        raise BadInput(file, problem, remedy)
    return tuple(
        Configuration(batch, count, pp_size, schedule, *chunks, widths=widths)
        for batch in batch_sizes(request)
        for count in sorted(set(request.num_microbatches or divisors(batch)))
        if batch % count == 0
        for pp_size in _pp_sizes(request, devices, layers)
        for schedule in sorted(filter(is_solved, set(request.schedules)))
        for chunks in _chunks(request, layers, pp_size, schedule)
        for widths in _widths(request, devices, pp_size, schedule)
    )


def is_solved(schedule: Schedule) -> bool:
    """Return whether the search has a closed form for a schedule: it has none if some passes hide others."""
    return all(kind.fill == 1 for kind in schedule_of(schedule).kinds)


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a positive number, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def most_stages(layers: int) -> int:
    """Return the most pipeline stages that a number of layers can have; the first and last stage may have no layer."""
    return layers + _ENDS


def _pp_sizes(request: SearchRequest, devices: int, layers: int) -> list[int]:
    """Return the pipeline degrees of a request, ascending."""
    possible: Sequence[int]
    match request.stage_widths:
        case StageWidths.EQUAL:
            possible = divisors(devices)
        case StageWidths.ANY:
            possible = range(1, devices + 1)
        case listed:
            possible = tuple(map(len, listed))
    most = min(most_stages(layers), request.max_pp_size or devices)
    return sorted({size for size in request.pp_sizes or possible if size <= most and size in possible})


def _widths(request: SearchRequest, devices: int, pp_size: int, schedule: Schedule) -> tuple[Widths, ...]:
    """Return the possible widths of this many pipeline stages.

    Stages are equally wide if they are interleaved, or if all layers share one strategy, which has a number of ranks.
    """
    equal: tuple[Widths, ...] = (StageWidths.EQUAL,) if devices % pp_size == 0 else ()
    may_differ = not schedule.interleaves and request.fine_grained and pp_size > 1
    match request.stage_widths:
        case StageWidths.EQUAL:
            return equal
        case StageWidths.ANY:
            return (StageWidths.ANY,) if may_differ else equal
        case listed:
            fitting = sorted({each for each in listed if len(each) == pp_size})
            unequal = [each for each in fitting if len(set(each)) > 1]
            return (*(equal if len(unequal) < len(fitting) else ()), *(unequal if may_differ else ()))


def _problems(request: SearchRequest, devices: int, layers: int) -> Iterator[tuple[str, str]]:
    """Yield each listed number that no plan has, in words, and what to do about it."""
    for number in request.num_microbatches or ():
        if all(batch % number for batch in batch_sizes(request)):
            yield f"num_microbatches: {number} does not divide any global_batch_size", "list divisors only"
    if layers > _MAX_LAYERS:
        problem = f"a model of {layers} layers: time and memory of a search grow with their square"
        yield problem, f"search for at most {_MAX_LAYERS} layers"
    for schedule in sorted(set(request.schedules)):
        if is_solved(schedule):
            continue
        if not any(map(is_solved, request.schedules)):
            yield f"schedules: {schedule} is looked for behind the best plan of another schedule", "list 1f1b, too"
        if request.compile:
            yield f"schedules: {schedule} splits backward passes, compiled ones are joint", "leave compile out"
        if request.gradient_reduction is GradientReduction.EVERY_MICROBATCH:
            yield f"schedules: {schedule} sums gradients over a step", "choose gradient_reduction deferred"
    asked, ranks = request.stage_widths, f"the number of devices, {devices}"
    listed = asked if isinstance(asked, tuple) else ()
    for each in listed:
        unequal, name = len(set(each)) > 1, f"stage_widths: {list(each)}"
        if sum(each) != devices:
            yield f"{name} are {sum(each)} ranks, the cluster has {devices} devices", "list widths of all devices"
        if unequal and not request.fine_grained:
            yield f"{name}, but one strategy for all layers is of one width", "set fine_grained, or list equal widths"
        if unequal and all(schedule.interleaves for schedule in request.schedules if is_solved(schedule)):
            yield f"{name}, but interleaved stages are equally wide", "allow 1f1b or gpipe, or list equal widths"
    widths = {width for each in listed for width in each} or {devices}
    for field in ("tp_sizes", "cp_sizes", "shard_sizes", "ep_sizes", "etp_sizes"):
        for number in getattr(request, field) or ():
            if number > devices if asked is StageWidths.ANY else all(width % number for width in widths):
                where = "any of stage_widths" if listed else ranks
                yield f"{field}: {number} does not divide {where}", "list divisors only"
    for number in request.pp_sizes or ():
        if asked is StageWidths.EQUAL and devices % number:
            yield f"pp_sizes: {number} does not divide {ranks}", "list divisors only"
        if asked is StageWidths.ANY and number > devices:
            yield f"pp_sizes: {number} is more than {ranks}", "list at most that many"
        if listed and number not in map(len, listed):
            yield f"pp_sizes: no stage_widths are of {number} stages", "list such, or leave it out"
    for number in request.pp_sizes or map(len, listed):
        if number > most_stages(layers):
            yield f"pp_sizes: {number} pipeline stages for {layers} layers", "list at most that many"


def _expert_problems(request: SearchRequest, model: Model) -> Iterator[tuple[str, str]]:
    """Yield each listed degree into which no layer's experts can be sharded, and what to do about it."""
    experts = [kind.experts for name in model.layers if (kind := model.types[name]).experts is not UNSET]
    if request.ep_sizes and not experts:
        yield f"ep_sizes: {model.name} has no experts to shard", "leave it empty"
    for parts in request.ep_sizes:
        if all(each.number % parts for each in experts):
            yield f"ep_sizes: {parts} does not divide the experts of any layer", "list divisors of their number"


def _chunks(request: SearchRequest, layers: int, pp_size: int, schedule: Schedule) -> Iterator[tuple[int, Lacking]]:
    """Yield numbers of chunks, several if the schedule is interleaved, with the layers missing at both ends.

    Chunks are as small as possible; if they cannot all be equal, the first and the last have fewer layers.
    """
    if not schedule.interleaves:
        yield 1, (0, 0)
        return
    for count in sorted(set(request.chunks_per_stage)):
        chunks = count * pp_size
        size = ceil(layers / chunks)
        lacking = size * chunks - layers
        if count > 1 < pp_size:
            yield from (
                (count, (ahead, lacking - ahead)) for ahead in range(max(0, lacking - size), min(size, lacking) + 1)
            )


# Demands of another system on a plan, in addition to the request.


class Outer(StrEnum):
    """How the strategies of embedding and head depend on those of layers."""

    FREE = "free"
    """Each has its own."""
    ALIKE = "alike"
    """Both share one."""
    AS_LAYERS = "as_layers"
    """They have the one strategy that all layers share."""


def _any(configuration: Configuration) -> bool:
    return True


class Demands(NamedTuple):
    """Demands on a plan for which a request has no field; by default none."""

    outer: Outer = Outer.FREE
    block_in_each_stage: bool = False
    """Whether every pipeline stage must have a block, in addition to the embedding or the head."""
    allows: Callable[[Configuration], bool] = _any
    """Whether a configuration may be searched; its `layers` are the strategy that all layers share, if they do."""
    elsewhere: bool = False
    """Whether another system runs the plan: limits of this project's context parallelism do not apply."""


NO_DEMANDS = Demands()
