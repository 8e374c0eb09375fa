"""One strategy for all layers, and the plan with that strategy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict, replace

from shardwright.io import BadInput
from shardwright.plan.axes import effective
from shardwright.plan.chunks import placed
from shardwright.types import Cluster, DataParallel, ExpertStrategy, LayerStrategy, Model, Strategy
from shardwright.types.plan import GradientReduction, PipelineStage, Plan, Schedule


class UniformStrategy(NamedTuple):
    """One strategy for all layers, and how samples and layers are divided."""

    layer: LayerStrategy
    """Strategy of each layer of any type; the sharding of experts does not apply to layers without experts."""
    pp_size: int = 1
    micro_batch_size: int = 1
    """Samples of a data-parallel rank in a microbatch."""
    gradient_reduction: GradientReduction = GradientReduction.DEFERRED
    chunks: int = 1
    """Layer ranges of a pipeline stage."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Layers of each pipeline stage and chunk, in the order of the layers; empty if they are cut evenly."""

    def having(self, name: str, **changes: Any) -> "UniformStrategy":  # noqa: ANN401 (of the fields of a layer)
        """Return the choice with other values for its layers; BadInput naming `name` if they contradict one another."""
        with sizes_that_fit(name):
            return self._replace(layer=replace(self.layer, **changes))

    @property
    def shard_groups(self) -> int:
        """Number of groups of data-parallel ranks over each of which states are sharded."""
        return self.replicas // self.layer.shard_size if self.layer.shard_size else 1

    @property
    def replicas(self) -> int:
        """Number of ranks that have the same part of the weights: data-parallel and context-parallel ones."""
        return self.layer.dp_size * self.layer.cp_size

    @property
    def shares_context(self) -> bool:
        """Return whether positions are split over ranks (context parallelism)."""
        return self.layer.cp_size > 1


@contextmanager
def sizes_that_fit(name: str) -> Iterator[None]:
    """Raise BadInput naming a plan for sizes that a strategy or a plan refuses."""
    try:
        yield
    except ValueError as error:
        raise BadInput(f"uniform plan {name}", str(error), "choose sizes that divide one another") from None


def with_experts(name: str, model: Model, uniform: UniformStrategy, ep_size: int, etp_size: int) -> UniformStrategy:
    """Return the choice with expert parallelism, and the experts' states sharded as the rest of a layer.

    If `ep_size` is 1 and `etp_size` the layer's tp_size, each rank has its share of the features of all experts, as
    without expert parallelism: the choice stays as it is. Raises BadInput for models without experts, and for sizes
    that do not fit.
    """
    if (ep_size, etp_size) == (1, uniform.layer.tp_size):
        return uniform
    if all(model.types[kind].experts is UNSET for kind in model.layers):
        raise BadInput(f"model {model.name}", "has no experts to shard", "leave out ep and etp")
    kind = uniform.layer.data_parallel
    experts = ExpertStrategy(ep_size=ep_size, etp_size=etp_size, data_parallel=kind)
    return uniform.having(name, experts=experts)


def plan_of_uniform(
    name: str,
    uniform: UniformStrategy,
    model: Model,
    cluster: Cluster,
    vocabulary: Strategy | None = None,
    **settings: Any,  # noqa: ANN401 (the types are those of the plan's fields)
) -> Plan:
    """Return the plan whose layers all have one strategy.

    `vocabulary` shards embedding and head, by default as the layers; `settings` are the other fields of the plan.
    Raises BadInput if the numbers do not divide one another.
    """
    ranges, layer = uniform.pp_size * uniform.chunks, uniform.layer
    if ranges > len(model.layers) and not uniform.ranges:
        kind = "pipeline stages" if uniform.chunks == 1 else "layer ranges"
        raise BadInput(f"model {model.name}", f"{ranges} {kind} for {len(model.layers)} layers", "lower pp")
    cut = uniform.ranges or tuple(pairwise(even_cuts(len(model.layers), ranges)))
    with sizes_that_fit(name):
        outer = effective(vocabulary or layer)
        return Plan(
            name=name,
            model=model,
            cluster=cluster,
            stages=stages_of(cut, uniform.pp_size, layer.tp_size * layer.cp_size * layer.dp_size, settings["schedule"]),
            embedding=outer,
            head=outer,
            layers=tuple(_of_type(layer, kind, model) for kind in model.layers),
            **settings,
        )


def even_cuts(layers: int, pp_size: int) -> tuple[int, ...]:
    """Return cuts that divide layers evenly: pp_size + 1 layer indices, from 0.

    The remaining layers go to stages in the middle, later ones first, then to the last stage: the first also holds the
    embedding, and the most microbatches.
    """
    share, left = divmod(layers, pp_size)
    order = [*range(pp_size - 2, 0, -1), pp_size - 1]
    sizes = [share + (i in order[:left]) for i in range(pp_size)]
    return tuple(sum(sizes[:i]) for i in range(pp_size + 1))


def stages_of(
    ranges: Sequence[tuple[int, int]], pp_size: int, width: int, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> tuple[PipelineStage, ...]:
    """Return pipeline stages on equal blocks of ranks, which hold the layer ranges as the schedule places them."""
    ranks, held = [tuple(range(i * width, (i + 1) * width)) for i in range(pp_size)], placed(ranges, schedule, pp_size)
    return tuple(PipelineStage(ranks=ranks[i], layers=held[i]) for i in range(pp_size))


def spelled(layer: LayerStrategy) -> LayerStrategy:
    """Return a strategy as a search writes it: without choices that have no effect at its sizes.

    States of experts that one rank holds are not sharded.
    """
    layer = replace(layer, **asdict(effective(layer)))
    if layer.experts is UNSET or (grid := layer.expert_grid) is None or grid.dp_size > 1:
        return layer
    return replace(layer, experts=replace(layer.experts, data_parallel=DataParallel.DDP))


def _of_type(layer: LayerStrategy, kind: str, model: Model) -> LayerStrategy:
    experts = UNSET if model.types[kind].experts is UNSET else layer.experts
    return spelled(replace(layer, type=kind, experts=experts))
