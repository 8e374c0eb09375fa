"""A plan that spreads every layer alike: Galvatron's GLOBAL mode, made without profiles."""

from typing import NamedTuple

from msgspec import ValidationError

from shardwright_formats.cluster import Cluster
from shardwright_formats.errors import BadInput
from shardwright_formats.model import Model
from shardwright_formats.plan import Attention, PipelineStage, Plan, Precision, Schedule
from shardwright_formats.strategy import DataParallel, LayerStrategy, Recompute, SequenceParallel, Strategy

__all__ = ["UniformRequest", "even_cuts", "uniform_plan"]


class UniformRequest(NamedTuple):
    """The one strategy of all layers, and how a step is scheduled."""

    name: str
    global_batch_size: int
    num_microbatches: int
    tp_size: int
    pp_size: int
    data_parallel: DataParallel
    sequence_parallel: SequenceParallel
    recompute: Recompute
    schedule: Schedule
    precision: Precision
    attention: Attention


def uniform_plan(request: UniformRequest, model: Model, cluster: Cluster) -> Plan:
    """The plan with evenly cut layers; embedding and head are spread as the layers are.

    Raises BadInput when the numbers do not divide one another.
    """
    devices = cluster.num_devices
    if devices % (request.pp_size * request.tp_size):
        raise BadInput(
            f"cluster {cluster.name}",
            f"tp {request.tp_size} x pp {request.pp_size} does not divide {devices} devices",
            "choose divisors",
        )
    if request.pp_size > len(model.layers):
        what = f"{request.pp_size} pipeline stages for {len(model.layers)} layers"
        raise BadInput(f"model {model.name}", what, "lower pp")
    width = devices // request.pp_size
    dp_size = width // request.tp_size
    outer = Strategy(
        tp_size=request.tp_size,
        dp_size=dp_size,
        data_parallel=request.data_parallel if dp_size > 1 else DataParallel.DDP,
        sequence_parallel=request.sequence_parallel if request.tp_size > 1 else SequenceParallel.NONE,
    )
    fields = {name: getattr(outer, name) for name in Strategy.__struct_fields__}
    cuts = even_cuts(len(model.layers), request.pp_size)
    try:
        return Plan(
            name=request.name,
            model=model,
            cluster=cluster,
            global_batch_size=request.global_batch_size,
            num_microbatches=request.num_microbatches,
            schedule=request.schedule,
            precision=request.precision,
            attention=request.attention,
            stages=tuple(
                PipelineStage(ranks=tuple(range(i * width, (i + 1) * width)), layers=((cuts[i], cuts[i + 1]),))
                for i in range(request.pp_size)
            ),
            embedding=outer,
            head=outer,
            layers=tuple(LayerStrategy(**fields, type=name, recompute=request.recompute) for name in model.layers),
        )
    except (ValueError, ValidationError) as error:
        raise BadInput(f"uniform plan {request.name}", str(error), "choose sizes that divide one another") from None


def even_cuts(layers: int, pp_size: int) -> tuple[int, ...]:
    """Where to cut layers evenly: pp_size + 1 layer numbers, from 0.

    What is left over goes to stages in the middle, later ones first, then to the last: the first also holds the
    embedding, and the most microbatches.
    """
    share, left = divmod(layers, pp_size)
    order = [*range(pp_size - 2, 0, -1), pp_size - 1]
    sizes = [share + (i in order[:left]) for i in range(pp_size)]
    return tuple(sum(sizes[:i]) for i in range(pp_size + 1))
