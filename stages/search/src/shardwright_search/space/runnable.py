"""The context parallelism of a request that the runtime has for a model."""

from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from shardwright.io import BadInput
from shardwright.models.context import Obstacle, context_obstacle, gpu_format, ring_obstacle
from shardwright.types import Cluster, ContextParallel, Model
from shardwright_search.space.request import SearchRequest

_OUTER = "embedding", "head"


def runnable(request: SearchRequest, model: Model, cluster: Cluster, file: Path) -> SearchRequest:
    """Return a request without context parallelism that the runtime does not support for a model.

    Raises BadInput, naming the search file, where that leaves nothing.
    """
    obstacle = _obstacle(request, model, cluster)
    ring = ring_obstacle(model, request.attention)
    if ring is not None and ContextParallel.GATHER in request.context:
        request = replace(request, context=(ContextParallel.GATHER,))
    elif ring is not None:
        obstacle = obstacle or ring
    return request if obstacle is None else _whole(request, file, obstacle)


def left_out(request: SearchRequest, model: Model, cluster: Cluster) -> Iterator[str]:
    """Yield the requested options that the runtime does not support for a model, one line each."""
    if max(_sizes(request)) == 1:
        return
    obstacle = _obstacle(request, model, cluster)
    if obstacle is not None:
        yield f"no cp_size above 1: {obstacle.problem}"
    elif ContextParallel.RING in request.context and (ring := ring_obstacle(model, request.attention)) is not None:
        yield f"no context ring: {ring.problem}"


def _obstacle(request: SearchRequest, model: Model, cluster: Cluster) -> Obstacle | None:
    return context_obstacle(model, request.attention, request.compile, gpu_format(request.precision, cluster))


def _whole(request: SearchRequest, file: Path, obstacle: Obstacle) -> SearchRequest:
    """Return a request in which no layer uses context parallelism."""
    if 1 not in request.cp_sizes or any(1 not in (_outer_sizes(request, name) or (1,)) for name in _OUTER):
        raise BadInput(file, f"cp_sizes: {obstacle.problem}", f"list 1, or {obstacle.remedy}")
    outer = {name: replace(getattr(request, name), cp_sizes=None) for name in _OUTER}
    return replace(request, cp_sizes=(1,), **outer)


def _outer_sizes(request: SearchRequest, name: str) -> tuple[int, ...] | None:
    sizes: tuple[int, ...] | None = getattr(request, name).cp_sizes
    return sizes


def _sizes(request: SearchRequest) -> Iterator[int]:
    for sizes in (request.cp_sizes, *(_outer_sizes(request, name) for name in _OUTER)):
        yield from sizes or ()
