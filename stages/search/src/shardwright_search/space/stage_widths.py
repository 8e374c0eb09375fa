"""How many ranks pipeline stages may have: what a request asks for, by pipeline degree and schedule."""

from collections.abc import Collection, Sequence
from math import isqrt
from pathlib import Path

from shardwright_formats.io.errors import BadInput
from shardwright_formats.types.plan import Schedule
from shardwright_search.space.request import SearchRequest, StageWidths

_MAX_LAYERS = 1_000
"""On two devices 2 CPU seconds and 200 MiB."""
_ENDS = 2
"""Pipeline stages that may be without a block: the first has the embedding, the last the head."""
Widths = StageWidths | tuple[int, ...]
"""Equal ones, any, or those of each pipeline stage."""


def divisors(number: int) -> tuple[int, ...]:
    """Return every divisor of a positive number, ascending."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))


def usual_tp_sizes(asked: StageWidths | Sequence[Sequence[int]], devices: Collection[int]) -> tuple[int, ...]:
    """Tensor-parallel degrees that divide the devices, all or a node type's, and the ranks of a stage."""
    known = set(devices) if isinstance(asked, StageWidths) else {width for each in asked for width in each}
    every = sorted({size for number in devices for size in divisors(number)})
    return tuple(size for size in every if any(width % size == 0 for width in known))


def pp_sizes(request: SearchRequest, devices: int, layers: int) -> tuple[int, ...]:
    """The pipeline degrees of a request, ascending."""
    match request.stage_widths:
        case StageWidths.EQUAL:
            every = divisors(devices)
        case StageWidths.ANY:
            every = tuple(range(1, devices + 1))
        case listed:
            every = tuple(map(len, listed))
    most = layers + _ENDS if request.max_pp_size is None else min(layers + _ENDS, request.max_pp_size)
    return tuple(sorted({size for size in request.pp_sizes or every if size <= most and size in every}))


def widths(request: SearchRequest, devices: int, pp_size: int, schedule: Schedule) -> tuple[Widths, ...]:
    """The widths of so many pipeline stages, equal ones spelled in one way.

    Interleaved stages are equally wide, and so are those whose layers share one strategy, which says on how many ranks.
    """
    equal: tuple[Widths, ...] = (StageWidths.EQUAL,) if devices % pp_size == 0 else ()
    unequal = not schedule.interleaves and request.fine_grained and pp_size > 1
    match request.stage_widths:
        case StageWidths.EQUAL:
            return equal
        case StageWidths.ANY:
            return (StageWidths.ANY,) if unequal else equal
        case listed:
            own = sorted({each for each in listed if len(each) == pp_size})
            alike = any(len(set(each)) == 1 for each in own)
            return (*(equal if alike else ()), *(each for each in own if unequal and len(set(each)) > 1))


def check_degrees(request: SearchRequest, devices: int, layers: int, file: Path) -> None:
    """Raise BadInput, naming the search file, for a listed degree or width that no plan has."""
    if layers > _MAX_LAYERS:
        what = f"a model of {layers} layers: time and memory of a search grow with their square"
        raise BadInput(file, what, f"search for at most {_MAX_LAYERS} layers")
    listed = request.stage_widths
    ranks = f"the number of devices, {devices}"
    if isinstance(listed, tuple):
        for each in listed:
            if sum(each) != devices:
                what = f"stage_widths: {list(each)} are {sum(each)} ranks, the cluster has {devices} devices"
                raise BadInput(file, what, "list widths of all devices")
            if len(set(each)) > 1 and not request.fine_grained:
                what = f"stage_widths: {list(each)}, but one strategy for all layers is of one width"
                raise BadInput(file, what, "set fine_grained, or list equal widths")
            if len(set(each)) > 1 and all(schedule.interleaves for schedule in request.schedules):
                what = f"stage_widths: {list(each)}, but interleaved stages are equally wide"
                raise BadInput(file, what, "allow 1f1b or gpipe, or list equal widths")
    known = {number for each in listed for number in each} if isinstance(listed, tuple) else {devices}
    for field, numbers in (("tp_sizes", request.tp_sizes), ("shard_sizes", request.shard_sizes)):
        for number in numbers or ():
            possible = number <= devices if listed is StageWidths.ANY else any(width % number == 0 for width in known)
            if not possible:
                where = "any of stage_widths" if isinstance(listed, tuple) else ranks
                raise BadInput(file, f"{field}: {number} does not divide {where}", "list divisors only")
    for number in request.pp_sizes or ():
        if listed is StageWidths.EQUAL and devices % number:
            raise BadInput(file, f"pp_sizes: {number} does not divide {ranks}", "list divisors only")
        if listed is StageWidths.ANY and number > devices:
            raise BadInput(file, f"pp_sizes: {number} is more than {ranks}", "list at most that many")
        if isinstance(listed, tuple) and number not in map(len, listed):
            raise BadInput(file, f"pp_sizes: no stage_widths are of {number} stages", "list such, or leave it out")
    for number in request.pp_sizes or (map(len, listed) if isinstance(listed, tuple) else ()):
        if number > layers + _ENDS:
            raise BadInput(file, f"pp_sizes: {number} pipeline stages for {layers} layers", "list at most that many")
