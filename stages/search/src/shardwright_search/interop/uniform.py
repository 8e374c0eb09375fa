"""A plan that spreads every layer alike: Galvatron's GLOBAL mode, made without profiles."""

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import asdict, replace

from shardwright_formats.io import BadInput
from shardwright_formats.semantics.canonical import effective
from shardwright_formats.types.cluster import Cluster
from shardwright_formats.types.model import Model
from shardwright_formats.types.plan import PipelineStage, Plan
from shardwright_formats.types.strategy import DataParallel, LayerStrategy, Recompute, Strategy
from shardwright_search.options import UniformRequest


def uniform_plan(name: str, request: UniformRequest, model: Model, cluster: Cluster) -> Plan:
    """The plan with evenly cut layers.

    Raises BadInput when the numbers do not divide one another.
    """
    width = _stage_width(request, model, cluster)
    cuts = even_cuts(len(model.layers), request.pp_size * request.layer_ranges)
    try:
        layer = _strategy(request, width)
        vocabulary = _vocabulary(request, width)
        return Plan(
            name=name,
            model=model,
            cluster=cluster,
            global_batch_size=request.global_batch_size,
            num_microbatches=request.num_microbatches,
            schedule=request.schedule,
            gradient_reduction=request.gradient_reduction,
            precision=request.precision,
            attention=request.attention,
            compile=request.compile,
            stages=stages_of(cuts, request.pp_size, width),
            embedding=vocabulary,
            head=vocabulary,
            layers=tuple(layer_of(layer, kind, request.recompute) for kind in model.layers),
        )
    except ValueError as error:
        raise BadInput(f"uniform plan {name}", str(error), "choose sizes that divide one another") from None


def even_cuts(layers: int, pp_size: int) -> tuple[int, ...]:
    """Where to cut layers evenly: pp_size + 1 layer numbers, from 0.

    What is left over goes to stages in the middle, later ones first, then to the last: the first also holds the
    embedding, and the most microbatches.
    """
    share, left = divmod(layers, pp_size)
    order = [*range(pp_size - 2, 0, -1), pp_size - 1]
    sizes = [share + (i in order[:left]) for i in range(pp_size)]
    return tuple(sum(sizes[:i]) for i in range(pp_size + 1))


def stages_of(cuts: Sequence[int], pp_size: int, width: int) -> tuple[PipelineStage, ...]:
    """Pipeline stages that are equal blocks of ranks, and hold the ranges between cuts by turns."""
    ranges = tuple(pairwise(cuts))
    return tuple(
        PipelineStage(ranks=tuple(range(i * width, (i + 1) * width)), layers=ranges[i::pp_size]) for i in range(pp_size)
    )


def layer_of(strategy: Strategy, kind: str, recompute: Recompute) -> LayerStrategy:
    """The strategy of a layer of a type."""
    return LayerStrategy(**asdict(strategy), type=kind, recompute=recompute)


def _stage_width(request: UniformRequest, model: Model, cluster: Cluster) -> int:
    """Ranks of a pipeline stage."""
    devices = cluster.num_devices
    for name, tp_size in (("tp", request.tp_size), ("vocab-tp", request.vocab_tp_size or 1)):
        if devices % (request.pp_size * tp_size):
            what = f"{name} {tp_size} x pp {request.pp_size} does not divide {devices} devices"
            raise BadInput(f"cluster {cluster.name}", what, "choose divisors")
    ranges = request.pp_size * request.layer_ranges
    if ranges > len(model.layers):
        kind = "pipeline stages" if request.layer_ranges == 1 else "layer ranges"
        what = f"{ranges} {kind} for {len(model.layers)} layers"
        raise BadInput(f"model {model.name}", what, "lower pp")
    return devices // request.pp_size


def _strategy(request: UniformRequest, width: int) -> Strategy:
    return effective(
        Strategy(
            tp_size=request.tp_size,
            tp_consecutive=request.tp_consecutive,
            dp_size=width // request.tp_size,
            data_parallel=request.data_parallel,
            shard_size=request.shard_size or 0,
            sequence_parallel=request.sequence_parallel,
        )
    )


def _vocabulary(request: UniformRequest, width: int) -> Strategy:
    """As the layers where nothing else is asked for."""
    data_parallel = request.vocab_data_parallel or request.data_parallel
    own = replace(
        request,
        tp_size=request.vocab_tp_size or request.tp_size,
        data_parallel=data_parallel,
        shard_size=None if data_parallel is DataParallel.DDP else request.shard_size,
        sequence_parallel=request.vocab_sequence_parallel or request.sequence_parallel,
    )
    return _strategy(own, width)
